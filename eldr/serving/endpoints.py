"""Where workers are: an address, and how a request reaches it."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal

from yarl import URL

from eldr.serving.condition import Condition, Rules
from eldr.serving.config import ConfigError, without_password
from eldr.serving.origins import Client

Role = Literal["prefill", "decode"]


class Endpoint:
    """One engine that takes requests: a URL, or a URL and a data-parallel rank.

    Attributes:
        role: what it is used for.
        base: origin and path prefix, without a trailing slash.
        rank: data-parallel rank, sent as X-data-parallel-rank, or None.
        name: the URL, with `@rank` for one rank of a data-parallel engine.
        origin: its connections.
        running: requests that the router has sent and not seen the end of.
        others: requests of others that it was seen to run.
        kv_usage: share of its KV cache in use by its own account, None if it does not say.
        condition: whether it gets requests.
        awaited: named at the start, it has never answered; it is a member that is down, and the
            discovery asks it until it answers.
        leaving: it goes once its last request has ended.
        engine: raw id of the engine that answered last, and connections lost by then.
        restarted_at: loop time at which a restart was noticed last.
        checked_at: loop time at which the last health check started.
        salt: its part of rendezvous hashes.
    """

    __slots__ = (
        "_common",
        "_heads",
        "awaited",
        "base",
        "checked_at",
        "condition",
        "engine",
        "kv_usage",
        "leaving",
        "name",
        "origin",
        "others",
        "rank",
        "restarted_at",
        "role",
        "running",
        "salt",
    )

    def __init__(
        self,
        role: Role,
        base: URL,
        client: Client,
        *,
        rank: int | None = None,
        key: str = "",
        rules: Rules | None = None,
    ) -> None:
        self.role = role
        self.base = base
        self.rank = rank
        self.name = str(base) if rank is None else f"{base}@{rank}"
        # `worker_url` saw to host and port.
        self.origin = client.origin(base.host or "", base.port or 0, tls=base.scheme == "https")
        self.running = 0
        self.others = 0.0
        self.kv_usage: float | None = None
        self.condition = Condition(rules or Rules())
        self.awaited = self.leaving = False
        self.engine: tuple[bytes, int] = (b"", 0)
        self.checked_at, self.restarted_at = 0.0, float("-inf")
        self.salt = self.name.encode()
        lines = [f"Host: {base.host_port_subcomponent}"]
        if rank is not None:
            lines.append(f"X-data-parallel-rank: {rank}")
        if key:
            lines.append(f"Authorization: Bearer {key}")
        self._common = "".join(line + "\r\n" for line in lines).encode()
        self._heads: dict[str, bytes] = {}

    def head(self, path: str) -> bytes:
        """The start of a POST request to an API path: request line and this worker's headers."""
        head = self._heads.get(path)
        if head is None:
            target = self.base.raw_path.rstrip("/") + path
            head = f"POST {target} HTTP/1.1\r\n".encode() + self._common
            self._heads[path] = head
        return head

    def route(self, path: str) -> URL:
        """The full URL of an API path."""
        return URL(str(self.base) + path)


def worker_url(text: str) -> URL:
    """Checks a worker's address.

    Raises:
        ConfigError: not http(s)://host[:port][/prefix], with credentials, query or fragment, or an
            address at which no worker can be, such as a cloud's metadata service.
    """
    shown = repr(without_password(text))
    try:
        url = URL(text.strip().rstrip("/"))
        port = url.port
    except ValueError as error:
        raise ConfigError(f"worker {shown}: not a URL ({error})") from error
    if url.scheme not in ("http", "https") or not url.host or not port:
        raise ConfigError(f"worker {shown}: expected http://HOST:PORT or https://HOST:PORT")
    if url.user or url.password or url.query_string or url.fragment:
        raise ConfigError(
            f"worker {url.host}: no user, password, query or fragment belongs in a worker URL"
        )
    if not _plausible(url.host):
        raise ConfigError(f"worker {shown}: no worker can be at this address")
    return url


def _plausible(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            # The system takes 0xa9fea9fe and 2852039166 for addresses as well.
            address = ipaddress.ip_address(socket.inet_aton(host))
        except (OSError, UnicodeError):
            return True  # a name
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return not (address.is_link_local or address.is_multicast or address.is_unspecified)
