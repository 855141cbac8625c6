"""A request's expert signature and its wire form, `kv_transfer_params.eldr` of a prefill answer.

Shared by the engine, which writes it, and by the router, which reads it. NumPy only; the loops of
`eldr._native` make reading fast, and accept and refuse the same.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry

WIRE_VERSION = 1
Counts = npt.NDArray[np.uint32]

# Lossless encodings: little-endian counts of the smallest width that holds them, raw or deflated.
_DTYPES: dict[str, np.dtype[Any]] = {
    "u8": np.dtype("<u1"),
    "u16": np.dtype("<u2"),
    "u32": np.dtype("<u4"),
}
_DEFLATED = "+deflate"
# Below this many bytes inflating costs the router more time than the bytes cost the network.
_DEFLATE_FROM = 16_384


def _load_native() -> ModuleType | None:
    try:
        module = importlib.import_module("eldr._native")
    except ImportError:
        return None
    return module if hasattr(module, "widen") else None  # one of another version


native: ModuleType | None = _load_native()


class SignatureError(ValueError):
    """A payload that is not a signature of the expected geometry; the message says why.

    `reason` is one of a closed set, for counters: `version`, `geometry`, `malformed`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """Counts [L, E] (uint32) of a prompt's hits, with what they cover.

    Attributes:
        counts: hits per (layer, expert), uint32 [L, E].
        tokens: prompt tokens of the request.
        coverage: share of those tokens whose hits `counts` really holds; 1.0 = exact.
    """

    counts: Counts
    tokens: int
    coverage: float = 1.0


def encode(signature: Signature, geometry: Geometry) -> dict[str, Any]:
    """The wire object; lossless, large counts deflated when that is shorter."""
    counts = np.ascontiguousarray(signature.counts)
    if counts.shape != (geometry.layers, geometry.experts):
        raise ValueError(f"counts: expected shape [L, E] of {geometry}, got {counts.shape}")
    peak = int(counts.max(initial=0))
    name = next(n for n, dtype in _DTYPES.items() if peak <= np.iinfo(dtype).max)
    raw = counts.astype(_DTYPES[name]).tobytes()
    if len(raw) >= _DEFLATE_FROM and len(packed := zlib.compress(raw, 1)) < len(raw):
        name, raw = name + _DEFLATED, packed
    return {
        "v": WIRE_VERSION,
        "geometry": geometry.digest,
        "tokens": signature.tokens,
        "coverage": signature.coverage,
        "counts": {"encoding": name, "data": base64.b64encode(raw).decode("ascii")},
    }


def decode(payload: object, geometry: Geometry) -> Signature:
    """Reads and validates what `encode` wrote.

    Raises:
        SignatureError: unknown version, another geometry, or anything malformed: wrong types,
            truncated or over-long data, non-finite or out-of-range coverage, counts that no
            `tokens` tokens could have made.
    """
    if not isinstance(payload, Mapping):
        raise SignatureError("malformed", f"signature: expected an object, got {_kind(payload)}")
    version = payload.get("v")
    if version != WIRE_VERSION or isinstance(version, bool):
        raise SignatureError("version", f"signature: version {version!r}, expected {WIRE_VERSION}")
    if payload.get("geometry") != geometry.digest:
        raise SignatureError(
            "geometry",
            f"signature: geometry {payload.get('geometry')!r}, "
            f"expected {geometry.digest} ({geometry})",
        )
    tokens, coverage = _header(payload)
    counts, peak, most = _widen(_raw(payload.get("counts"), geometry), geometry)
    if most > tokens * geometry.top_k or peak > tokens:
        raise SignatureError(
            "malformed",
            f"signature: {most} hits in one layer and {peak} of one expert, but {tokens} tokens x "
            f"top-{geometry.top_k} make at most {tokens * geometry.top_k} and {tokens}",
        )
    return Signature(counts, tokens, coverage)


def _header(payload: Mapping[str, Any]) -> tuple[int, float]:
    tokens, coverage = payload.get("tokens"), payload.get("coverage")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < 2**31:
        raise SignatureError("malformed", f"signature: tokens must be in [1, 2^31), got {tokens!r}")
    if (
        not isinstance(coverage, int | float)
        or isinstance(coverage, bool)
        or not math.isfinite(coverage)
        or not 0.0 <= coverage <= 1.0
    ):
        raise SignatureError(
            "malformed", f"signature: coverage must be in [0, 1], got {coverage!r}"
        )
    return tokens, float(coverage)


def _raw(field: object, geometry: Geometry) -> bytes:
    """The counts' bytes, as many as the geometry has cells of the encoding's width."""
    if not isinstance(field, Mapping):
        raise SignatureError("malformed", f"signature: counts missing or {_kind(field)}")
    encoding, data = field.get("encoding"), field.get("data")
    if not isinstance(encoding, str) or not isinstance(data, str):
        raise SignatureError("malformed", "signature: counts need `encoding` and `data` strings")
    dtype = _DTYPES.get(encoding.removesuffix(_DEFLATED))
    if dtype is None:
        raise SignatureError("malformed", f"signature: unknown counts encoding {encoding!r}")
    expected = geometry.cells * dtype.itemsize
    # An honest payload is never longer than the raw counts; refuse before decoding it.
    if len(data) > 4 * (expected // 3 + 16):
        raise SignatureError("malformed", f"signature: {len(data)} characters of counts, too long")
    try:
        raw = _unbase64(data)
        if encoding.endswith(_DEFLATED):
            raw = _inflate(raw, expected)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise SignatureError("malformed", f"signature: counts do not decode: {error}") from error
    if len(raw) != expected:
        raise SignatureError(
            "malformed",
            f"signature: {len(raw)} bytes of counts, expected {expected} for {geometry}",
        )
    return raw


def _unbase64(text: str) -> bytes:
    if native is not None:
        return bytes(native.unbase64(text))
    if len(text) % 4:  # the library overlooks padding after a whole quad
        raise ValueError(f"{len(text)} characters of base64, not a multiple of 4")
    return base64.b64decode(text, validate=True)


def _widen(raw: bytes, geometry: Geometry) -> tuple[Counts, int, int]:
    """Counts uint32 [L, E], the largest of them, and the largest sum over a layer's experts."""
    shape = geometry.layers, geometry.experts
    if native is not None:
        counts = np.empty(shape, np.uint32)
        peak, most = native.widen(raw, geometry.layers, counts)
        return counts, peak, most
    counts = np.frombuffer(raw, f"<u{len(raw) // geometry.cells}").astype(np.uint32).reshape(shape)
    return counts, int(counts.max()), int(counts.sum(axis=1, dtype=np.uint64).max())


def _inflate(raw: bytes, expected: int) -> bytes:
    """Inflates at most one byte more than expected, so that a bomb costs nothing."""
    stream = zlib.decompressobj()
    out = stream.decompress(raw, expected + 1)
    if not stream.eof or stream.unused_data:
        raise ValueError("deflate stream is truncated or followed by other bytes")
    return out


def _kind(value: object) -> str:
    return "absent" if value is None else type(value).__name__
