"""One finding of `eldr doctor`: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM, UNKNOWN = "ok", "note", "problem", "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding.

    Attributes:
        check: what was looked at.
        status: ok; note (fine for some machines); problem; unknown (could not be determined).
        detail: what was found, with values.
        fix: what to do; empty only when ok.
    """

    check: str
    status: str
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status != OK and not self.fix:
            raise ValueError(f"finding {self.check}: a {self.status} needs a fix")
