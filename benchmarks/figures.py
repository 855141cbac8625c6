"""Documents whose figures are made from results/: what stands between two marks is made anew.

A place is `<!-- figures: NAME -->` to `<!-- end -->`; the rest of the page is by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_WIDTH = 118


def result(name: str) -> dict[str, Any]:
    """The object in results/NAME.json."""
    found: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))
    return found


def wrap(text: str) -> str:
    """Lines of the page's width; code and links stay whole."""
    lines, line = [], ""
    for word in re.findall(r"(?:`[^`]*`|\[[^\]]*\]\([^)]*\)|\S)+", text):
        if line and len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def grid(*rows: tuple[str, ...]) -> str:
    """A Markdown table, its head first."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def pair(gain: Mapping[str, float]) -> str:
    """P50 / P99 in %."""
    return f"{gain['p50']:+.1f} / {gain['p99']:+.1f}"


def render(page: str, figures: Mapping[str, Callable[[], str]]) -> str:
    """The page with every figure made anew.

    Raises:
        ValueError: a place is missing, doubled, or names no figure.
    """
    places = re.findall(r"<!-- figures: (\w+) -->", page)
    if sorted(places) != sorted(figures):
        raise ValueError(f"the page has places for {places}, there are figures {list(figures)}")
    for name, make in figures.items():
        start, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(start)
        page = before + start + "\n" + make() + "\n\n" + end + rest.partition(end)[2]
    return page
