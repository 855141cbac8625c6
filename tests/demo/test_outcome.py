"""What a demo's command prints and returns."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from eldr.demo.outcome import conclude
from eldr.demo.processes import ProcessFailed

_HOLD = {
    "outputs_equal": True,
    "prompt_tokens_recomputed": 0,
    "prompt_tokens_transferred": 9,
    "signature_mismatches": 0,
}


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def found(**checks: Any) -> dict[str, Any]:
    return {"table": "TABLE", "conclusion": "It saved.", "checks": {**_HOLD, **checks}}


def test_the_table_and_the_conclusion_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(lambda console: found(), as_json=False) == 0
    assert capsys.readouterr().out == "\nTABLE\n\nIt saved.\n"


def test_json_is_the_summary_without_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(lambda console: found(), as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"conclusion": "It saved.", "checks": _HOLD}


@pytest.mark.parametrize(
    "check",
    [
        {"outputs_equal": False},
        {"prompt_tokens_recomputed": 1},
        {"prompt_tokens_transferred": 0},
        {"signature_mismatches": 1},
    ],
)
def test_a_check_that_does_not_hold_is_a_failure(check: dict[str, Any]) -> None:
    assert conclude(lambda console: found(**check), as_json=False) == 1


def test_what_failed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(console: object) -> dict[str, Any]:
        raise ProcessFailed("decode-1 ended with exit code 7")

    assert conclude(fail, as_json=False) == 1
    assert "failed: decode-1 ended with exit code 7" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_interrupt(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def wait(console: object) -> dict[str, Any]:
        os.kill(os.getpid(), number)
        signal.pause()
        raise AssertionError("not interrupted")

    assert conclude(wait, as_json=False) == 130
    assert "has been stopped" in capsys.readouterr().err
