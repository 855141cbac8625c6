"""Routing on the device: signatures in, workers out, nothing waits for the host.

Loads, survival and the rows of the running requests are device tensors. Every operation is
elementwise, an integer-valued float64 matrix product (exact), or a scatter to one row, in an order
fixed by the requests' order; there is no synchronisation and no allocation that depends on data, so
`route` and `release` can be captured in a CUDA graph. With equal weights the choices are those of
`Fleet` with the same policy, signature by signature; sums of unequal weights may round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eldr.geometry import Geometry
from eldr.routing import activation as model
from eldr.routing import fixed, lengths
from eldr.routing.activation import Shrinkage
from eldr.routing.cost import StepCost
from eldr.routing.partition import Partition
from eldr.routing.price import increase, terms
from eldr.routing.step_fit import prior

Tensor = torch.Tensor


class DeviceRouter:
    """marginal_cost, or locality_band when a partition is given, on one device.

    Args:
        geometry: of the signatures.
        weights: relative capacity of each of the W workers.
        capacity: most running requests; each holds 2 * L * E bytes.
        partition: bound to the workers in order, for locality_band; None for marginal_cost.
        tau: width of the band.
        hedge, power, guard, cost: of marginal_cost.
        shrinkage: of the activation probabilities.
        device: where everything lives.

    Raises:
        ValueError: no workers, or a partition of another geometry or number of workers.
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: Sequence[float],
        *,
        capacity: int = 4096,
        partition: Partition | None = None,
        tau: float = 0.1,
        hedge: float = 1.0,
        power: int = 3,
        guard: float = 0.25,
        cost: StepCost | None = None,
        shrinkage: Shrinkage | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(weights) == 0 or capacity < 1:
            raise ValueError("device router: needs workers and capacity")
        cells, count = geometry.cells, len(weights)
        self.geometry, self.power, self.guard, self.tau = geometry, power, guard, tau
        self._shrink = shrinkage or Shrinkage()
        self._uniform = geometry.top_k / geometry.experts
        where: dict[str, Any] = {"device": device}
        self.weight = torch.tensor(list(weights), dtype=torch.float64, **where)
        self.open = torch.ones(count, dtype=torch.bool, **where)
        self.requests = torch.zeros(count, dtype=torch.int64, **where)
        self.others = torch.zeros(count, dtype=torch.float64, **where)
        self.kv_tokens = torch.zeros(count, dtype=torch.int64, **where)
        self.load = torch.zeros(count, cells, dtype=torch.int32, **where)
        self.survival = torch.full((count, cells), 255, dtype=torch.uint8, **where)
        self._rows = torch.zeros(capacity, cells, dtype=torch.int16, **where)
        self._home = torch.full((capacity,), -1, dtype=torch.int64, **where)
        self._kv = torch.zeros(capacity, dtype=torch.int64, **where)
        self._cost_table = torch.from_numpy(fixed.COST.astype("int32")).to(device)
        self._survival_table = torch.from_numpy(fixed.SURVIVAL).to(device)
        self._terms = torch.tensor(
            terms(cost or prior(cells), cells, 0, hedge), dtype=torch.float64, **where
        )
        self._mean = torch.full((cells,), self._uniform, dtype=torch.float32, **where)
        self._counts = torch.zeros(cells, dtype=torch.float64, **where)
        self._pending = torch.zeros(cells, dtype=torch.float64, **where)
        self._tokens = torch.zeros((), dtype=torch.float64, **where)
        self._age = torch.zeros((), dtype=torch.int64, **where)
        self._length_sum = torch.zeros((), dtype=torch.int64, **where)
        self._length_count = torch.zeros((), dtype=torch.int64, **where)
        self._band = None if partition is None else self._centroids(partition, count, device)

    def _centroids(
        self, partition: Partition, count: int, device: torch.device | str
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        partition.check(self.geometry)
        if partition.workers != count:
            raise ValueError(f"device router: partition of {partition.workers} workers for {count}")
        rows, scale = partition.quantised()
        weights = partition.weights.reshape(-1)
        return (
            torch.from_numpy(rows).to(device),
            torch.from_numpy(scale).to(device),
            torch.from_numpy(weights).to(device),
            float(weights.max()),
        )

    def route(
        self,
        counts: Tensor,
        tokens: Tensor,
        slots: Tensor,
        kv: Tensor,
        new_tokens: Tensor | None = None,
    ) -> Tensor:
        """Chooses a worker for each request, in order, and commits each before the next.

        Args:
            counts: [R, L, E] any integer type, hits; a row without hits is placed on load alone.
            tokens: [R] int64, covered prompt tokens.
            slots: [R] int64 in [0, capacity), where a request's row is kept until it is released;
                free slots. Negative = padding, ignored.
            kv: [R] int64, KV tokens of each request.
            new_tokens: [R] int64, predicted tokens to decode, below 1 = unknown; None = all
                unknown. marginal_cost weighs the other requests by them.

        Returns:
            int64 [R] workers, -1 for padding.
        """
        flat = counts.reshape(len(counts), -1)
        out = torch.empty_like(slots)
        for i in range(len(flat)):
            new = None if new_tokens is None else new_tokens[i]
            out[i] = self._one(flat[i], tokens[i], slots[i], kv[i], new)
        return out

    def release(self, slots: Tensor) -> None:
        """Ends the requests in these slots, int64 [R]; negative or free slots are ignored."""
        for i in range(len(slots)):
            slot = slots[i].clamp(min=0)
            home = self._home.index_select(0, slot[None])[0]
            live = (slots[i] >= 0) & (home >= 0)
            self._shift(home, self._rows.index_select(0, slot[None])[0], -1, live)
            kv = self._kv.index_select(0, slot[None])[0]
            self._count(home, -1, -kv, live)
            self._home.index_copy_(0, slot[None], torch.where(live, -1, home)[None])

    def _one(
        self, counts: Tensor, tokens: Tensor, slot: Tensor, kv: Tensor, new: Tensor | None
    ) -> Tensor:
        live = slot >= 0
        any_hit = (counts != 0).any() & (tokens > 0)
        x = self._activation(counts, tokens) * any_hit.to(torch.int16)
        load = (self.requests + self.others) / self.weight
        lightest = torch.where(self.open, load, torch.inf).argmin()
        if self._band is None:
            hedge = self._terms[8] if new is None else self._terms[8] * self._relative(new, live)
            best = self._cheapest(x, kv, load, hedge)
        else:
            best = self._nearest(counts, tokens, load)
        worker = torch.where(any_hit, best, lightest)
        self._shift(worker, x, 1, live)
        self._count(worker, 1, kv, live)
        at = slot.clamp(min=0)[None]
        self._rows.index_copy_(0, at, torch.where(live, x, self._rows.index_select(0, at)[0])[None])
        self._kv.index_copy_(0, at, torch.where(live, kv, self._kv.index_select(0, at)[0])[None])
        home = torch.where(live, worker, self._home.index_select(0, at)[0])
        self._home.index_copy_(0, at, home[None])
        self._observe(counts, tokens, live & any_hit)
        return torch.where(live, worker, -1)

    def _activation(self, counts: Tensor, tokens: Tensor) -> Tensor:
        covered = tokens.to(torch.float64).clamp(min=1.0)
        weight = self._shrink.limit * covered / (covered + self._shrink.k)
        scale = (fixed.P_ONE * weight / covered).to(torch.float32)
        part = ((1.0 - weight) * fixed.P_ONE).to(torch.float32)
        value = counts.to(torch.float32) * scale + (self._mean * part + 0.5)
        return value.clamp(max=fixed.P_ONE - 1).to(torch.int16)

    def _dots(self, x: Tensor, rows: Tensor) -> Tensor:
        """Integers below 2^53 in float64: exact in any order of summation."""
        return rows.to(torch.float64) @ x.to(torch.float64)

    def _relative(self, new: Tensor, live: Tensor) -> Tensor:
        """`Lengths.relative` of a prediction, float64, then `Lengths.add` of it if it is live."""
        known = new >= 1
        # An exact product, so that the quotient is rounded once, as Python's is.
        ratio = (new * self._length_count).to(torch.float64) / self._length_sum.clamp(min=1)
        ratio = ratio.clamp(lengths.LEAST, lengths.MOST)
        found = torch.where(known & (self._length_count >= lengths.ENOUGH), ratio, 1.0)
        self._length_sum += new * (known & live)
        self._length_count += known & live
        full = (self._length_count >= lengths.WINDOW).to(torch.int64)
        self._length_sum >>= full
        self._length_count >>= full
        return found

    def _cheapest(self, x: Tensor, kv: Tensor, load: Tensor, hedge: Tensor) -> Tensor:
        idle = self.survival.sum(dim=1, dtype=torch.int64)
        t = [*self._terms.unbind()]
        t[7], t[8] = kv.to(torch.float64), hedge
        total = increase(
            t, self.power, self._dots(x, self.survival), idle,
            self.requests, self.others, self.kv_tokens, self.weight,
        )  # fmt: skip
        limit = torch.where(self.open, load, 0.0).sum() / self.open.sum() * (1.0 + self.guard) + 1.0
        return torch.where(self.open & (load <= limit), total, torch.inf).argmin()

    def _nearest(self, counts: Tensor, tokens: Tensor, load: Tensor) -> Tensor:
        assert self._band is not None
        rows, unit, weights, peak = self._band
        scale = (fixed.P_ONE - 1) / (tokens.to(torch.float64).clamp(min=1.0) * peak)
        value = counts.to(torch.float32) * weights * scale.to(torch.float32) + 0.5
        x = value.clamp(max=fixed.P_ONE - 1).to(torch.int16)
        squares = (x.to(torch.float64) ** 2).sum()
        similarity = self._dots(x, rows) * unit * (1.0 / squares.clamp(min=1.0).sqrt())
        similarity = torch.where(self.open, similarity, -torch.inf)
        inside = similarity >= similarity.max() - self.tau
        return torch.where(inside & self.open, load, torch.inf).argmin()

    def _shift(self, worker: Tensor, x: Tensor, sign: int, live: Tensor) -> None:
        at = worker.clamp(min=0)[None]
        step = self._cost_table.index_select(0, x.to(torch.int64)) * live.to(torch.int32)
        load = self.load.index_select(0, at)[0] + sign * step
        self.load.index_copy_(0, at, load[None])
        index = load.clamp(0, len(self._survival_table) - 1).to(torch.int64)
        self.survival.index_copy_(0, at, self._survival_table.index_select(0, index)[None])

    def _count(self, worker: Tensor, sign: int, kv: Tensor, live: Tensor) -> None:
        at, one = worker.clamp(min=0)[None], live.to(torch.int64)
        self.requests.index_add_(0, at, sign * one[None])
        self.kv_tokens.index_add_(0, at, (kv * one)[None])

    def _observe(self, counts: Tensor, tokens: Tensor, used: Tensor) -> None:
        """The running mean of `ActivationModel`, refreshed at the same requests."""
        self._pending += counts.to(torch.float64) * used
        self._tokens += tokens.to(torch.float64) * used
        self._age += used.to(torch.int64)
        due = self._age >= model.REFRESH
        total = self._counts + self._pending
        mean = ((total + 256 * self._uniform) / (self._tokens + 256)).to(torch.float32)
        self._mean.copy_(torch.where(due, mean, self._mean))
        half = torch.where(due & (self._tokens > model.WINDOW), 0.5, 1.0)
        self._counts.copy_(torch.where(due, total * half, self._counts))
        self._pending *= ~due
        self._tokens *= half
        self._age *= ~due
