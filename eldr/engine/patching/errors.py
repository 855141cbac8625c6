"""What the patch tool raises: a sentence for people and the exit code that goes with it."""

from __future__ import annotations


class PatchError(Exception):
    """The answer is no: a conflict, a drifted file, a series that does not hold together."""

    exit_code = 1


class UsageError(PatchError):
    """The command cannot mean anything: no such directory, contradictory options."""

    exit_code = 2


class CannotTell(PatchError):
    """There is nothing to judge: no vLLM, no source branch."""

    exit_code = 3
