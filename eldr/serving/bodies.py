"""Request bodies: what a client sent, and what each of the two legs gets.

Only the top level of the JSON is opened; every value stays the bytes that the client sent, so
fields that this router has never heard of reach the workers byte for byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import orjson

from eldr.serving.errors import ClientError

Fields = dict[str, msgspec.Raw]

_decode_fields = msgspec.json.Decoder(Fields).decode
_encode = msgspec.json.Encoder().encode

_HANDLES = frozenset({"kv_transfer_params", "ec_transfer_params"})
# A JSON text may hide an ASCII character of a key behind an escape.
ESCAPE = b"\\u00"
_EMPTY_OR_NO_LIST = re.compile(rb"[^\[]|\[\s*\]")
_FALSE, _ZERO, _ONE = msgspec.Raw(b"false"), msgspec.Raw(b"0"), msgspec.Raw(b"1")
_ASK_FOR_KV = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
# A prefill produces one token that nobody sees: what asks for more of them is left out.
_NOT_IN_PREFILL = frozenset(
    {
        "stream_options",
        "min_tokens",
        "min_completion_tokens",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "return_token_ids",
    }
)
_ONE_IN_PREFILL = frozenset({"max_completion_tokens", "n", "best_of"})


@dataclass(slots=True)
class Body:
    """A parsed request body.

    Attributes:
        fields: top-level keys and their raw JSON; the client's kv_transfer_params and the like are
            not there, since they could name another worker's memory.
        stream: whether the client wants server-sent events.
        chat: whether it came by /v1/chat/completions.
    """

    fields: Fields
    stream: bool
    chat: bool

    def prefill(self) -> bytes:
        """The body of the prefill leg: one token, not streamed, KV kept for a remote reader."""
        out = self.fields.copy()
        for name in _NOT_IN_PREFILL & out.keys():
            del out[name]
        out["max_tokens"] = _ONE
        for name in _ONE_IN_PREFILL & out.keys():
            out[name] = _ONE
        out["stream"] = _FALSE
        out["kv_transfer_params"] = _ASK_FOR_KV
        return _encode(out)

    def decode(self, kv_transfer_params: bytes | None) -> bytes:
        """The body of the decode leg: the client's, with the KV handle of the prefill answer."""
        if kv_transfer_params is None:
            return _encode(self.fields)
        return _encode({**self.fields, "kv_transfer_params": msgspec.Raw(kv_transfer_params)})


def parse(raw: bytes, *, chat: bool) -> Body:
    """Opens the top level of a request body.

    Raises:
        ClientError: 400, if it is not a JSON object or lacks what the endpoint needs.
    """
    try:
        if not raw.isascii():
            raw.decode()  # values are passed on unread, so nobody else here would see bad UTF-8
        fields = _decode_fields(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the body must be a JSON object: {error}") from error
    _take_handles_out(fields)
    required = "messages" if chat else "prompt"
    value = fields.get(required)
    head = b"null" if value is None else bytes(memoryview(value)[:64])
    if head == b"null":
        if chat or "prompt_embeds" not in fields:
            raise _bad(f"`{required}` is missing")
    elif chat and _EMPTY_OR_NO_LIST.match(head):
        raise _bad("`messages` must be a non-empty list")
    return Body(fields, _flag(fields.get("stream")), chat)


def _take_handles_out(fields: Fields) -> None:
    """Takes out what names another worker's memory.

    Raises:
        ClientError: 400, it is hidden in `vllm_xargs`, from which vLLM takes it as well.
    """
    for name in _HANDLES & fields.keys():
        del fields[name]
    extra = fields.get("vllm_xargs")
    if extra is None:
        return
    raw = bytes(extra)
    if b"_transfer_params" not in raw and ESCAPE not in raw:
        return
    try:
        given = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _bad(f"`vllm_xargs`: {error}") from error
    if isinstance(given, dict) and (found := sorted(_HANDLES & given.keys())):
        raise _bad(f"`vllm_xargs` may not hold {' and '.join(found)}: this router sets it")


SEVERAL_CHOICES = "several_choices"
_NOTHING = (b"null", b"false", b"0")
_NULL = msgspec.Raw(b"null")
_PROMPTS = msgspec.json.Decoder(list[msgspec.Raw])
_LIST_OF_PROMPTS = re.compile(rb"\[\s*[\[\"]")
_UNUSUAL = frozenset(
    {"n", "best_of", "prompt_logprobs", "echo", "use_beam_search", "prompt_embeds"}
)


def unsplittable(body: Body) -> str | None:
    """Why one KV handle cannot serve a request, None if it can; a closed set of reasons.

    A prefill answer carries the handle of one prompt. Prompt logprobs need the prompt's forward
    pass where the answer is made. Several choices of one prompt share a handle: the first that
    reads it frees the KV for all of them, which is safe as long as they are scheduled together.
    """
    fields = body.fields
    unusual = _UNUSUAL & fields.keys()
    prompts = _prompts(fields.get("prompt", _NULL))
    if "prompt_embeds" in unusual:
        prompts += _prompts(fields["prompt_embeds"])
    if prompts > 1:
        return "batch_of_prompts"
    if not unusual:
        return None
    asked = {name for name in unusual if bytes(fields[name]) not in _NOTHING}
    # 0 of them still asks for the prompt's own tokens'; an echo takes over how many the answer has.
    ask = fields.get("prompt_logprobs", _NULL)
    if bytes(ask) == b"null" and "echo" in asked:
        ask = fields.get("top_logprobs", _ZERO) if body.chat else fields.get("logprobs", _NULL)
    if bytes(ask) != b"null":
        return "prompt_logprobs"
    if "use_beam_search" in asked:
        return "beam_search"
    if any(bytes(fields[name]) != b"1" for name in asked & {"n", "best_of"}):
        return SEVERAL_CHOICES
    return None


def _prompts(raw: msgspec.Raw) -> int:
    if _LIST_OF_PROMPTS.match(raw):
        return len(_PROMPTS.decode(raw))
    return int(bytes(raw) != b"null")


def _flag(value: msgspec.Raw | None) -> bool:
    if value is None:
        return False
    raw = bytes(value)
    if raw not in (b"true", b"false", b"null"):
        raise _bad(f"`stream` must be true or false, got {raw[:20].decode('utf-8', 'replace')}")
    return raw == b"true"


def _bad(message: str) -> ClientError:
    return ClientError(400, "invalid_request_error", message)
