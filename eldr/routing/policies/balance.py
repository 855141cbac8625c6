"""Load-only policies: the baselines."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from eldr.routing.decision import Choice, Context
from eldr.routing.policies.base import Policy, least, least_requests, relative_load


class Random(Policy):
    """Any candidate, with probability proportional to its weight."""

    name: ClassVar[str] = "random"

    def choose(self, context: Context) -> Choice:
        """A weighted draw."""
        edges = np.cumsum(context.table.weight[context.candidates])
        at = np.searchsorted(edges, edges[-1] * (context.draw / 2**64), side="right")
        return Choice(int(context.candidates[min(int(at), len(edges) - 1)]), "draw")


class RoundRobin(Policy):
    """In turn; a worker of weight 2 gets two turns for one of a worker of weight 1."""

    name: ClassVar[str] = "round_robin"

    def choose(self, context: Context) -> Choice:
        """The candidate whose weighted count of turns is lowest, then the lowest slot."""
        slots = context.candidates
        table = context.table
        due = table.turns[slots] + 1.0 / table.weight[slots]
        return Choice(int(slots[np.argmin(due)]), "turn")


class LeastRequests(Policy):
    """Joins the shortest queue: fewest running requests per weight, ties drawn."""

    name: ClassVar[str] = "least_requests"

    def choose(self, context: Context) -> Choice:
        """The least loaded candidate."""
        return least_requests(context)


class PowerOfTwo(Policy):
    """The less loaded of two candidates drawn at random."""

    name: ClassVar[str] = "power_of_two"

    def choose(self, context: Context) -> Choice:
        """Two draws without replacement; the first wins a tie."""
        slots = context.candidates
        count = len(slots)
        if count == 1:
            return Choice(int(slots[0]), "single")
        first = context.draw % count
        second = (first + 1 + (context.draw >> 32) % (count - 1)) % count
        pair = slots[[first, second]]
        load = relative_load(context, pair)
        return Choice(int(pair[0] if load[0] <= load[1] else pair[1]), "pair", band=pair)


class LeastKv(Policy):
    """Fewest KV tokens per weight, counted at the start of decoding; ties drawn."""

    name: ClassVar[str] = "least_kv"

    def choose(self, context: Context) -> Choice:
        """The candidate that holds the fewest KV tokens."""
        slots, table = context.candidates, context.table
        load = table.kv_tokens[slots] / table.weight[slots]
        return Choice(least(context, slots, load), "least_kv", scores=load)
