"""The page as one HTML document: empty for the router, or with its data inside for a file."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def _assets() -> tuple[str, str, str]:
    folder = resources.files(__package__) / "assets"
    html, css, js = (
        (folder / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    return html, css, js


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def policy() -> str:
    """The page's Content-Security-Policy: its own script and style, and its own origin's data."""
    _, css, js = _assets()
    return (
        f"default-src 'none'; script-src {_hash(js)}; style-src {_hash(css)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever strings it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def compact(data: dict[str, Any]) -> dict[str, Any]:
    """The same data in fewer bytes: workers' names once, nothing that says nothing.

    `names` lists the workers; pairs and candidates hold their numbers.
    """
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    def candidate(row: dict[str, Any]) -> dict[str, Any]:
        empty = [k for k, v in row.items() if v is None or v is False or v == []]
        kept = {k: v for k, v in row.items() if k not in empty or k == "band"}
        if isinstance(score := row["score"], float):
            kept["score"] = float(f"{score:.6g}")
        return kept | {"worker": number(row["worker"])}

    def decision(row: dict[str, Any]) -> dict[str, Any]:
        found = row["explanation"]
        shown = [candidate(c) for c in found["candidates"]]
        return {**row, "explanation": {**found, "candidates": shown}}

    pairs = [[p, r, number(w)] for p, r, w in data["pairs"]]
    decisions = [decision(row) for row in data["decisions"]]
    return {**data, "pairs": pairs, "decisions": decisions, "names": list(numbers)}


def page(data: dict[str, Any] | None = None) -> str:
    """The document; without data it asks the router that served it."""
    html, css, js = _assets()
    shown = None if data is None else compact(data)
    parts = {"@policy@": policy(), "@style@": css, "@script@": js, "@data@": script_json(shown)}
    # One pass: what is put in is never searched for placeholders.
    out, rest = "", html
    while (at := rest.find("@")) >= 0:
        name = next((key for key in parts if rest.startswith(key, at)), None)
        step = at + (len(name) if name else 1)
        out += rest[:at] + (parts[name] if name else "@")
        rest = rest[step:]
    return out + rest
