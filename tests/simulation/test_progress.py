"""Progress on standard error: a bar where somebody watches, plain lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from eldr.simulation import progress


class Terminal(io.StringIO):
    """Somebody watches."""

    def isatty(self):
        return True


def test_plain_lines_come_at_intervals(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 11.0, 11.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.Progress("counting") as shown:
        shown(1, 4)  # after 1 s: too early
        shown(2, 4)  # after 11 s
        shown(3, 4)  # 1 s later
    captured = capsys.readouterr()
    assert captured.err == "counting: 2 of 4\n"
    assert captured.out == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Progress("counting") as shown:
        shown(3, 4)
        shown(4, 4)
    assert "counting" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
