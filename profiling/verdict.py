"""PASS, FAIL or CANNOT TELL, per question and in all."""

from __future__ import annotations

from dataclasses import dataclass

PASS, FAIL, CANNOT_TELL = "PASS", "FAIL", "CANNOT TELL"
EXIT_CODES = {PASS: 0, FAIL: 1, CANNOT_TELL: 3}


@dataclass(frozen=True, slots=True)
class Check:
    """One question.

    Attributes:
        name: a short constant name.
        verdict: PASS, FAIL or CANNOT TELL.
        reasons: what was found, or why it cannot be told; for a PASS, what it rests on.
    """

    name: str
    verdict: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """All questions; a proven fault outweighs a doubt, a doubt outweighs a pass."""

    checks: tuple[Check, ...]

    @property
    def overall(self) -> str:
        """The verdict on the capture."""
        found = {check.verdict for check in self.checks}
        return next((v for v in (FAIL, CANNOT_TELL) if v in found), PASS)

    @property
    def exit_code(self) -> int:
        """0, 1 or 3."""
        return EXIT_CODES[self.overall]


def judge(name: str, faults: list[str], doubts: list[str], proof: list[str]) -> Check:
    """A check from what speaks against it, what leaves it open, and what a pass rests on."""
    if faults:
        return Check(name, FAIL, tuple(faults + doubts))
    if doubts:
        return Check(name, CANNOT_TELL, tuple(doubts))
    return Check(name, PASS, tuple(proof))
