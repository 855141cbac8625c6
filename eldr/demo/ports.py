"""Free loopback ports."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# Below the ports that Linux gives to outgoing connections (32768 and above by default) and above
# those of Ray's workers: an engine binds its port many seconds after it was found, and what the
# kernel hands out meanwhile must not be that one.
_RANGE = range(20_000, 32_768)
_DRAWS = 1_000


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports on 127.0.0.1 that were free a moment ago.

    All are held open until the last is found, so that one call never returns a port twice.

    Raises:
        OSError: hardly any port of the range is free.
    """
    draw = random.SystemRandom()
    with ExitStack() as stack:
        found: list[int] = []
        for port in draw.sample(_RANGE, _DRAWS):
            held = stack.enter_context(socket.socket())
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"{len(found)} of {count} free ports found between {_RANGE[0]} and {_RANGE[-1]}")
