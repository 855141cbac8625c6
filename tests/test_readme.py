"""The README: every command of it is run or dry-run, and its figures are those of `results/`."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from benchmarks import readme
from eldr.routing import load_partition, load_recorded
from tests.documents import ROOT, commands
from tests.serving.page.traced import trace
from tests.walkthrough import walk

COMMANDS = [c for c in commands(ROOT / "README.md") if c.block is not None]


def ask(router: str) -> None:
    """One request through the router: answered, from a signature."""
    body = {"model": "m", "prompt": "trace:9", "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        router + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with urllib.request.urlopen(router + "/eldr/decisions?limit=1", timeout=120) as answer:
        (decision,) = json.load(answer)["decisions"]
    assert decision["reason"] is None
    assert decision["coverage"] == 1.0


async def test_every_command_of_the_readme(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the README patches it")
    async with walk(tmp_path, ask) as reader:
        for command in COMMANDS:
            await reader.do(command)
        ran = {command.words[:2] for command, _, _ in reader.outputs}
    assert {("eldr", "patch"), ("eldr", "record"), ("eldr", "fit")} <= ran
    assert len(load_recorded(tmp_path / "signatures.npz")) == 140
    partition = load_partition(tmp_path / "partition.safetensors", geometry=trace().geometry)
    assert len(partition.names) == 2
    # test_tutorial.py parses them.
    assert sum(command.words[0] == "vllm" for command in reader.dry) == 2


def test_every_line_of_a_block_is_a_command() -> None:
    """Otherwise a command of a program that the extraction does not know would go unseen."""
    from tests.documents import blocks

    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    known = {command.line for command in COMMANDS}
    for first, _, body in blocks(lines):
        continued = False
        for number, line in enumerate(body, first):
            assert continued or not line.strip() or number in known, f"README.md:{number}: {line}"
            continued = line.endswith("\\")


def test_figures_are_those_of_the_results() -> None:
    """If not: run `python -m benchmarks.readme`."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.render(page) == page


def test_a_changed_figure_is_found() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| round_robin | "))
    assert readme.render(page.replace(row, row.replace("|", "| 1", 2))) == page
    with pytest.raises(ValueError, match="places for"):
        readme.render(page.replace("figures: demo", "figures: other"))


def test_the_first_screen() -> None:
    """One sentence, one picture, two commands, one table, in this order, before anything else."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    first = page.partition("\n## ")[0]
    places = [first.index(mark) for mark in ("![", "    make demo", "    make test", "| policy |")]
    assert places == sorted(places)
    sentence = first[: places[0]].removeprefix("# ELDR\n").strip()
    assert sentence.count(". ") == 0
    assert first.count("![") == 1
    assert len([line for line in first.splitlines() if line.startswith("|---")]) == 1


def test_every_page_is_linked() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{path.name})" in page, f"README.md does not link docs/{path.name}"
