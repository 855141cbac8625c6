"""Expert traces: which experts every token of recorded requests used, in one strict `.npz` format.

All requests are concatenated in token order, prompt first and decoded tokens after it. A request
whose phases were not marked (`prompt_tokens` = 0) is cut at two thirds.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry

_REQUIRED = ("topk", "offsets", "prompt_tokens", "domain", "domains", "num_experts")
# `tokens` holds the token ids behind the picks, `model` the name of the model that made them.
_OPTIONAL = ("tokens", "model")
_CHUNK = 1 << 16


class TraceError(ValueError):
    """A file that is not an expert trace; the message names the key and the reason."""


@dataclass(frozen=True, eq=False)
class ExpertTrace:
    """The routing of N recorded requests.

    Attributes:
        topk: logical expert ids, uint8 or uint16 [tokens, L, K], K distinct ids a row.
        offsets: request i is rows offsets[i] .. offsets[i + 1], int64 [N + 1].
        prompt_tokens: rows of request i that are its prompt, int32 [N]; 0 = not marked.
        domain: index into `domains` of each request, uint8 [N].
        domains: names of the kinds of request.
        num_experts: E.
        tokens: optional token ids [tokens].
        model: optional name of the model.

    Raises:
        TraceError: on construction, if any of the above does not hold.
    """

    topk: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    prompt_tokens: npt.NDArray[np.int32]
    domain: npt.NDArray[np.uint8]
    domains: tuple[str, ...]
    num_experts: int
    tokens: npt.NDArray[Any] | None = None
    model: str = ""

    def __post_init__(self) -> None:
        _check_topk(self.topk, self.num_experts)
        _check_requests(self)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def geometry(self) -> Geometry:
        """L, E and K of the model that made the trace."""
        return Geometry(self.topk.shape[1], self.num_experts, self.topk.shape[2])

    @cached_property
    def cuts(self) -> npt.NDArray[np.int64]:
        """First decoded row of each request, int64 [N]; unmarked requests are cut at two thirds."""
        lengths = np.diff(self.offsets)
        marked = self.prompt_tokens.astype(np.int64)
        prompt = np.where(marked > 0, marked, np.maximum(1, lengths * 2 // 3))
        return np.asarray(self.offsets[:-1] + prompt, np.int64)

    @cached_property
    def prompt_counts(self) -> npt.NDArray[np.uint32]:
        """Signature of each request's prompt: hits, uint32 [N, L, E]."""
        return self.counts(self.offsets[:-1], self.cuts)

    @cached_property
    def decode_counts(self) -> npt.NDArray[np.uint32]:
        """Hits of each request's decoded tokens, uint32 [N, L, E]."""
        return self.counts(self.cuts, self.offsets[1:])

    def counts(
        self, start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint32]:
        """Hits in rows start[i] .. stop[i] of each request, uint32 [N, L, E]."""
        shape = (self.geometry.layers, self.num_experts)
        base = (np.arange(shape[0], dtype=np.int64) * shape[1])[None, :, None]
        out = np.empty((len(self), *shape), np.uint32)
        for i, (a, b) in enumerate(zip(start, stop, strict=True)):
            cells = (self.topk[a:b].astype(np.int64) + base).ravel()
            out[i] = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        return out

    def select(self, requests: npt.ArrayLike) -> ExpertTrace:
        """A trace of the given requests (indices, in this order, repeats allowed)."""
        rows = np.asarray(requests, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise TraceError(f"select: requests must be in [0, {len(self)}), got {rows}")
        spans = [np.arange(self.offsets[r], self.offsets[r + 1]) for r in rows]
        picked = np.concatenate(spans) if spans else np.empty(0, np.int64)
        lengths = np.diff(self.offsets)[rows]
        return ExpertTrace(
            topk=self.topk[picked],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt_tokens=self.prompt_tokens[rows],
            domain=self.domain[rows],
            domains=self.domains,
            num_experts=self.num_experts,
            tokens=None if self.tokens is None else self.tokens[picked],
            model=self.model,
        )

    def save(self, path: str | Path) -> None:
        """Writes the trace; `load` of the file gives an equal one."""
        arrays: dict[str, Any] = {
            "topk": self.topk,
            "offsets": self.offsets,
            "prompt_tokens": self.prompt_tokens,
            "domain": self.domain,
            "domains": np.array(self.domains),
            "num_experts": np.int64(self.num_experts),
        }
        if self.tokens is not None:
            arrays["tokens"] = self.tokens
        if self.model:
            arrays["model"] = np.array(self.model)
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)


