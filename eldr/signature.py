"""A request's expert signature and its wire form, `kv_transfer_params.eldr` of a prefill answer.

Shared by the engine, which writes it, and by the router, which reads it. NumPy only; the loops of
`eldr._native` make reading fast, and accept and refuse the same.

Version 1 is lossless. Version 2 adds two smaller forms, which readers of version 1 refuse by their
version; what they lose is in docs/policies.md:

* `8bit`: one byte a count, q = floor(255 sqrt(count / peak)), so that its step grows like the noise
  of a count. Never more than was counted, hence as consistent as the exact counts.
* `sampled`: every n-th hit of a layer, as if only `sample` of the covered tokens had been counted;
  at even distances instead of at random, so that every count is off by less than one.
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
LOSSY_VERSION = 2
FORMS = ("exact", "8bit", "sampled")
SAMPLE = 128  # tokens
_MOST_CELLS = 1 << 20  # of a geometry that is not known
Counts = npt.NDArray[np.uint32]

# Lossless encodings: little-endian counts of the smallest width that holds them, raw or deflated.
_DTYPES: dict[str, np.dtype[Any]] = {
    "u8": np.dtype("<u1"),
    "u16": np.dtype("<u2"),
    "u32": np.dtype("<u4"),
}
_ROOT = "root8"
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
        counts: hits per (layer, expert), uint32 [L, E]; another type or order is converted.
        tokens: prompt tokens of the request.
        coverage: share of those tokens whose hits were counted; 1.0 = all.
        sampled: tokens that `counts` stand for when they are a sample of the hits counted.
    """

    counts: Counts
    tokens: int
    coverage: float = 1.0
    sampled: int | None = None

    def __post_init__(self) -> None:
        # Once here, not in each of the loops over the counts.
        object.__setattr__(self, "counts", np.ascontiguousarray(self.counts, np.uint32))

    @property
    def covered(self) -> float:
        """Tokens whose hits `counts` holds."""
        return self.tokens * self.coverage if self.sampled is None else float(self.sampled)


def encode(
    signature: Signature, geometry: Geometry, form: str = "exact", sample: int = SAMPLE
) -> dict[str, Any]:
    """The wire object; large counts deflated when that is shorter.

    Args:
        signature: as counted, not a sample.
        geometry: the engine's.
        form: one of FORMS. A form that would save nothing gives way to the exact one: `8bit` where
            no count exceeds a byte, `sampled` where no more than `sample` tokens are covered.
        sample: tokens of the sampled form, >= 1.

    Raises:
        ValueError: counts of another shape, an unknown form, no sample, or a sample of a sample.
    """
    counts: npt.NDArray[Any] = np.ascontiguousarray(signature.counts)
    if counts.shape != (geometry.layers, geometry.experts):
        raise ValueError(f"counts: expected shape [L, E] of {geometry}, got {counts.shape}")
    if form not in FORMS or sample < 1:
        raise ValueError(f"signature: form {form!r}, sample {sample}; forms are {FORMS}, sample 1+")
    if signature.sampled is not None:
        raise ValueError("signature: counts are a sample; only counts of all tokens are encoded")
    extra: dict[str, int] = {}
    peak, covered = int(counts.max(initial=0)), round(signature.covered)
    if form == "sampled" and covered > sample:
        counts, extra = _thin(counts, sample, covered), {"sample": sample}
        peak = int(counts.max(initial=0))
    if form == "8bit" and peak > 255:
        name, extra = _ROOT, {"peak": peak}
        raw = np.floor(255 * np.sqrt(counts / peak)).astype(np.uint8).tobytes()
    else:
        name = next(n for n, dtype in _DTYPES.items() if peak <= np.iinfo(dtype).max)
        raw = counts.astype(_DTYPES[name]).tobytes()
    long = len(raw) >= _DEFLATE_FROM or "sample" in extra  # who samples wants few bytes
    if long and len(packed := zlib.compress(raw, 1)) < len(raw):
        name, raw = name + _DEFLATED, packed
    data = base64.b64encode(raw).decode("ascii")
    return {
        "v": LOSSY_VERSION if extra else WIRE_VERSION,
        "geometry": geometry.digest,
        "tokens": signature.tokens,
        "coverage": signature.coverage,
        "counts": {"encoding": name, **extra, "data": data},
    }


def _thin(counts: npt.NDArray[Any], sample: int, covered: int) -> npt.NDArray[np.int64]:
    """Takes sample / covered of each layer's hits, evenly spaced in the order of its experts."""
    upto = np.cumsum(counts, axis=1, dtype=np.int64)
    total = upto[:, -1:]
    taken = total * sample // covered
    # No count of the sample exceeds `sample`, as no count exceeds `covered`.
    upto = (2 * upto * taken + total) // np.maximum(2 * total, 1)
    return np.diff(upto, axis=1, prepend=0)


