"""A request's expert signature and its wire form, `kv_transfer_params.eldr` of a prefill answer.

Shared by the engine, which writes it, and by the router, which reads it. NumPy only; the loops of
`eldr._native` make reading fast, and accept and refuse the same.

Version 1 has counts of one width. Version 2 adds smaller forms, which readers of version 1 refuse
by their version. One is as exact, and chosen where it is the shortest:

* `spill8`: one byte a count; what exceeds 255 follows, for each count whose byte is 255.

Two lose something, which docs/policies.md tells, and are sent where a configuration asks for them:

* `8bit`: one byte a count, q = floor(255 sqrt(count / peak)), so that its step grows like the noise
  of a count. Never more than was counted, hence as consistent as the exact counts.
* `sampled`: every n-th hit of a layer, as if only `sample` of the covered tokens had been counted;
  at even distances instead of at random, so that every count is off by less than one.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry

WIRE_VERSION = 1
SMALL_VERSION = 2
FORMS = ("exact", "8bit", "sampled")
SAMPLE = 128  # tokens
_MOST_CELLS = 1 << 20  # of a geometry that is not known
Counts = npt.NDArray[np.uint32]

# Encodings of one width: little-endian counts of the smallest that holds them, raw or deflated.
_DTYPES: dict[str, np.dtype[Any]] = {
    "u8": np.dtype("<u1"),
    "u16": np.dtype("<u2"),
    "u32": np.dtype("<u4"),
}
_SPILL = "spill8"
_TOP = 255  # of a byte
_ROOT = "root8"
_DEFLATED = "+deflate"
# Bytes of a count, and how many of them there can be for each count.
_WIDTHS = {"u8": 1, "u16": 2, "u32": 4, _ROOT: 1, _SPILL: 1}
_LIMITS = {**_WIDTHS, _SPILL: 5}
_NUMBERS = (float, int)  # as JSON has them; a bool is neither
# Below this many bytes inflating costs the router more time than the bytes cost the network.
_DEFLATE_FROM = 16_384


def _load_native() -> ModuleType | None:
    try:
        module = importlib.import_module("eldr._native")
    except ImportError:
        return None
    return module if hasattr(module, "unpack") else None  # one of another version


native: ModuleType | None = _load_native()


class SignatureError(ValueError):
    """A payload that is not a signature of the expected geometry; the message says why.

    `reason` is one of a closed set, for counters: `version`, `geometry`, `malformed`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Signature:
    """Counts [L, E] (uint32) of a prompt's hits, with what they cover.

    Nobody changes one; it is not frozen, since that takes four times as long to make.

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
        self.counts = np.ascontiguousarray(self.counts, np.uint32)

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
    if form == "8bit" and peak > _TOP:
        name, extra = _ROOT, {"peak": peak}
        raw = np.floor(_TOP * np.sqrt(counts / peak)).astype(np.uint8).tobytes()
    else:
        name, raw = _plain(counts, peak)
    long = len(raw) >= _DEFLATE_FROM or "sample" in extra  # who samples wants few bytes
    small = bool(extra) or name == _SPILL
    if long and len(packed := zlib.compress(raw, 1)) < len(raw):
        name, raw = name + _DEFLATED, packed
    data = base64.b64encode(raw).decode("ascii")
    return {
        "v": SMALL_VERSION if small else WIRE_VERSION,
        "geometry": geometry.digest,
        "tokens": signature.tokens,
        "coverage": signature.coverage,
        "counts": {"encoding": name, **extra, "data": data},
    }


def _plain(counts: npt.NDArray[Any], peak: int) -> tuple[str, bytes]:
    """The counts' shortest exact encoding and its bytes."""
    name = next(n for n, dtype in _DTYPES.items() if peak <= np.iinfo(dtype).max)
    over = counts[counts >= _TOP]
    if counts.size + 4 * over.size < counts.size * _DTYPES[name].itemsize:
        low = np.minimum(counts, _TOP).astype(np.uint8).tobytes()
        return _SPILL, low + (over - _TOP).astype("<u4").tobytes()
    return name, counts.astype(_DTYPES[name]).tobytes()


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

    Args:
        payload: the wire object.
        geometry: that it must have.

    Raises:
        SignatureError: unknown version, another geometry, or anything malformed: wrong types,
            truncated or over-long data, non-finite or out-of-range coverage, counts that no
            `tokens` tokens could have made.
    """
    if not isinstance(payload, dict):
        raise SignatureError("malformed", f"signature: expected an object, got {_kind(payload)}")
    version = payload.get("v")
    if version not in (WIRE_VERSION, SMALL_VERSION) or isinstance(version, bool):
        raise SignatureError(
            "version",
            f"signature: version {version!r}, expected {WIRE_VERSION} or {SMALL_VERSION}",
        )
    if payload.get("geometry") != geometry.digest:
        raise SignatureError(
            "geometry",
            f"signature: geometry {payload.get('geometry')!r}, "
            f"expected {geometry.digest} ({geometry})",
        )
    tokens, coverage = _header(payload)
    field = payload.get("counts")
    if not isinstance(field, dict):
        raise SignatureError("malformed", f"signature: counts missing or {_kind(field)}")
    small = version == SMALL_VERSION
    sampled = top = None
    if small and ("sample" in field or "peak" in field):
        sampled, top = _lossy(field, tokens)
    name, data, deflated = _field(field, small=small, rooted=top is not None)
    raw = _raw(data, _LIMITS[name] * geometry.cells, deflated)
    counts, peak, most = _widen(name, raw, geometry, top)
    limit = tokens if sampled is None else sampled
    if most > limit * geometry.top_k or peak > limit:
        raise SignatureError(
            "malformed",
            f"signature: {most} hits in one layer and {peak} of one expert, but {limit} tokens x "
            f"top-{geometry.top_k} make at most {limit * geometry.top_k} and {limit}",
        )
    return Signature(counts, tokens, coverage, sampled)


def _lossy(field: dict[str, Any], tokens: int) -> tuple[int | None, int | None]:
    """What lossy forms add to the counts: tokens of the sample, and the peak of rooted counts."""
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


def _header(payload: dict[str, Any]) -> tuple[int, float]:
    tokens: Any = payload.get("tokens")
    coverage: Any = payload.get("coverage")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < 2**31:
        raise SignatureError("malformed", f"signature: tokens must be in [1, 2^31), got {tokens!r}")
    if type(coverage) not in _NUMBERS or not 0.0 <= coverage <= 1.0:  # NaN is not
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
    if not isinstance(field, dict):
        raise SignatureError("malformed", f"signature: counts missing or {_kind(field)}")
    name, data, deflated = _field(field, small=True, rooted="peak" in field)
    raw = _raw(data, _MOST_CELLS * _LIMITS[name], deflated)
    width = _WIDTHS[name]
    if name == _SPILL:
        # The bytes end where the tail has one number for each 255 of them.
        low = np.frombuffer(raw, np.uint8)
        total = np.arange(1, len(low) + 1) + 4 * np.cumsum(low == _TOP)
        cells = int(np.searchsorted(total, len(raw))) + 1
        if len(raw) and cells <= len(low) and total[cells - 1] == len(raw):
            return cells
    elif raw and len(raw) % width == 0:
        return len(raw) // width
    raise SignatureError("malformed", f"signature: {len(raw)} bytes of counts in {name}")


def _field(field: dict[str, Any], *, small: bool, rooted: bool) -> tuple[str, str, bool]:
    """The encoding's name, the base64 text, and whether it is deflated."""
    encoding, data = field.get("encoding"), field.get("data")
    if not isinstance(encoding, str) or not isinstance(data, str):
        raise SignatureError("malformed", "signature: counts need `encoding` and `data` strings")
    name = encoding.removesuffix(_DEFLATED)
    if name not in _WIDTHS or rooted != (name == _ROOT) or (name == _SPILL and not small):
        raise SignatureError("malformed", f"signature: unknown counts encoding {encoding!r}")
    return name, data, name != encoding


