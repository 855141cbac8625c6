"""Where workers are: an address, and how a request reaches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from multidict import CIMultiDict
from yarl import URL

from eldr.serving.config import ConfigError

Role = Literal["prefill", "decode"]


@dataclass(slots=True, eq=False)
class Endpoint:
    """One engine that takes requests: a URL, or a URL and a data-parallel rank.

    Attributes:
        role: what it is used for.
        base: origin and path prefix, without a trailing slash.
        rank: data-parallel rank, sent as X-data-parallel-rank, or None.
        running: requests that the router has sent and not seen the end of.
    """

    role: Role
    base: URL
    rank: int | None = None
    running: int = 0
    _routes: dict[str, URL] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The URL, with `@rank` for one rank of a data-parallel engine."""
        return str(self.base) if self.rank is None else f"{self.base}@{self.rank}"

    def headers(self, common: CIMultiDict[str]) -> CIMultiDict[str]:
        """Request headers for this worker: the call's, and the rank if there is one."""
        if self.rank is None:
            return common
        out = common.copy()
        out["X-data-parallel-rank"] = str(self.rank)
        return out

    def route(self, path: str) -> URL:
        """The full URL of an API path."""
        url = self._routes.get(path)
        if url is None:
            url = self._routes[path] = URL(str(self.base) + path)
        return url


def worker_url(text: str) -> URL:
    """Checks a worker's address.

    Raises:
        ConfigError: not http(s)://host[:port][/prefix], or with credentials, query or fragment.
    """
    try:
        url = URL(text.strip().rstrip("/"))
        port = url.port
    except ValueError as error:
        raise ConfigError(f"worker {text!r}: not a URL ({error})") from error
    if url.scheme not in ("http", "https") or not url.host or port is None:
        raise ConfigError(f"worker {text!r}: expected http://HOST:PORT or https://HOST:PORT")
    if url.user or url.password or url.query_string or url.fragment:
        raise ConfigError(
            f"worker {url.host}: no user, password, query or fragment belongs in a worker URL"
        )
    return url
