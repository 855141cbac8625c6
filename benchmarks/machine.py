"""What a result has to say about the machine that made it."""

from __future__ import annotations

import platform


def cpu_name() -> str:
    """The processor's model name, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(x.split(":")[1].strip() for x in file if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
