"""Who may use the operator's routes: with an admin key whoever has it, without one this machine.

A port on loopback is not out of reach: a page in the operator's browser can send requests to it,
and a proxy on this machine can pass on what strangers send.
"""

from __future__ import annotations

from collections.abc import Mapping

from eldr.serving.config import RouterConfig
from eldr.serving.errors import ClientError
from eldr.serving.security import Keys, is_loopback

_PROXIED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")


class Operators:
    """Lets operators in."""

    def __init__(self, config: RouterConfig) -> None:
        self._keys = Keys([config.admin_key] if config.admin_key else [])

    def check(self, headers: Mapping[str, str]) -> None:
        """Accepts or refuses a request by its headers.

        Raises:
            ClientError: 401, the admin key is missing; 403, there is none, and the request comes
                from a page of another site or by way of a proxy.
        """
        if self._keys:
            self._keys.check(headers.get("Authorization"))
        elif why := _not_local(headers):
            raise ClientError(
                403,
                "not_local",
                f"without an admin key these routes are for this machine alone, and {why}; set "
                "ELDR_SERVE_ADMIN_KEY to use them otherwise",
            )


def _not_local(headers: Mapping[str, str]) -> str:
    """Why a request need not be this machine's user's; "" if it must."""
    host = headers.get("Host", "localhost")
    # Any site may have its name point here; then the browser takes us for a part of it.
    if not is_loopback(_name(host)):
        return f"this request was sent to {host!r}"
    origin = headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:
        return f"a page of {origin!r} sent this request"
    proxy = next((name for name in _PROXIED if name in headers), None)
    return "" if proxy is None else f"this request came by way of a proxy ({proxy})"


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
