"""Who may call and over what: API keys, TLS, request fields that reach beyond a worker."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Iterable
from typing import Any

import orjson

from eldr.serving.bodies import ESCAPE, Body
from eldr.serving.errors import ClientError, StartError

# A JSON text spells a media key like this, or hides it behind an escape of an ASCII character.
_MEDIA = b"_url"


class Keys:
    """Accepted bearer keys, compared in constant time; no keys means that everyone may call."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """Accepts or refuses an Authorization header.

        Raises:
            ClientError: 401.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        known = False
        for digest in self._digests:  # all of them, whatever the first ones say
            known |= hmac.compare_digest(digest, given)
        if not known or scheme.lower() != "bearer":
            raise ClientError(401, "invalid_api_key", "a valid API key is needed: Bearer KEY")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_tls(certificate: str, key: str, client_ca: str) -> ssl.SSLContext | None:
    """The listener's TLS context, None without a certificate; `client_ca` demands client ones.

    Raises:
        StartError: a file is missing or does not fit.
    """
    if not certificate:
        if key or client_ca:
            raise StartError("--tls-key and --tls-client-ca need --tls-cert")
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key or None)
        if client_ca:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
    except (OSError, ssl.SSLError) as error:
        raise StartError(f"TLS certificate {certificate}: {error}") from error


def client_tls(ca: str) -> ssl.SSLContext:
    """The TLS context towards workers; `ca` adds a private certificate authority.

    Raises:
        StartError: the file is missing or no certificate.
    """
    try:
        context = ssl.create_default_context()
        if ca:
            context.load_verify_locations(ca)
        return context
    except (OSError, ssl.SSLError) as error:
        raise StartError(f"--worker-ca {ca}: {error}") from error


def refuse_media_urls(body: Body) -> None:
    """Refuses chat messages that make a worker fetch something; inline data is fine.

    Raises:
        ClientError: 400, names the kind of part.
    """
    messages = body.fields.get("messages")
    if messages is None:
        return
    raw = bytes(messages)
    if _MEDIA not in raw and ESCAPE not in raw:
        return
    try:
        found = _media_url(orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        raise ClientError(400, "invalid_request_error", f"`messages`: {error}") from error
    if found is not None:
        raise ClientError(
            400,
            "media_url_not_allowed",
            f"`{found}` may only hold inline data (data:...); this router passes no URLs on "
            "(--allow-media-urls lets them through)",
        )


def _media_url(value: Any) -> str | None:
    """The first key ending in `_url` whose target is not inline data."""
    # Not recursive: JSON may be nested more deeply than Python's calls.
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            for key, inner in value.items():
                if not key.endswith("_url"):
                    stack.append(inner)
                    continue
                target = inner.get("url") if isinstance(inner, dict) else inner
                if isinstance(target, str) and not target.lower().startswith("data:"):
                    return str(key)
    return None
