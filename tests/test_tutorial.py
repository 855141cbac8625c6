"""docs/tutorial.md, command by command, on workers that replay the bundled trace."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eldr.serving.decision_log import read_decisions
from tests.documents import ROOT, commands
from tests.walkthrough import parse_vllm, walk

COMMANDS = [c for c in commands(ROOT / "docs/tutorial.md") if c.block is not None]
# Long enough for the page's A/B watcher to see that it cannot tell yet.
LIMIT_SECONDS = "3"


def traffic(router: str) -> None:
    """Sixty requests of the trace, six at a time."""

    def ask(index: int) -> None:
        body = {"model": "m", "prompt": f"trace:{7 * index}", "max_tokens": 24, "stream": True}
        request = urllib.request.Request(
            router + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=180) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(60)))


async def test_every_command_of_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with walk(tmp_path, traffic) as reader:
        monkeypatch.setattr(reader, "words", _patient(reader.words))
        for command in COMMANDS:
            await reader.do(command)
    said = {command.words[:2]: out for command, _, out in reader.outputs}
    codes = {command.words[:2]: code for command, code, _ in reader.outputs}
    assert {command.words[0] for command in reader.dry} == {"vllm"}
    assert said["eldr", "assess"].split(":")[0] in ("deploy", "not worth it", "needs more data")
    assert "140 signatures" in said["eldr", "record"]
    assert "candidates" in said["eldr", "explain"] or "running requests" in said["eldr", "explain"]
    assert json.loads(said["curl", "-s"])["differences"]["marginal_cost"]["tpot_s"]["verdict"]
    assert codes["python", "examples/ab_on_live_traffic.py"] in (0, 1)
    assert len(list(read_decisions(str(tmp_path / "shadow.jsonl")))) == 61
    for page in ("shadow.html", "live.html"):
        html = (tmp_path / page).read_text()
        assert '"realised":' in html
        assert '"saving":' in html
        assert len(html) < 150_000


def _patient(words):
    """The watcher waits for seconds instead of an hour."""
    return lambda command: [LIMIT_SECONDS if w == "3600" else w for w in words(command)]


def test_engines_of_both_pages_parse() -> None:
    """In one process: vLLM's parser takes ten seconds to import."""
    pytest.importorskip("vllm")
    pages = [*commands(ROOT / "README.md"), *COMMANDS]
    engines = [c for c in pages if c.block is not None and c.words[0] == "vllm"]
    assert parse_vllm(engines) == [
        {"connector": "NixlConnector", "role": "prefill"},
        {"connector": "NixlConnector", "role": "decode"},
        {"connector": "NixlConnector", "role": "prefill"},
    ]
