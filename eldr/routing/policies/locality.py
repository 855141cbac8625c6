"""The published rule and its variants: similarity to one centroid per worker, then load."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from eldr.routing import fixed
from eldr.routing.decision import Choice, Context, Scores, Slots
from eldr.routing.partition import Partition
from eldr.routing.policies.base import Policy, least_requests, lightest, relative_load
from eldr.routing.request import Reason
from eldr.signature import Signature


class _Scorer:
    """Cosine similarity of a signature to every slot's centroid, in fixed point."""

    def __init__(self, partition: Partition) -> None:
        self.geometry = partition.geometry
        self._weights = partition.weights.reshape(-1).astype(np.float32)
        self._peak = float(self._weights.max())
        self._rows, self._scale = partition.quantised()
        self._row_of = {name: row for row, name in enumerate(partition.names)}
        none = np.zeros(0, np.intp)
        self._known: tuple[Slots, Slots, npt.NDArray[np.intp]] = (none, none, none)

    def rows(self, context: Context) -> tuple[Slots, npt.NDArray[np.intp]]:
        """Candidates that have a centroid, and its row; cached until the candidates change."""
        if self._known[0] is not context.candidates:
            names, slots = context.table.names, context.candidates
            rows = np.array([self._row_of.get(names[slot], -1) for slot in slots], np.intp)
            self._known = (slots, slots[rows >= 0], rows[rows >= 0])
        return self._known[1:]

    def similarity(self, signature: Signature) -> Scores | None:
        """Float64 [centroids] in [0, 1], or None for a signature of no weight at all."""
        # No count exceeds the covered tokens, so this scale fits int16 and is as fine as it can be.
        scale = (fixed.P_ONE - 1) / (max(signature.covered, 1.0) * self._peak)
        x = np.empty(self.geometry.cells, np.int16)
        counts = np.ascontiguousarray(signature.counts, np.uint32).reshape(-1)
        squares = fixed.weigh(counts, self._weights, scale, x)
        if squares == 0:
            return None
        raw: Scores = fixed.dots(x, self._rows) * self._scale
        return raw * np.float64(1.0 / math.sqrt(squares))


class LocalityBand(Policy):
    """Least loaded worker among those whose similarity is within `tau` of the best.

    arXiv 2607.00466, section 4.3.2, ties by lowest slot as published. `tau` = 0 is the nearest
    centroid, `tau` = 1 least requests.
    """

    name: ClassVar[str] = "locality_band"

    def __init__(self, partition: Partition | None = None, tau: float = 0.1) -> None:
        if not 0.0 <= tau <= 1.0:
            raise ValueError(f"{self.name}: tau must be in [0, 1], got {tau}")
        self.tau = tau
        self.paused = False
        self._scorer: _Scorer | None = None
        self.partition: Partition | None = None
        if partition is not None:
            self.use(partition)

    @staticmethod
    def prepare(partition: Partition) -> _Scorer:
        """What `use` computes, ahead of it: milliseconds for a large fleet, in any thread."""
        return _Scorer(partition)

    def use(self, partition: Partition, prepared: _Scorer | None = None) -> None:
        """Replaces the partition; decisions from now on use it.

        Args:
            partition: the new one.
            prepared: of it, for this policy alone.
        """
        self._scorer = _Scorer(partition) if prepared is None else prepared
        self.partition = partition

    def choose(self, context: Context) -> Choice:
        """Similarity band, then load; least requests when there is nothing to compare."""
        scorer, signature = self._scorer, context.request.signature
        if scorer is None:
            return least_requests(context, Reason.NO_PARTITION)
        if self.paused:
            return least_requests(context, Reason.PARTITION_PAUSED)
        if context.activation is None or signature is None:
            return least_requests(context, context.reason)
        if signature.counts.shape != (scorer.geometry.layers, scorer.geometry.experts):
            return least_requests(context, Reason.GEOMETRY)
        known, rows = scorer.rows(context)
        if len(known) == 0:
            return least_requests(context, Reason.NO_CENTROID)
        similarity = scorer.similarity(signature)
        if similarity is None:
            return least_requests(context, Reason.EMPTY)
        return self._pick(context, known, similarity[rows])

    def _pick(self, context: Context, slots: Slots, similarity: Scores) -> Choice:
        inside = (similarity >= similarity.max() - self.tau).nonzero()[0]
        if len(inside) == 1:
            return self._answer(context, slots, similarity, inside, int(inside[0]), "nearest")
        at = int(inside[lightest(context, slots[inside])])
        return self._answer(context, slots, similarity, inside, at, "band")

    @staticmethod
    def _answer(
        context: Context,
        slots: Slots,
        similarity: Scores,
        inside: npt.NDArray[np.intp],
        at: int,
        branch: str,
    ) -> Choice:
        scores = similarity
        if len(slots) != len(context.candidates):
            scores = np.full(len(context.candidates), np.nan)
            scores[np.isin(context.candidates, slots)] = similarity
        return Choice(int(slots[at]), branch, None, scores, slots[inside])


class Nearest(LocalityBand):
    """The most similar worker, whatever its load."""

    name: ClassVar[str] = "nearest"

    def __init__(self, partition: Partition | None = None) -> None:
        super().__init__(partition, tau=0.0)


class NearestTwo(LocalityBand):
    """The less loaded of the two most similar workers."""

    name: ClassVar[str] = "nearest_two"

    def __init__(self, partition: Partition | None = None) -> None:
        super().__init__(partition)

    def _pick(self, context: Context, slots: Slots, similarity: Scores) -> Choice:
        pair = np.argsort(-similarity, kind="stable")[:2]
        at = int(pair[lightest(context, slots[pair])])
        return self._answer(context, slots, similarity, pair, at, "pair")


class BoundedLoad(LocalityBand):
    """The most similar worker whose load is within `bound` times (mean load + 1)."""

    name: ClassVar[str] = "bounded_load"

    def __init__(self, partition: Partition | None = None, bound: float = 1.25) -> None:
        if not bound >= 1.0:
            raise ValueError(f"{self.name}: bound must be >= 1, got {bound}")
        super().__init__(partition)
        self.bound = bound

    def _pick(self, context: Context, slots: Slots, similarity: Scores) -> Choice:
        load = relative_load(context, slots)
        room = np.flatnonzero(load <= self.bound * (load.mean() + 1.0))
        at = int(room[np.argmax(similarity[room])])
        branch = "nearest" if similarity[at] == similarity.max() else "overflow"
        return self._answer(context, slots, similarity, room, at, branch)
