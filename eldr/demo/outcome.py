"""The end of a demo's command: what is printed, and the exit code."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from eldr.demo.console import Console
from eldr.demo.processes import ProcessFailed

DONE, FAILED, INTERRUPTED = 0, 1, 130


def conclude(demo: Callable[[Console], dict[str, Any]], *, as_json: bool) -> int:
    """Runs a demo, prints what it found, and returns the exit code.

    Args:
        demo: returns summary.json's object and its `table`.
        as_json: print the object instead of the table.

    Returns:
        0 done and every check holds, 1 a check or a process failed, 130 interrupted.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    try:
        result = demo(console)
    except KeyboardInterrupt:
        console.say("interrupted: everything that was started has been stopped")
        return INTERRUPTED
    except (ProcessFailed, RuntimeError, ValueError, OSError) as error:
        console.say(f"failed: {error}")
        return FAILED
    table = result.pop("table")
    print(json.dumps(result) if as_json else f"\n{table}\n\n{result['conclusion']}")
    return DONE if _checks_hold(result["checks"]) else FAILED


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM stops the children the way Ctrl-C does."""
    raise KeyboardInterrupt


def _checks_hold(checks: Mapping[str, int]) -> bool:
    return (
        bool(checks["outputs_equal"])
        and checks["prompt_tokens_recomputed"] == 0
        and checks["prompt_tokens_transferred"] > 0
        and checks["signature_mismatches"] == 0
    )
