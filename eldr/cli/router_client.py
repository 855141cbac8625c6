"""Asks a running router or worker, with the standard library only."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from typing import Any

KEY_VARIABLE = "ELDR_SERVE_ADMIN_KEY"
_LARGEST = 1 << 28


class RouterError(RuntimeError):
    """No usable answer; the message names URL and reason."""


def is_url(source: str) -> bool:
    """Whether this names a server and not a file."""
    return source.startswith(("http://", "https://"))


def get(url: str, *, key: str = "", timeout: float = 10.0) -> tuple[bytes, float | None]:
    """Body of a GET, and the server's clock (its Date header, seconds since the epoch).

    Raises:
        RouterError: no answer, or not status 200.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers)
    # A proxy of the environment is for the internet, not for the fleet.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            date = response.headers.get("Date")
            return response.read(_LARGEST), _seconds(date)
    except urllib.error.HTTPError as error:
        hint = f"; set {KEY_VARIABLE} to the router's admin key" if error.code == 401 else ""
        raise RouterError(f"{url}: HTTP {error.code}{hint}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        raise RouterError(f"{url}: {reason}") from error


def get_json(base: str, path: str) -> Any:
    """A router's JSON answer, asked for with the admin key of the environment.

    Raises:
        RouterError: no answer, or no JSON.
    """
    url = base.rstrip("/") + path
    raw, _ = get(url, key=os.environ.get(KEY_VARIABLE, ""))
    try:
        return json.loads(raw)
    except ValueError as error:
        raise RouterError(f"{url}: not JSON: {error}") from error


def _seconds(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return None
