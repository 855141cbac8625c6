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


def page(data: dict[str, Any] | None = None) -> str:
    """The document; without data it asks the router that served it."""
    html, css, js = _assets()
    parts = {"@policy@": policy(), "@style@": css, "@script@": js, "@data@": script_json(data)}
    # One pass: what is put in is never searched for placeholders.
    out, rest = "", html
    while (at := rest.find("@")) >= 0:
        name = next((key for key in parts if rest.startswith(key, at)), None)
        step = at + (len(name) if name else 1)
        out += rest[:at] + (parts[name] if name else "@")
        rest = rest[step:]
    return out + rest
