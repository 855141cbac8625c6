"""Both pools behind one Inference Gateway: the header says the phase, an endpoint picker the pod.

The protocol is llm-d's coordinator protocol: one call per phase to the same URL, `EPP-Profile`
naming the scheduling profile, the prefill answer's `kv_transfer_params` handed to the decode call.
ELDR adds one header to the decode call, the group of pods whose experts fit; the endpoint picker's
`header-label-affinity-scorer` prefers pods whose label equals it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp

from eldr.serving.http1 import UpstreamError
from eldr.serving.llmd.config import CoordinatorConfig
from eldr.serving.pd.decider import Decider
from eldr.serving.pd.route import Head, Headers, Leg, Route
from eldr.serving.upstream import Answer


class Gateway:
    """Calls the gateway; implements `pd.legs.Pools`."""

    def __init__(
        self, session: aiohttp.ClientSession, config: CoordinatorConfig, decider: Decider
    ) -> None:
        self._session = session
        self._config = config
        self._decider = decider
        self._url = config.gateway.rstrip("/")

    async def prefill(self, request_id: str, leg: Leg) -> Answer:
        """The prefill call.

        Raises:
            UpstreamError: no usable answer.
        """
        headers = self._headers(leg, self._config.prefill_profile)
        try:
            async with self._session.post(
                self._url + leg.path, data=leg.body, headers=headers
            ) as got:
                return Answer(got.status, list(got.raw_headers), await got.read())
        except aiohttp.ClientError as error:
            raise _failure(error) from error

    async def decode(self, route: Route, leg: Leg) -> AsyncGenerator[Head | bytes]:
        """The decode call, to the group of pods that the decider chose.

        Raises:
            UpstreamError: no answer, or an answer that broke off.
        """
        headers = self._headers(leg, self._config.decode_profile)
        group = self._decider.reserve(route, self._decider.fleet.names)
        if group is not None:
            headers.append((self._config.cluster_header, group))
        try:
            async with self._session.post(
                self._url + leg.path, data=leg.body, headers=headers
            ) as got:
                yield Head(got.status, [(k.lower(), v) for k, v in got.headers.items()])
                async for piece in got.content.iter_any():
                    yield piece
        except aiohttp.ClientError as error:
            raise _failure(error) from error

    def _headers(self, leg: Leg, profile: str) -> Headers:
        return [*leg.headers, (self._config.profile_header, profile)]


def _failure(error: aiohttp.ClientError) -> UpstreamError:
    text = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError):
        return UpstreamError("connect", False, text)
    return UpstreamError("reset", True, text)
