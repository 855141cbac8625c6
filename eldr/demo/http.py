"""The few blocking HTTP calls that the demo makes to its own processes."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

_TIMEOUT = 300.0
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def get_json(url: str) -> Any:
    """Body of a GET, parsed; HTTP errors become a RuntimeError with the answer's text."""
    return json.loads(_open(urllib.request.Request(url)))


def post_json(url: str, body: object | None = None) -> Any:
    """Body of a POST, parsed; None for an empty answer."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    answer = _open(request)
    return json.loads(answer) if answer.strip() else None


def counter(url: str, name: str, **labels: str) -> float:
    """Sum of a Prometheus counter's samples at `url`/metrics whose labels include `labels`."""
    return samples(_open(urllib.request.Request(f"{url}/metrics")).decode(), name, **labels)


def samples(text: str, name: str, **labels: str) -> float:
    """The same sum over metrics that were read already."""
    total = 0.0
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match["name"] == name:
            found = dict(_LABEL.findall(match["labels"] or ""))
            if labels.items() <= found.items():
                total += float(match["value"])
    return total


def _open(request: urllib.request.Request) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        raise RuntimeError(f"{request.full_url}: HTTP {error.code}: {text}") from error
    except urllib.error.URLError as error:
        raise RuntimeError(f"{request.full_url}: {error.reason}") from error
