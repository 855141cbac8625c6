"""The shape of a model's expert routing, and the digest by which two parties agree on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

_DIGEST_VERSION = "eldr-geometry-1"
_MOST_TOP_K = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """L MoE layers (dense layers do not count), E logical routed experts, K experts per token.

    Raises:
        ValueError: if a dimension is not positive or `top_k` exceeds `experts`.
    """

    layers: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"geometry: {name} must be a positive integer, got {value!r}")
        if self.top_k > self.experts:
            raise ValueError(
                f"geometry: top_k = {self.top_k} exceeds the number of experts {self.experts}"
            )

    @property
    def digest(self) -> str:
        """16 hex digits that name this geometry on the wire and in artefacts."""
        return _digest(self.layers, self.experts, self.top_k)

    @property
    def cells(self) -> int:
        """Length L*E of a flattened signature."""
        return self.layers * self.experts

    def __str__(self) -> str:
        return f"{self.layers} layers x {self.experts} experts, top-{self.top_k}"


@cache
def find(digest: str, cells: int) -> Geometry | None:
    """The geometry of L*E = `cells` that has this digest, None if none with K <= 64 has."""
    for layers in range(1, cells + 1):
        if cells % layers:
            continue
        for top_k in range(1, min(cells // layers, _MOST_TOP_K) + 1):
            if _digest.__wrapped__(layers, cells // layers, top_k) == digest:
                return Geometry(layers, cells // layers, top_k)
    return None


@cache  # asked for at every request
def _digest(layers: int, experts: int, top_k: int) -> str:
    text = f"{_DIGEST_VERSION}:{layers}:{experts}:{top_k}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
