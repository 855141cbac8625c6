"""Work beside the requests: a bug in it is told, and does not end it."""

from __future__ import annotations

import pytest

from eldr.serving import background
from eldr.serving.endpoints import Endpoint
from eldr.serving.health import HealthChecker
from tests.serving.rig import rig, until


async def test_health_checks_go_on_after_a_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_PAUSE_SECONDS", 0.01)
    ask, bugs = HealthChecker._ask, [ValueError("boom")]

    async def fails_at_first(self: HealthChecker, endpoint: Endpoint) -> tuple[bool, str]:
        if bugs:
            raise bugs.pop()
        return await ask(self, endpoint)

    monkeypatch.setattr(HealthChecker, "_ask", fails_at_first)
    async with rig(1, 1, health_interval=0.02, health_failures=1) as r:
        r.decode[0].healthy = False
        await until(lambda: not r.router.decode.able())
        assert (await r.complete())[0] in (200, 503)
    assert caplog.text.count("health failed; it begins again") == 1
    assert "boom" in caplog.text
