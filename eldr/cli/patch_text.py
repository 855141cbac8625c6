"""How `eldr patch` shows a hunk, as JSON and as text."""

from __future__ import annotations

from typing import Any

from eldr.engine.patching.place import Placement

Answer = tuple[int, dict[str, Any], str]  # exit code, JSON object, text for people


def hunk_data(p: Placement) -> dict[str, Any]:
    """A hunk's placement as a JSON object."""
    data: dict[str, Any] = {
        "patch": p.patch,
        "file": p.path,
        "hunk": p.number,
        "verdict": p.verdict,
        "line": p.line,
        "offset": p.offset,
    }
    if p.problem:
        data |= {"problem": p.problem, "expected": list(p.expected), "found": list(p.found)}
    return data


def hunk_text(p: Placement) -> str:
    """One line; for a conflict also the lines that the hunk expects and those that are there."""
    head = f"{p.patch}  {p.path} hunk {p.number} at line {p.line}: {p.verdict}"
    if p.verdict == "offset":
        return f"{head} ({p.offset:+d} lines)"
    if not p.problem:
        return head
    expected = "".join(f"      expected | {line}" for line in p.expected)
    found = "".join(f"      found    | {line}" for line in p.found)
    return f"{head}: {p.problem}\n{expected}{found}".rstrip("\n")
