"""The published rule and its variants: similarity to one centroid per worker, then load."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from eldr.routing import fixed
from eldr.routing.decision import Choice, Context, Scores, Slots
from eldr.routing.partition import Partition
from eldr.routing.policies.base import Policy, least_requests, lightest_within, relative_load
from eldr.routing.request import Reason
from eldr.signature import Signature


class _Scorer:
    """Cosine similarity of a signature to the candidates' centroids, in fixed point."""

    def __init__(self, partition: Partition) -> None:
        geometry = partition.geometry
        self.shape = geometry.layers, geometry.experts
        self._weights = partition.weights.reshape(-1).astype(np.float32)
        self._peak = float(self._weights.max())
        self._rows, self._unit = partition.quantised()
        self._row_of = {name: row for row, name in enumerate(partition.names)}
        none = np.zeros(0, np.intp)
        self._known: tuple[Slots, Slots, npt.NDArray[np.intp]] = (none, none, none)

    def known(self, context: Context) -> tuple[Slots, npt.NDArray[np.intp]]:
        """Candidates that have a centroid, and its row; cached until the candidates change."""
        known = self._known
        if known[0] is not context.candidates:
            names, slots = context.table.names, context.candidates
            rows = np.array([self._row_of.get(names[slot], -1) for slot in slots], np.intp)
            known = self._known = (slots, slots[rows >= 0], rows[rows >= 0])
        return known[1:]

    def similarity(self, signature: Signature, rows: npt.NDArray[np.intp]) -> Scores | None:
        """Float64 [K] in [0, 1] for K centroids; None for a signature of no weight at all."""
        # No count exceeds the covered tokens, so this scale fits int16 and is as fine as it can be.
        scale = (fixed.P_ONE - 1) / (max(signature.covered, 1.0) * self._peak)
        return fixed.similarities(
            signature.counts, self._weights, scale, self._rows, self._unit, rows
        )


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
        if signature.counts.shape != scorer.shape:
            return least_requests(context, Reason.GEOMETRY)
        known, rows = scorer.known(context)
        if len(known) == 0:
            return least_requests(context, Reason.NO_CENTROID)
        similarity = scorer.similarity(signature, rows)
        if similarity is None:
            return least_requests(context, Reason.EMPTY)
        slot, branch, band = self._pick(context, known, similarity)
        if len(known) != len(context.candidates):
            scores = np.full(len(context.candidates), np.nan)
            scores[np.isin(context.candidates, known)] = similarity
            similarity = scores
        return Choice(slot, branch, None, similarity, band)

    def _pick(self, context: Context, slots: Slots, similarity: Scores) -> tuple[int, str, Slots]:
        """The slot, the rule that chose it, and the slots it was chosen from."""
        slot, inside = lightest_within(context, slots, similarity, self.tau)
        return slot, "nearest" if len(inside) == 1 else "band", inside


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

    def _pick(self, context: Context, slots: Slots, similarity: Scores) -> tuple[int, str, Slots]:
        pair = slots[np.argsort(-similarity, kind="stable")[:2]]
        return int(pair[relative_load(context, pair).argmin()]), "pair", pair


class BoundedLoad(LocalityBand):
    """The most similar worker whose load is within `bound` times (mean load + 1)."""

    name: ClassVar[str] = "bounded_load"

    def __init__(self, partition: Partition | None = None, bound: float = 1.25) -> None:
        if not bound >= 1.0:
            raise ValueError(f"{self.name}: bound must be >= 1, got {bound}")
        super().__init__(partition)
        self.bound = bound

    def _pick(self, context: Context, slots: Slots, similarity: Scores) -> tuple[int, str, Slots]:
        load = relative_load(context, slots)
        room = np.flatnonzero(load <= self.bound * (load.mean() + 1.0))
        at = int(room[np.argmax(similarity[room])])
        branch = "nearest" if similarity[at] == similarity.max() else "overflow"
        return int(slots[at]), branch, slots[room]
