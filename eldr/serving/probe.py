"""Start-up checks: every worker answers, speaks for one model, and fits the policy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from eldr.geometry import Geometry
from eldr.serving.endpoints import Endpoint
from eldr.serving.errors import StartError

log = logging.getLogger(__name__)

_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 0.25
# Progress is printed this often while workers load their weights.
_REPORT_SECONDS = 10.0


class _GeometryFields(msgspec.Struct):
    layers: int
    experts: int
    top_k: int


class _Info(msgspec.Struct):
    v: int
    role: str
    geometry: _GeometryFields
    model: str = ""
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class Info:
    """What an ELDR worker says about itself at /eldr/info."""

    role: str
    model: str
    geometry: Geometry


async def wait_for(
    session: aiohttp.ClientSession, endpoints: Sequence[Endpoint], limit: float
) -> None:
    """Waits until every worker answers a real API call.

    Raises:
        StartError: a worker did not within `limit` seconds; names URL, time and last error.
    """
    log.debug("waiting for %d workers", len(endpoints))
    await asyncio.gather(*(_wait(session, endpoint, limit) for endpoint in endpoints))


async def _wait(session: aiohttp.ClientSession, endpoint: Endpoint, limit: float) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    reported, last = start, "no answer"
    while True:
        left = start + limit - loop.time()
        try:
            async with asyncio.timeout(min(_ATTEMPT_SECONDS, max(left, 0.05))):
                url = endpoint.route("/v1/models")
                async with session.get(url, allow_redirects=False) as response:
                    await response.read()
                    # A key that the worker wants is checked by the first request, not here.
                    if response.status in (200, 401, 403):
                        return
                    last = f"HTTP {response.status}"
        except TimeoutError:
            last = "no answer in time"
        except (aiohttp.ClientError, OSError) as error:
            last = str(error) or type(error).__name__
        now = loop.time()
        if now - start >= limit:
            raise StartError(
                f"{endpoint.role} worker {endpoint.base} did not answer /v1/models within "
                f"{limit:g} s; last error: {last}. Start the worker, correct the URL, or raise "
                "--startup-timeout."
            )
        if now - reported >= _REPORT_SECONDS:
            reported = now
            log.info(
                "waiting for %s worker %s: %.0f s, %s",
                endpoint.role,
                endpoint.base,
                now - start,
                last,
            )
        await asyncio.sleep(min(_PAUSE_SECONDS, max(0.0, start + limit - now)))


async def info(session: aiohttp.ClientSession, endpoint: Endpoint) -> Info | None:
    """What the worker says at /eldr/info; None if it has no such route.

    Raises:
        StartError: no answer at all.
    """
    url = endpoint.route("/eldr/info")
    try:
        async with (
            asyncio.timeout(_ATTEMPT_SECONDS),
            session.get(url, allow_redirects=False) as response,
        ):
            raw = await response.read()
            if response.status != 200:
                return None
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        raise StartError(f"{url}: {str(error) or type(error).__name__}") from error
    try:
        answer = msgspec.json.decode(raw, type=_Info)
        shape = answer.geometry
        return Info(answer.role, answer.model, Geometry(shape.layers, shape.experts, shape.top_k))
    except (msgspec.DecodeError, ValueError) as error:
        log.warning("%s is no ELDR information (%s): taken for an unpatched worker", url, error)
        return None


async def geometry_of(
    session: aiohttp.ClientSession, prefill: Sequence[Endpoint], *, required_by: str | None
) -> Geometry | None:
    """The geometry that all patched prefill workers share; None if none is patched.

    Raises:
        StartError: two geometries, or (with `required_by`, a policy) a worker without ELDR.
    """
    infos = await asyncio.gather(*(info(session, endpoint) for endpoint in prefill))
    for endpoint, found in zip(prefill, infos, strict=True):
        if found is None and required_by is not None:
            raise StartError(
                f"policy {required_by} needs signatures, but prefill worker {endpoint.base} has no "
                "/eldr/info: its vLLM is not patched, or ELDR is not configured. Run `eldr patch "
                'apply` there and start it with --additional-config \'{"eldr": {"role": '
                '"prefill"}}\', or choose a policy that looks at load alone.'
            )
        if found is not None and found.role != "prefill":
            raise StartError(
                f"{endpoint.base} is given with --prefill, but its ELDR role is {found.role!r}"
            )
    shapes = {found.geometry for found in infos if found is not None}
    if len(shapes) > 1:
        listed = ", ".join(
            f"{e.base}: {i.geometry}" for e, i in zip(prefill, infos, strict=True) if i is not None
        )
        raise StartError(f"the prefill workers serve models of different geometries: {listed}")
    return shapes.pop() if shapes else None
