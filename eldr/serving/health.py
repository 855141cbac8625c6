"""Active health checks of every member, whatever the membership is at the moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from eldr.serving.endpoints import Endpoint
from eldr.serving.pool import Pool

log = logging.getLogger(__name__)


class HealthChecker:
    """Asks GET /health of all members of some pools at an interval."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        pools: Sequence[Pool],
        *,
        interval: float,
        limit: float,
    ) -> None:
        self._session = session
        self._pools = pools
        self._interval = interval
        self._limit = limit

    async def run(self) -> None:
        """Checks until cancelled; a round starts one interval after the last one ended."""
        while True:
            await asyncio.sleep(self._interval)
            await self.check_all()

    async def check_all(self) -> None:
        """One check of every member; ranks of one engine share a check.

        Who never answered is asked by the discovery, which also looks at what it serves.
        """
        by_url: dict[str, list[tuple[Pool, Endpoint]]] = {}
        for pool in self._pools:
            for endpoint in (e for e in pool.endpoints if not e.awaited):
                by_url.setdefault(str(endpoint.base), []).append((pool, endpoint))
        await asyncio.gather(*(self._check(members) for members in by_url.values()))

    async def _check(self, members: list[tuple[Pool, Endpoint]]) -> None:
        started = asyncio.get_running_loop().time()
        ok, why = await self._ask(members[0][1])
        for pool, endpoint in members:
            pool.checked(endpoint, ok, endpoint.checked_at, why)
            endpoint.checked_at = started

    async def _ask(self, endpoint: Endpoint) -> tuple[bool, str]:
        url = endpoint.route("/health")
        try:
            async with (
                asyncio.timeout(self._limit),
                self._session.get(url, allow_redirects=False) as response,
            ):
                await response.read()
                return response.status == 200, f"/health answers {response.status}"
        except TimeoutError:
            return False, f"/health does not answer in {self._limit:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return False, str(error) or type(error).__name__
