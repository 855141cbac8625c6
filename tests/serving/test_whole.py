"""Requests that one KV handle cannot serve are served whole."""

from __future__ import annotations

import pytest

from tests.serving.rig import rig


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "prompt_embeds": "QQ=="},
        {"prompt": None, "prompt_embeds": ["QQ==", "Qg=="]},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 0},
        {"use_beam_search": True, "n": 2},
    ],
)
@pytest.mark.parametrize("choice", ["whole", "fail"])
async def test_requests_that_one_handle_cannot_serve(
    fields: dict[str, object], choice: str
) -> None:
    async with rig(1, 1, unsplittable=choice) as r:
        status, _ = await r.complete(**fields)
        assert status == (200 if choice == "whole" else 400)
        assert not r.prefill[0].seen
        assert len(r.decode[0].seen) == (choice == "whole")


@pytest.mark.parametrize(
    "fields",
    [
        *({"prompt": prompt} for prompt in ("x", ["x"], [1, 2, 3], [[1, 2]])),
        {"prompt": None, "prompt_embeds": "QQ=="},
        {"prompt": None, "prompt_embeds": ["QQ=="]},
        {"echo": True},
        {"echo": False, "logprobs": 1},
        {"prompt_logprobs": None, "use_beam_search": False},
    ],
)
async def test_one_prompt_in_any_spelling_takes_both_legs(fields: dict[str, object]) -> None:
    async with rig(1, 1) as r:
        assert (await r.complete(**fields))[0] == 200
        assert r.prefill[0].seen


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({"echo": True}, True),  # vLLM's default of top_logprobs is 0
        ({"echo": True, "top_logprobs": None}, False),
        ({"logprobs": True, "top_logprobs": 2}, False),
        ({"prompt_logprobs": 0}, True),
    ],
)
async def test_prompt_logprobs_of_chat(fields: dict[str, object], whole: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    async with rig(1, 1) as r:
        async with r.client.post(r.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
        assert bool(r.prefill[0].seen) == (not whole)