def decode(payload: object, geometry: Geometry) -> Signature:
    """Reads and validates what `encode` wrote, of either version.

    Raises:
        SignatureError: unknown version, another geometry, or anything malformed: wrong types,
            truncated or over-long data, non-finite or out-of-range coverage, counts that no
            `tokens` tokens could have made.
    """
    if not isinstance(payload, Mapping):
        raise SignatureError("malformed", f"signature: expected an object, got {_kind(payload)}")
    version = payload.get("v")
    if version not in (WIRE_VERSION, LOSSY_VERSION) or isinstance(version, bool):
        raise SignatureError(
            "version",
            f"signature: version {version!r}, expected {WIRE_VERSION} or {LOSSY_VERSION}",
        )
    if payload.get("geometry") != geometry.digest:
        raise SignatureError(
            "geometry",
            f"signature: geometry {payload.get('geometry')!r}, "
            f"expected {geometry.digest} ({geometry})",
        )
    tokens, coverage = _header(payload)
    field = payload.get("counts")
    sampled, top = _lossy(field, tokens) if version == LOSSY_VERSION else (None, None)
    counts, peak, most = _widen(_raw(field, geometry, rooted=top is not None), geometry, top)
    limit = tokens if sampled is None else sampled
    if most > limit * geometry.top_k or peak > limit:
        raise SignatureError(
            "malformed",
            f"signature: {most} hits in one layer and {peak} of one expert, but {limit} tokens x "
            f"top-{geometry.top_k} make at most {limit * geometry.top_k} and {limit}",
        )
    return Signature(counts, tokens, coverage, sampled)


def _lossy(field: object, tokens: int) -> tuple[int | None, int | None]:
    """What version 2 adds to the counts: tokens of the sample, and the peak of rooted counts."""
    if not isinstance(field, Mapping):
        raise SignatureError("malformed", f"signature: counts missing or {_kind(field)}")
    found: list[int | None] = []
    for key in ("sample", "peak"):
        value = field.get(key)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 0 < value <= tokens):
            raise SignatureError(
                "malformed", f"signature: {key} must be in [1, {tokens}], got {value!r}"
            )
        found.append(value)
    if found[0] is not None and found[1] is not None:
        raise SignatureError("malformed", "signature: counts are either sampled or rooted")
    return found[0], found[1]


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


def cells_of(payload: Mapping[str, Any]) -> int:
    """L*E of a payload whose geometry is not known yet; the payload may still be malformed.

    Raises:
        SignatureError: malformed counts.
    """
    field = payload.get("counts")
    width, data, deflated = _field(field, rooted=isinstance(field, Mapping) and "peak" in field)
    raw = _bytes(data, _MOST_CELLS * width, deflated)
    if not raw or len(raw) % width:
        raise SignatureError("malformed", f"signature: {len(raw)} bytes of counts of {width}")
    return len(raw) // width


def _raw(field: object, geometry: Geometry, *, rooted: bool) -> bytes:
    """The counts' bytes, as many as the geometry has cells of the encoding's width."""
    width, data, deflated = _field(field, rooted)
    expected = geometry.cells * width
    raw = _bytes(data, expected, deflated)
    if len(raw) != expected:
        raise SignatureError(
            "malformed",
            f"signature: {len(raw)} bytes of counts, expected {expected} for {geometry}",
        )
    return raw


def _field(field: object, rooted: bool) -> tuple[int, str, bool]:
    """Bytes of a count, the base64 text, and whether it is deflated."""
    if not isinstance(field, Mapping):
        raise SignatureError("malformed", f"signature: counts missing or {_kind(field)}")
    encoding, data = field.get("encoding"), field.get("data")
    if not isinstance(encoding, str) or not isinstance(data, str):
        raise SignatureError("malformed", "signature: counts need `encoding` and `data` strings")
    name = encoding.removesuffix(_DEFLATED)
    dtype = _DTYPES.get("u8" if rooted and name == _ROOT else name)
    if dtype is None or rooted != (name == _ROOT):
        raise SignatureError("malformed", f"signature: unknown counts encoding {encoding!r}")
    return dtype.itemsize, data, encoding.endswith(_DEFLATED)


def _bytes(data: str, most: int, deflated: bool) -> bytes:
    """The bytes behind the text, `most` of them or a few more."""
    # An honest payload is never longer than the raw counts; refuse before decoding it.
    if len(data) > 4 * (most // 3 + 16):
        raise SignatureError("malformed", f"signature: {len(data)} characters of counts, too long")
    try:
        raw = _unbase64(data)
        return _inflate(raw, most) if deflated else raw
    except (binascii.Error, ValueError, zlib.error) as error:
        raise SignatureError("malformed", f"signature: counts do not decode: {error}") from error


def _unbase64(text: str) -> bytes:
    if native is not None:
        return bytes(native.unbase64(text))
    if len(text) % 4:  # the library overlooks padding after a whole quad
        raise ValueError(f"{len(text)} characters of base64, not a multiple of 4")
    return base64.b64decode(text, validate=True)


def _widen(raw: bytes, geometry: Geometry, top: int | None) -> tuple[Counts, int, int]:
    """Counts uint32 [L, E], the largest of them, and the largest sum over a layer's experts.

    `top` is the peak of rooted counts, None for plain ones.
    """
    shape = geometry.layers, geometry.experts
    if top is not None:
        roots = np.arange(256, dtype=np.int64)
        table = ((roots * roots * top + 255 * 255 // 2) // (255 * 255)).astype(np.uint32)
        counts = table[np.frombuffer(raw, np.uint8)].reshape(shape)
    elif native is not None:
        counts = np.empty(shape, np.uint32)
        peak, most = native.widen(raw, geometry.layers, counts)
        return counts, peak, most
    else:
        counts = np.frombuffer(raw, f"<u{len(raw) // geometry.cells}").astype(np.uint32)
        counts = counts.reshape(shape)
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
