"""Expert traces from what an engine returned per request."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.workload.traces import ExpertTrace, TraceError


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRequest:
    """The routing of one request.

    Attributes:
        topk: expert ids [tokens, layers, K], prompt first.
        prompt_tokens: rows that are the prompt.
        domain: its label.
        tokens: token ids [tokens], or None.
    """

    topk: npt.NDArray[Any]
    prompt_tokens: int
    domain: str = ""
    tokens: npt.NDArray[np.uint32] | None = None


def decode_routed_experts(text: str) -> npt.NDArray[Any]:
    """The array of vLLM's `routed_experts`: base64 of an `.npy`, integers [tokens, layers, K].

    Raises:
        TraceError: not base64, not an `.npy`, or another kind of array.
    """
    try:
        array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise TraceError(f"routed_experts cannot be read: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.dtype.kind not in "iu":
        raise TraceError("routed_experts: expected integers [tokens, layers, K]")
    return array


def routing_of(answer: Any, domain: str = "") -> RoutedRequest:
    """The routing in an answer of vLLM's /v1/completions or /v1/chat/completions (parsed JSON).

    Token ids are kept where the request asked for them (`return_token_ids`).

    Raises:
        TraceError: no such answer, no routing in it, or no decoded token.
    """
    try:
        choice, prompt_tokens = answer["choices"][0], int(answer["usage"]["prompt_tokens"])
        prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or []
        ids, routed = prompt + (choice.get("token_ids") or []), choice.get("routed_experts")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"not an answer of vLLM: {error!r}") from error
    if routed is None:
        raise TraceError("no routing in the answer; serve with --enable-return-routed-experts")
    topk = decode_routed_experts(routed)
    if len(topk) <= prompt_tokens:
        raise TraceError(f"{len(topk)} rows for {prompt_tokens} prompt tokens: none decoded")
    # The last sampled token was never run through the model, so it has no row.
    tokens = np.array(ids[: len(topk)], np.uint32) if len(ids) >= len(topk) else None
    return RoutedRequest(topk, prompt_tokens, domain, tokens)


def read_answers(path: str | Path) -> list[RoutedRequest]:
    """Saved answers of vLLM, one JSON object a line; a key `domain` beside the answer's labels it.

    Raises:
        TraceError: a line that is not such an answer; names the line.
        OSError: the file cannot be read.
    """
    found = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                answer = json.loads(line)
                domain = answer.get("domain", "") if isinstance(answer, dict) else ""
                found.append(routing_of(answer, str(domain)))
            except ValueError as error:
                raise TraceError(f"line {number}: {error}") from error
    return found


def assemble(requests: Sequence[RoutedRequest], num_experts: int, model: str = "") -> ExpertTrace:
    """One trace of all requests.

    Layers in which every token of every request names expert 0 alone are dense, and are left out.

    Raises:
        TraceError: no requests, shapes that differ, or anything that a trace refuses.
    """
    if not requests:
        raise TraceError("no request to make a trace of")
    if len(shapes := {r.topk.shape[1:] for r in requests}) > 1:
        raise TraceError(f"requests differ in layers or top-k: {sorted(shapes)}")
    topk = np.concatenate([r.topk for r in requests])
    routed = topk.any(axis=(0, 2)) if topk.shape[2] > 1 else np.ones(topk.shape[1], np.bool_)
    domains = tuple(dict.fromkeys(r.domain or "unlabelled" for r in requests))
    lengths = [len(r.topk) for r in requests]
    if int(topk.min()) < 0 or int(topk.max()) >= num_experts:
        raise TraceError(
            f"expert ids {topk.min()} .. {topk.max()}, but the model has {num_experts}"
        )
    known = [r.tokens for r in requests if r.tokens is not None]
    return ExpertTrace(
        topk=np.ascontiguousarray(
            topk[:, routed].astype(np.uint8 if num_experts <= 256 else np.uint16)
        ),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int32),
        domain=np.array([domains.index(r.domain or "unlabelled") for r in requests], np.uint8),
        domains=domains,
        num_experts=num_experts,
        tokens=np.concatenate(known) if len(known) == len(requests) else None,
        model=model,
    )
