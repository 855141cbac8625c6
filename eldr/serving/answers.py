"""The prefill leg's answer: a KV handle for the decode worker, a signature for the router."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

Fields = dict[str, msgspec.Raw]


class PromptDetails(msgspec.Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage` as far as the router reads it."""

    prompt_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: Fields | None = None
    usage: Usage | None = None


class MalformedAnswer(ValueError):
    """The prefill worker's 200 answer is not what a prefill worker says."""


class PushConnector(ValueError):
    """The KV connector pushes: it must know the decode worker before prefill."""


_NO_USAGE, _NO_DETAILS = Usage(), PromptDetails()
_decode_answer = msgspec.json.Decoder(_Answer).decode
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Prefilled:
    """What the prefill leg left behind.

    Attributes:
        kv: raw JSON of kv_transfer_params for the decode worker, without `eldr`; None if the
            worker kept no KV.
        signature: raw JSON of kv_transfer_params.eldr, or None.
        prompt_tokens: from the answer's usage; 0 if it said nothing.
        cached_tokens: prompt tokens that the prefill worker had cached.
        engine: raw JSON of the engine's id, b"" if it has none.
    """

    kv: bytes | None
    signature: bytes | None
    prompt_tokens: int
    cached_tokens: int
    engine: bytes = b""


NOT_PREFILLED = Prefilled(kv=None, signature=None, prompt_tokens=0, cached_tokens=0)


def parse_prefill(raw: bytes) -> Prefilled:
    """Reads a prefill worker's 200 answer.

    Raises:
        MalformedAnswer: not the JSON of a completion.
        PushConnector: the KV handle is one of a push connector.
    """
    try:
        if not raw.isascii():
            raw.decode()  # the handle is passed on unread
        answer = _decode_answer(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedAnswer(f"the prefill worker's answer is malformed: {error}") from error
    usage = answer.usage or _NO_USAGE
    details = usage.prompt_tokens_details or _NO_DETAILS
    params = answer.kv_transfer_params
    signature = params.pop("eldr", None) if params else None
    if params and "transfer_mode" in params and bytes(params["transfer_mode"]) != b'"pull"':
        raise PushConnector(
            "the prefill worker's KV connector uses transfer mode "
            f"{bytes(params['transfer_mode']).decode('utf-8', 'replace')}: it must know the decode "
            "worker before prefill, but this router picks it afterwards; use the NIXL connector "
            "in pull mode"
        )
    return Prefilled(
        kv=_encode(params) if params else None,
        signature=bytes(signature) if signature is not None else None,
        prompt_tokens=max(0, usage.prompt_tokens),
        cached_tokens=max(0, details.cached_tokens or 0),
        engine=bytes(params.get("remote_engine_id", b"")) if params else b"",
    )
