"""Vectors against which the worker scores prompts on the device, and their file form.

A safetensors file whose metadata say what it is: `format` = `eldr-vectors`, `kind` =
`centroids` or `survival`, `geometry` and `digest` (the name by which answers cite it). Tensors,
float32: centroids have `centroids` [W, L, E] and `weights` [L, E]; survival has `survival`
[W, L, E], `mean` [L, E] and `shrinkage` [1].
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eldr.geometry import Geometry
from eldr.kernels import Centroids, Scorer, Survival

FORMAT = "eldr-vectors"
_TENSORS = {"centroids": ("centroids", "weights"), "survival": ("survival", "mean", "shrinkage")}
_HEADER_LIMIT = 1 << 20


class VectorsError(ValueError):
    """A file that the worker cannot score with; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """One version of the W vectors, on the device.

    Attributes:
        digest: the version's name.
        kind: `centroids` (cosine) or `survival` (expected distinct experts added).
        scorer: the op's operands.
    """

    digest: str
    kind: str
    scorer: Scorer

    @property
    def workers(self) -> int:
        """Number of vectors."""
        return int(self.scorer.vectors.shape[0])


def pack(
    kind: str, digest: str, geometry: Geometry, tensors: dict[str, npt.NDArray[np.float32]]
) -> bytes:
    """The file form, for `POST /eldr/vectors`; raises VectorsError for an unknown kind."""
    from safetensors.numpy import save

    if kind not in _TENSORS or set(tensors) != set(_TENSORS[kind]):
        raise VectorsError(f"vectors: {kind!r} needs {_TENSORS.get(kind)}, got {sorted(tensors)}")
    metadata = {"format": FORMAT, "kind": kind, "digest": digest, "geometry": geometry.digest}
    data: bytes = save(tensors, metadata=metadata)
    return data


def load(data: bytes, geometry: Geometry, device: torch.device) -> Vectors:
    """Reads and checks a file and puts it on the device.

    Raises:
        VectorsError: not such a file, another geometry, wrong shapes or non-finite values.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as read

    metadata = _metadata(data)
    kind = metadata.get("kind", "")
    if metadata.get("format") != FORMAT or kind not in _TENSORS or not metadata.get("digest"):
        raise VectorsError(f"vectors: not an {FORMAT} file (metadata {metadata})")
    if metadata.get("geometry") != geometry.digest:
        raise VectorsError(
            f"vectors: made for geometry {metadata.get('geometry')}, "
            f"but this model has {geometry.digest} ({geometry})"
        )
    try:
        tensors = read(data)
        shapes = _shapes(kind, geometry)
        found = {name: _tensor(tensors, name, shapes[name]).to(device) for name in shapes}
        return Vectors(metadata["digest"], kind, _scorer(kind, found))
    except (SafetensorError, TypeError, ValueError) as error:
        raise VectorsError(f"vectors: {error}") from error


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(_HEADER_LIMIT, len(data) - 8):
        raise VectorsError(f"vectors: {len(data)} bytes that are not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError as error:
        raise VectorsError(f"vectors: not a safetensors file: {error}") from error
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


def _shapes(kind: str, geometry: Geometry) -> dict[str, tuple[int | None, ...]]:
    shape = (geometry.layers, geometry.experts)
    if kind == "centroids":
        return {"centroids": (None, *shape), "weights": shape}
    return {"survival": (None, *shape), "mean": shape, "shrinkage": (1,)}


def _tensor(tensors: dict[str, Any], name: str, shape: tuple[int | None, ...]) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"tensor {name} is missing")
    tensor: torch.Tensor = tensors[name]
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != torch.float32:
        wanted = ["W" if size is None else size for size in shape]
        raise ValueError(
            f"{name}: expected float32 {wanted}, got {tensor.dtype} {list(tensor.shape)}"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: has values that are not finite")
    return tensor


def _scorer(kind: str, tensors: dict[str, torch.Tensor]) -> Scorer:
    if kind == "centroids":
        return Centroids.fold(tensors["centroids"], tensors["weights"])
    shrinkage = float(tensors["shrinkage"].item())
    return Survival.of(tensors["survival"], tensors["mean"], shrinkage)
