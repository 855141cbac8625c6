"""The two pools behind their Serve handles; Ray's many failures become the router's few."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from eldr.serving.http1 import UpstreamError
from eldr.serving.pd.route import Head, Leg, Route
from eldr.serving.upstream import Answer


class Handles:
    """Calls prefill replicas (Serve's choice) and decode replicas (ELDR's choice)."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self._prefill = prefill.options(method_name="whole")
        self._decode = decode.options(method_name="stream", stream=True)

    async def prefill(self, request_id: str, leg: Leg) -> Answer:
        """One request on a prefill replica.

        Raises:
            UpstreamError: no usable answer.
        """
        with _translated():
            return answer(*await self._prefill.remote(request_id, leg))

    async def decode(self, route: Route, leg: Leg) -> AsyncGenerator[Head | bytes]:
        """One request on the decode replica that the route gets: its head, then its body.

        Raises:
            UpstreamError: no answer, or an answer that broke off.
        """
        response = None
        try:
            with _translated():
                response = self._decode.remote(route, leg)
                async for item in response:
                    yield item if isinstance(item, bytes) else Head(*item)
                response = None
        finally:
            if response is not None:
                response.cancel()  # nobody waits for the rest


def answer(status: int, headers: list[tuple[str, str]], body: bytes) -> Answer:
    """A replica's answer in the router's terms."""
    raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers]
    return Answer(status, raw, body)


@contextmanager
def _translated() -> Iterator[None]:
    from ray import exceptions
    from ray.serve import exceptions as serve_exceptions

    try:
        yield
    except (serve_exceptions.BackPressureError, serve_exceptions.DeploymentUnavailableError) as why:
        raise UpstreamError("connect", False, f"Serve takes no request: {why}") from why
    except (exceptions.RayError, serve_exceptions.RayServeException) as why:
        first = str(why).strip().splitlines()[0] if str(why).strip() else type(why).__name__
        raise UpstreamError("reset", True, first) from why
