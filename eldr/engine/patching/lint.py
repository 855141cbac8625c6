"""What every patch must say about itself, and how large the series may grow."""

from __future__ import annotations

from eldr.engine.patching.mail import Patch
from eldr.engine.patching.series import Series

MOST_PATCHES = 6
MOST_LINES = 300
REASONS = ("no-hook", "temporary", "incompatible")


def lint(series: Series) -> list[str]:
    """Breaches of the house rules, one line each; empty if there are none."""
    problems = [line for patch in series.patches for line in _trailers(series, patch)]
    if len(series.patches) > MOST_PATCHES:
        problems.append(f"{len(series.patches)} patches, at most {MOST_PATCHES} are allowed")
    lines = sum(patch.added + patch.removed for patch in series.patches)
    if lines > MOST_LINES:
        problems.append(f"{lines} changed lines, at most {MOST_LINES} are allowed")
    return problems


def _trailers(series: Series, patch: Patch) -> list[str]:
    tag = series.upstream.tag
    rules = {
        "Upstream-Base": (patch.trailers.get("Upstream-Base") == tag, tag),
        "Forwarded": (_forwarded(patch), "a URL, `no` or `not-needed`"),
        "Why-Patch": (patch.trailers.get("Why-Patch") in REASONS, " or ".join(REASONS)),
        "Test": (patch.trailers.get("Test", "").startswith("tests/"), "a path below tests/"),
    }
    return [
        f"{patch.name}: trailer {name} is {patch.trailers.get(name, 'missing')!r}, expected {want}"
        for name, (good, want) in rules.items()
        if not good
    ]


def _forwarded(patch: Patch) -> bool:
    value = patch.trailers.get("Forwarded", "")
    return value in ("no", "not-needed") or value.startswith("https://")
