"""Completion scripts, run by the shells themselves where they are installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from eldr.cli import COMMANDS
from eldr.cli.completion import script

BASH = shutil.which("bash")


def complete(*words: str) -> set[str]:
    """What bash offers for the last of these words."""
    listed = " ".join(f"'{word}'" for word in words)
    code = f"COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _eldr; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        [str(BASH), "-c", script("bash") + code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_bash_completes() -> None:
    assert complete("eldr", "") == {*COMMANDS, "--help", "--version"}
    assert complete("eldr", "do") == {"doctor"}
    assert complete("eldr", "doctor", "--p") == {"--port", "--prefill"}
    assert {"apply", "verify", "revert"} <= complete("eldr", "patch", "")
    assert complete("eldr", "patch", "apply", "--if") == {"--if-needed"}
    assert "--decision-log" in complete("eldr", "serve", "--port", "1", "--dec")
    assert complete("eldr", "completion", "") == {"bash", "zsh", "--help", "--json"}
    assert complete("eldr", "report", "run") == set()  # files are the shell's own completion


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_parses() -> None:
    subprocess.run(["zsh", "-n"], input=script("zsh"), text=True, check=True)


def test_every_command_and_option_is_in_both() -> None:
    for shell in ("bash", "zsh"):
        text = script(shell)
        assert all(f"'eldr {name}')" in text for name in COMMANDS)
        assert len(text) < 20_000
