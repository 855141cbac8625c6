"""The fitted partition: one centroid per decode worker, and its safetensors artefact."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr import __version__
from eldr.geometry import Geometry

FORMAT, FORMAT_VERSION = "eldr-partition", 1


class PartitionError(ValueError):
    """A partition that cannot be read or used; the message says why and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One unit vector per decode worker, with the weights that signatures are compared under.

    Attributes:
        geometry: shape that signatures must have.
        names: worker of every centroid.
        centroids: float32 [W, L, E], unit length, zero where `weights` is.
        idf: float32 [L, E], >= 0, weight of a hit.
        mask: bool [L], the layers that count.
        model: model name as the engine reports it, may be empty.
        metrics: fit metrics: objective, gap, purity, similarity quantiles and so on.
    """

    geometry: Geometry
    names: tuple[str, ...]
    centroids: npt.NDArray[np.float32]
    idf: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    model: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.geometry.layers, self.geometry.experts)
        _expect("centroids", self.centroids, np.float32, (len(self.names), *shape))
        _expect("idf", self.idf, np.float32, shape)
        _expect("mask", self.mask, np.bool_, shape[:1])
        if len(self.names) == 0 or len(set(self.names)) != len(self.names):
            raise PartitionError(f"partition: worker names must be unique, got {self.names}")
        if (self.idf < 0).any() or (self.centroids < 0).any():
            raise PartitionError("partition: idf and centroids must not be negative")
        if not self.mask.any() or not (self.weights > 0).any():
            raise PartitionError("partition: every weight is zero; nothing can be compared")

    @property
    def workers(self) -> int:
        """Number of centroids."""
        return len(self.names)

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """Float32 [L, E]: IDF where the mask is set, else 0."""
        return np.where(self.mask[:, None], self.idf, np.float32(0))

    @property
    def digest(self) -> str:
        """16 hex digits that name exactly these centroids, weights and names."""
        import hashlib

        text = json.dumps([self.geometry.digest, *self.names]).encode()
        data = self.centroids.tobytes() + self.weights.tobytes()
        return hashlib.sha256(text + data).hexdigest()[:16]

    def quantised(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
        """Centroids as rows uint8 [W, L*E] times scale float64 [W]."""
        flat = self.centroids.reshape(self.workers, -1)
        peak = flat.max(axis=1, keepdims=True)
        rows = np.rint(flat / np.where(peak > 0, peak, 1) * 255).astype(np.uint8)
        return rows, (peak[:, 0] / 255).astype(np.float64)

    def bind(self, names: Sequence[str]) -> Partition:
        """The same centroids for these workers.

        Known names keep their centroid; if the names differ, centroids go to them in order.

        Raises:
            PartitionError: another number of workers.
        """
        if set(names) == set(self.names):
            return self
        if len(names) != self.workers:
            raise PartitionError(
                f"partition: fitted for {self.workers} workers, but the fleet has {len(names)}; "
                f"run `eldr fit --workers {len(names)}` on the same signatures"
            )
        return replace(self, names=tuple(names))

    def check(self, geometry: Geometry) -> None:
        """Raises PartitionError unless it was fitted for this geometry."""
        if self.geometry != geometry:
            raise PartitionError(
                f"partition: fitted for {self.geometry}, but the engine serves {geometry}; "
                "record signatures from this engine and fit again"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the artefact, atomically: a reader sees the old file or the whole new one."""
        from safetensors.numpy import save

        metadata = {
            "format": FORMAT,
            "version": str(FORMAT_VERSION),
            "eldr": __version__,
            "geometry": json.dumps(
                [self.geometry.layers, self.geometry.experts, self.geometry.top_k]
            ),
            "geometry_digest": self.geometry.digest,
            "model": self.model,
            "workers": json.dumps(self.names),
            "metrics": json.dumps(self.metrics, sort_keys=True),
        }
        tensors = {
            "centroids": np.ascontiguousarray(self.centroids),
            "idf": np.ascontiguousarray(self.idf),
            "mask": self.mask.astype(np.uint8),
        }
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            scratch.write_bytes(save(tensors, metadata))
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)


def load_partition(
    path: str | os.PathLike[str],
    *,
    geometry: Geometry | None = None,
    workers: Sequence[str] | None = None,
) -> Partition:
    """Reads and validates an artefact.

    Args:
        path: file written by `Partition.save`.
        geometry: refuse a partition of any other geometry.
        workers: bind the centroids to these workers.

    Raises:
        PartitionError: unreadable, not a partition, newer version, missing or malformed parts,
            another geometry, another number of workers.
    """
    metadata, tensors = _read(path)
    try:
        layers, experts, top_k = json.loads(metadata["geometry"])
        partition = Partition(
            Geometry(layers, experts, top_k),
            tuple(json.loads(metadata["workers"])),
            tensors["centroids"],
            tensors["idf"],
            tensors["mask"].astype(np.bool_),
            metadata["model"],
            json.loads(metadata["metrics"]),
        )
    except KeyError as error:
        raise PartitionError(f"{path}: partition lacks {error}") from error
    except PartitionError as error:
        raise PartitionError(f"{path}: {error}") from error
    except (TypeError, ValueError) as error:
        raise PartitionError(f"{path}: malformed partition: {error}") from error
    if partition.geometry.digest != metadata.get("geometry_digest"):
        raise PartitionError(f"{path}: geometry and its digest disagree; the file was edited")
    if geometry is not None:
        partition.check(geometry)
    return partition if workers is None else partition.bind(workers)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise PartitionError(f"{path}: cannot read a partition: {error}") from error
    if metadata.get("format") != FORMAT:
        raise PartitionError(f"{path}: not a partition; write one with `eldr fit`")
    version = metadata.get("version", "")
    if not version.isdigit():
        raise PartitionError(f"{path}: malformed partition version {version!r}")
    if int(version) != FORMAT_VERSION:
        raise PartitionError(
            f"{path}: partition version {version}, this eldr {__version__} reads "
            f"{FORMAT_VERSION}; use the eldr that wrote it ({metadata.get('eldr', 'unknown')})"
        )
    return metadata, tensors


def _expect(name: str, array: Any, dtype: type, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array)
        raise PartitionError(f"partition: {name} must be {dtype.__name__} {shape}, got {got}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise PartitionError(f"partition: {name} holds a value that is not finite")
