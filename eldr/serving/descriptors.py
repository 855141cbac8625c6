"""Open files: a request holds two connections, and many systems start processes with 1,024."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

# Listeners, logs, idle connections to workers, clients between two requests.
_SPARE = 1024


def make_room(requests: int) -> int:
    """Raises the limit of open files to what so many requests at once need, if it may.

    Returns:
        The limit from now on; a log line says so if it is too low.
    """
    needed = 2 * requests + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "%d open files are allowed, %d requests at once need %d: raise `ulimit -Hn`, or lower "
            "--max-concurrent",
            allowed,
            requests,
            needed,
        )
    return allowed
