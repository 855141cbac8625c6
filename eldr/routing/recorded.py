"""Recorded signatures: the `.npz` that `eldr record` writes and `eldr fit` reads."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry

_REQUIRED = ("counts", "tokens", "coverage", "geometry", "model")


class RecordedError(ValueError):
    """A file of recorded signatures that cannot be used; the message names the key and why."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Signatures of N requests.

    Attributes:
        counts: uint16 or uint32 [N, L, E], prompt hits.
        tokens: int32 [N], prompt tokens, >= 1.
        coverage: float32 [N], share of the tokens that `counts` holds, (0, 1].
        geometry: the engine's.
        model: the engine's model name.
        labels: str [N], domain of each request, or None.
        decode: uint16 or uint32 [N, L, E], hits of the decoded tokens, or None.
    """

    counts: npt.NDArray[Any]
    tokens: npt.NDArray[np.int32]
    coverage: npt.NDArray[np.float32]
    geometry: Geometry
    model: str = ""
    labels: npt.NDArray[np.str_] | None = None
    decode: npt.NDArray[Any] | None = None

    def __post_init__(self) -> None:
        count = len(self.tokens)
        shape = (count, self.geometry.layers, self.geometry.experts)
        for name in ("counts", "decode"):
            array = getattr(self, name)
            if array is None and name == "decode":
                continue
            if array.shape != shape or array.dtype not in (np.uint16, np.uint32):
                raise RecordedError(
                    f"{name}: expected uint16 or uint32 {shape}, got {array.dtype} {array.shape}"
                )
        if self.tokens.shape != (count,) or (count and self.tokens.min() < 1):
            raise RecordedError("tokens: expected int32 [N], all >= 1")
        if self.coverage.shape != (count,) or not (
            np.isfinite(self.coverage).all()
            and (self.coverage > 0).all()
            and (self.coverage <= 1).all()
        ):
            raise RecordedError("coverage: expected float32 [N] in (0, 1]")
        if self.labels is not None and self.labels.shape != (count,):
            raise RecordedError(f"labels: expected {count} strings, got {self.labels.shape}")
        sums = self.counts.sum(axis=2, dtype=np.int64)
        if count and (sums > self.tokens[:, None].astype(np.int64) * self.geometry.top_k).any():
            raise RecordedError("counts: more hits than tokens x top_k; another geometry?")

    def __len__(self) -> int:
        return len(self.tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the `.npz` (compressed); the path is used as given, without adding a suffix."""
        geometry = self.geometry
        arrays: dict[str, Any] = {
            "counts": self.counts,
            "tokens": self.tokens.astype(np.int32),
            "coverage": self.coverage.astype(np.float32),
            "geometry": np.array([geometry.layers, geometry.experts, geometry.top_k], np.int32),
            "model": np.array(self.model),
        }
        if self.labels is not None:
            arrays["labels"] = self.labels
        if self.decode is not None:
            arrays["decode"] = self.decode
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)


def load_recorded(path: str | os.PathLike[str]) -> Recorded:
    """Reads and validates a file of recorded signatures.

    Raises:
        RecordedError: unreadable, a missing key, or a malformed value; the message says which.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RecordedError(f"{path}: cannot read signatures: {error}") from error
    missing = [key for key in _REQUIRED if key not in arrays]
    if missing:
        raise RecordedError(f"{path}: lacks the key {missing[0]!r}; has {sorted(arrays)}")
    try:
        layers, experts, top_k = (int(v) for v in arrays["geometry"])
        return Recorded(
            arrays["counts"],
            arrays["tokens"],
            arrays["coverage"],
            Geometry(layers, experts, top_k),
            str(arrays["model"]),
            arrays.get("labels"),
            arrays.get("decode"),
        )
    except (RecordedError, ValueError, TypeError) as error:
        raise RecordedError(f"{path}: {error}") from error