def _raw(data: str, most: int, deflated: bool) -> bytes:
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
    # The library overlooks padding after a whole quad.
    if len(text) % 4 or text.endswith("==="):
        raise ValueError(f"{len(text)} characters are no base64 with its padding")
    return base64.b64decode(text, validate=True)


def _widen(name: str, raw: bytes, geometry: Geometry, top: int | None) -> tuple[Counts, int, int]:
    """Counts uint32 [L, E], the largest of them, and the largest sum over a layer's experts.

    `top` is the peak of rooted counts, None for plain ones.
    """
    width, size, cells = _WIDTHS[name], len(raw), geometry.cells
    if size < cells or (name != _SPILL and size != width * cells):
        raise SignatureError(
            "malformed",
            f"signature: {size} bytes of counts, expected {width * cells} for {geometry}",
        )
    shape = geometry.layers, geometry.experts
    if top is not None:
        roots = np.arange(_TOP + 1, dtype=np.int64)
        table = ((roots * roots * top + _TOP * _TOP // 2) // (_TOP * _TOP)).astype(np.uint32)
        counts = table[np.frombuffer(raw, np.uint8)].reshape(shape)
    elif native is not None:
        counts = np.empty(shape, np.uint32)
        try:
            peak, most = native.unpack(raw, 0 if name == _SPILL else width, shape[0], counts)
        except ValueError as error:
            raise SignatureError("malformed", f"signature: {error}") from error
        return counts, peak, most
    elif name == _SPILL:
        counts = _spilled(raw, cells).reshape(shape)
    else:
        counts = np.frombuffer(raw, _DTYPES[name]).astype(np.uint32).reshape(shape)
    return counts, int(counts.max()), int(counts.sum(axis=1, dtype=np.uint64).max())


def _spilled(raw: bytes, cells: int) -> Counts:
    """Counts uint32 [cells] of bytes and of what exceeds them."""
    counts = np.frombuffer(raw, np.uint8, cells).astype(np.uint64)
    full = np.flatnonzero(counts == _TOP)
    if len(raw) != cells + 4 * len(full):
        raise SignatureError(
            "malformed",
            f"signature: {len(raw)} bytes of counts, expected {cells} and 4 for each of the "
            f"{len(full)} that are {_TOP}",
        )
    counts[full] += np.frombuffer(raw, "<u4", offset=cells)
    if counts.max() >= 2**32:
        raise SignatureError("malformed", "signature: a count exceeds 32 bits")
    return counts.astype(np.uint32)


def _inflate(raw: bytes, expected: int) -> bytes:
    """Inflates at most one byte more than expected, so that a bomb costs nothing."""
    stream = zlib.decompressobj()
    out = stream.decompress(raw, expected + 1)
    if not stream.eof or stream.unused_data:
        raise ValueError("deflate stream is truncated or followed by other bytes")
    return out


def _kind(value: object) -> str:
    return "absent" if value is None else type(value).__name__
