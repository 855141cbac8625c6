"""A fault of ours must not take the engine down: it switches ELDR off, loudly.

Each side tells the other: the scheduler's hook with every later step, the worker's capture and
pending steps through the hook that owns them. `eldr_failed` of the metrics is 1 then.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

logger = logging.getLogger("vllm.eldr")
Result = TypeVar("Result")


class CanFail(Protocol):
    """An object whose hook methods stop working after the first fault."""

    failed: bool


def contained(
    fallback: Callable[..., Any],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorates a method that vLLM calls: after an exception, and ever after, `fallback` answers.

    Requests then go on without signatures, which routers treat as "no signature".

    Args:
        fallback: called with the method's arguments, without self.
    """

    def decorate(method: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(method)
        def call(self: CanFail, *args: Any) -> Result:
            if not self.failed:
                try:
                    return method(self, *args)
                except Exception:
                    self.failed = True
                    logger.exception("ELDR failed in %s; it is off until restart", method.__name__)
            answer: Result = fallback(*args)
            return answer

        return call

    return decorate


def nothing(*_: Any) -> None:
    """The fallback of methods that only add something."""