def load(path: str | Path) -> ExpertTrace:
    """Reads and validates a trace.

    Raises:
        TraceError: unreadable or truncated file, missing or unknown key, wrong type, shape or
            value; the message starts with the path and names the key.
        FileNotFoundError: no such file.
    """
    try:
        return _build(_read(Path(path)))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    key = ""
    try:
        opened = np.load(path, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise TraceError("not an .npz archive")
        with opened as archive:
            missing = [k for k in _REQUIRED if k not in archive.files]
            unknown = [k for k in archive.files if k not in _REQUIRED + _OPTIONAL]
            if missing or unknown:
                raise TraceError(f"missing keys {missing}, unknown keys {unknown}")
            arrays = {}
            for key in archive.files:
                arrays[key] = archive[key]
            return arrays
    except FileNotFoundError:
        raise
    except TraceError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        where = f"key {key!r}: " if key else ""
        raise TraceError(f"{where}cannot be read ({error}); is the file complete?") from error


def _build(arrays: dict[str, npt.NDArray[Any]]) -> ExpertTrace:
    _typed(arrays, "topk", 3, "uint8 or uint16", ("u1", "u2"))
    _typed(arrays, "offsets", 1, "int64", ("i8",))
    _typed(arrays, "prompt_tokens", 1, "int32", ("i4",))
    _typed(arrays, "domain", 1, "uint8", ("u1",))
    if arrays["domains"].dtype.kind != "U" or arrays["domains"].ndim != 1:
        raise TraceError(f"key 'domains': expected strings [D], got {_shape(arrays['domains'])}")
    experts = arrays["num_experts"]
    if experts.ndim != 0 or experts.dtype.kind not in "iu":
        raise TraceError(f"key 'num_experts': expected one integer, got {_shape(experts)}")
    if "tokens" in arrays:
        _typed(arrays, "tokens", 1, "uint16, int32 or uint32", ("u2", "i4", "u4"))
    return ExpertTrace(
        topk=arrays["topk"],
        offsets=arrays["offsets"],
        prompt_tokens=arrays["prompt_tokens"],
        domain=arrays["domain"],
        domains=tuple(str(d) for d in arrays["domains"]),
        num_experts=int(experts),
        tokens=arrays.get("tokens"),
        model=str(arrays["model"]) if "model" in arrays else "",
    )


def _typed(
    arrays: dict[str, npt.NDArray[Any]], key: str, ndim: int, names: str, kinds: tuple[str, ...]
) -> None:
    array = arrays[key]
    if array.ndim != ndim or array.dtype.str.lstrip("<|=") not in kinds:
        raise TraceError(f"key {key!r}: expected {names} with {ndim} axes, got {_shape(array)}")


def _shape(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _check_topk(topk: npt.NDArray[Any], experts: int) -> None:
    if topk.ndim != 3 or topk.dtype not in (np.uint8, np.uint16):
        raise TraceError(f"key 'topk': expected uint8 or uint16 [tokens, L, K], got {_shape(topk)}")
    tokens, layers, k = topk.shape
    if not (tokens and layers and k):
        raise TraceError(f"key 'topk': no axis may be empty, got {list(topk.shape)}")
    if not k <= experts <= 65_536:
        raise TraceError(f"key 'num_experts': {experts} experts cannot give top-{k} picks")
    for start in range(0, tokens, _CHUNK):  # in pieces, so that a large trace is not copied whole
        rows = np.sort(topk[start : start + _CHUNK], axis=2)
        if int(rows[:, :, -1].max()) >= experts:
            raise TraceError(
                f"key 'topk': expert {int(rows[:, :, -1].max())}, but num_experts = {experts}"
            )
        if bool((rows[:, :, 1:] == rows[:, :, :-1]).any()):
            raise TraceError("key 'topk': a token picks the same expert of a layer twice")


def _check_requests(trace: ExpertTrace) -> None:
    offsets, tokens = trace.offsets, trace.topk.shape[0]
    if offsets.ndim != 1 or offsets.size < 2:
        raise TraceError(f"key 'offsets': expected int64 [N + 1], N >= 1, got {_shape(offsets)}")
    requests = offsets.size - 1
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens:
        raise TraceError(
            f"key 'offsets': must run from 0 to the {tokens} rows of topk, "
            f"runs from {int(offsets[0])} to {int(offsets[-1])}"
        )
    lengths = np.diff(offsets)
    if int(lengths.min()) < 2:
        raise TraceError(
            "key 'offsets': every request needs a prompt token and a decoded one, request "
            f"{int(lengths.argmin())} has {int(lengths.min())} rows"
        )
    prompt = trace.prompt_tokens
    if prompt.shape != (requests,) or int(prompt.min()) < 0 or bool((prompt >= lengths).any()):
        raise TraceError(
            f"key 'prompt_tokens': expected {requests} values in [0, rows of the request)"
        )
    if trace.domain.shape != (requests,) or int(trace.domain.max()) >= len(trace.domains):
        raise TraceError(
            f"key 'domain': expected {requests} indices below {len(trace.domains)} domains"
        )
    if trace.tokens is not None and trace.tokens.shape != (tokens,):
        raise TraceError(f"key 'tokens': expected [{tokens}], got {_shape(trace.tokens)}")
