"""Start-up checks: workers answer, speak for one model, and fit the policy."""

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
_NOTHING = "no answer"
_DO = "Start the worker, or correct the URL"


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


async def wait_for(session: aiohttp.ClientSession, endpoint: Endpoint, limit: float) -> None:
    """Waits until a worker answers a real API call.

    Raises:
        StartError: it did not within `limit` seconds; names URL, time and last error.
    """
    last = {endpoint: _NOTHING}
    await _ask(session, endpoint, asyncio.get_running_loop().time() + limit, last)
    if last:
        raise StartError(f"{unanswered(endpoint, limit, last[endpoint])} {_DO}.")


async def wait_for_fleet(
    session: aiohttp.ClientSession, endpoints: Sequence[Endpoint], limit: float, grace: float
) -> dict[Endpoint, str]:
    """Waits until every worker answers a real API call, or some do and the others are late.

    Args:
        session: for the calls.
        endpoints: workers of both kinds.
        limit: seconds that this may take in all.
        grace: seconds that the others get once a worker of each kind has answered.

    Returns:
        Those that did not answer, and what each was told last.

    Raises:
        StartError: all of a kind were silent for `limit` seconds; names URLs, time, last errors.
    """
    loop = asyncio.get_running_loop()
    begun, last = loop.time(), dict.fromkeys(endpoints, _NOTHING)
    end, kinds = begun + limit, {endpoint.role for endpoint in endpoints}
    log.debug("waiting for %d workers", len(endpoints))
    asking = {asyncio.create_task(_ask(session, e, end, last)) for e in endpoints}
    try:
        enough = False
        while asking and loop.time() < end:
            done, asking = await asyncio.wait(
                asking, timeout=end - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # a bug in it shows
            if not enough and {e.role for e in endpoints if e not in last} == kinds:
                enough, end = True, min(end, loop.time() + grace)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    for kind in sorted(kinds):
        of_kind = [e for e in endpoints if e.role == kind]
        if all(e in last for e in of_kind):
            said = " ".join(dict.fromkeys(unanswered(e, limit, last[e]) for e in of_kind))
            raise StartError(f"{said} {_DO}, or raise --startup-timeout.")
    return last


def unanswered(endpoint: Endpoint, seconds: float, last: str) -> str:
    """Says that a worker did not answer."""
    return (
        f"{endpoint.role} worker {endpoint.base} did not answer /v1/models within {seconds:g} s; "
        f"last error: {last}."
    )


async def _ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, end: float, last: dict[Endpoint, str]
) -> None:
    """Asks a worker until it answers, and then takes it out of `last`, or until the end."""
    loop = asyncio.get_running_loop()
    begun = reported = loop.time()
    while (problem := await _problem(session, endpoint, end - loop.time())) is not None:
        last[endpoint] = problem
        now = loop.time()
        if now >= end:
            return
        if now - reported >= _REPORT_SECONDS:
            reported = now
            log.info(
                "waiting for %s worker %s: %.0f s, %s",
                endpoint.role,
                endpoint.base,
                now - begun,
                problem,
            )
        await asyncio.sleep(min(_PAUSE_SECONDS, end - now))
    del last[endpoint]


async def _problem(session: aiohttp.ClientSession, endpoint: Endpoint, left: float) -> str | None:
    """What is wrong with a worker's answer; None if nothing is."""
    try:
        async with asyncio.timeout(min(_ATTEMPT_SECONDS, max(left, 0.05))):
            url = endpoint.route("/v1/models")
            async with session.get(url, allow_redirects=False) as response:
                await response.read()
                # A key that the worker wants is checked by the first request, not here.
                return None if response.status in (200, 401, 403) else f"HTTP {response.status}"
    except TimeoutError:
        return "no answer in time"
    except (aiohttp.ClientError, OSError) as error:
        return str(error) or type(error).__name__


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
