"""The opt-in headers say what the decision says, and nothing where there is nothing to say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.page.traced import TracedDecode, TracedPrefill, fitted
from tests.serving.rig import Rig, rig

ALWAYS = {"prefill-worker", "decode-worker", "policy", "branch", "candidates"}


async def headers(r: Rig, prompt: str) -> dict[str, str]:
    """A request's headers of ours, without their prefix."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "stream": True}
    async with r.client.post(r.url + "/v1/completions", json=body) as response:
        await response.read()
        assert response.status == 200
        found = {k.lower(): v for k, v in response.headers.items()}
    return {k.removeprefix("x-eldr-"): v for k, v in found.items() if k.startswith("x-eldr-")}


def traced() -> tuple[list[Any], list[Any]]:
    return [TracedPrefill(cached=2)], [TracedDecode(0.001) for _ in range(3)]


async def test_marginal_cost_tells_what_the_request_adds() -> None:
    async with rig(*traced(), policy="marginal_cost", worker_headers=True) as r:
        found = await headers(r, "trace:7")
        decision = next(r.router.decisions.newest(1)).explain()
    assert found.keys() >= ALWAYS | {"score", "added-experts"}
    assert "reason" not in found
    assert "band" not in found
    assert found["policy"] == "marginal_cost"
    assert found["decode-worker"] == decision["worker"]
    assert found["candidates"] == "3"
    assert found["load"] == "0"  # nothing ran there yet
    assert float(found["added-experts"]) == pytest.approx(decision["added_experts"], rel=1e-5)
    assert float(found["added-experts"]) > 4  # the first request of an empty worker reads its own
    score = decision["scores"][decision["worker"]]
    assert float(found["score"]) == pytest.approx(score, rel=1e-5)


async def test_a_band_and_a_fallback(tmp_path: Any) -> None:
    """The second prompt comes from the cache: too little is covered for a signature."""
    options: dict[str, Any] = {"policy": "locality_band", "partition": fitted(tmp_path, 3)}
    async with rig(*traced(), worker_headers=True, tau=1.0, **options) as r:
        first, second = await headers(r, "trace:7"), await headers(r, "trace:7")
    assert (first["branch"], first["band"]) == ("band", "3")
    assert 0 <= float(first["score"]) <= 1
    assert (second["branch"], second["reason"]) == ("fallback", "low_coverage")
    assert "band" not in second


async def test_nothing_unless_asked_for() -> None:
    async with rig(1, 2) as r:
        assert await headers(r, "x") == {}
