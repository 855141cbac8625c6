"""`eldr explain` and `eldr report`: from a log, from a router, and from what is neither."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from eldr.cli import CANNOT_TELL, DONE, NO, USAGE, main
from tests.serving.page.rows import EVIL, fallback, marginal, row
from tests.serving.rig import rig


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "decisions.jsonl"
    rows = [row(), marginal(request_id="r2", signature={"v": 1}), fallback(request_id="r3")]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_explains_a_request(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "r2", "--from", log]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("http://d1:8200 makes steps least slower of 3 candidates")
    table = lines[-6:-2]
    assert table[0].split() == ["worker", "score", "shadows", "that", "agree"]
    assert table[1].split() == ["*", "http://d1:8200", "1", "least_requests"]
    assert table[2].split() == ["http://d0:8200", "1.5"]
    assert table[3].split()[:5] == ["http://d2:8200", "over", "the", "load", "limit"]


def test_explains_the_last_one_as_json(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--last", "--from", log, "--json"]) == DONE
    out = json.loads(capsys.readouterr().out)
    assert out["decision"]["request_id"] == "r3"
    assert out["explanation"]["candidates"][0]["chosen"] is True
    assert main(["explain", "r2", "--from", log, "--json"]) == DONE
    assert "signature" not in json.loads(capsys.readouterr().out)["decision"]


def test_of_several_decisions_the_last_one(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "log"
    again = row(time=row()["time"] + 1, worker="http://d0:8200", branch="nearest")
    path.write_text(json.dumps(again) + "\n" + json.dumps(row()) + "\n")
    assert main(["explain", "r1", "--from", str(path), "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["decision"]["branch"] == "nearest"


def test_older_files_of_a_log_are_read_as_well(log: str, capsys: Any) -> None:
    for number, name in enumerate(("old", "older"), 1):
        text = json.dumps(row(time=row()["time"] - number, request_id=name))
        Path(f"{log}.{number}").write_text(text + "\n")
    assert main(["explain", "older", "--from", log]) == DONE
    assert main(["explain", "--last", "--from", log, "--json"]) == DONE
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last)["decision"]["request_id"] == "r3"


def test_no_such_request(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "r9", "--from", log]) == NO
    err = capsys.readouterr().err
    assert "'r9'" in err
    assert "--decision-log-sample" in err


@pytest.mark.parametrize("arguments", [[], ["r1", "--last"]])
def test_one_of_id_and_last(log: str, arguments: list[str]) -> None:
    assert main(["explain", *arguments, "--from", log]) == USAGE


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", '{"v": 9}\n', '{"v": 1}\n', "\0\n"])
def test_file_that_is_no_log(tmp_path: Path, text: str, capsys: Any) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    wanted = NO if not text else CANNOT_TELL
    assert main(["explain", "--last", "--from", str(path)]) == wanted
    out, err = capsys.readouterr()
    assert (out, bool(err)) == ("", True)


def test_missing_file_and_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--last", "--from", str(tmp_path / "none")]) == CANNOT_TELL
    assert main(["explain", "--last", "--from", "http://127.0.0.1:9"]) == CANNOT_TELL
    assert "http://127.0.0.1:9/eldr/decisions" in capsys.readouterr().err
    out = str(tmp_path / "out.html")
    assert main(["report", str(tmp_path / "none"), "-o", out]) == CANNOT_TELL
    assert not Path(out).exists()


def test_terminal_is_not_commanded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(row(request_id="a\x1b[2Jb\nc")) + "\n")
    assert main(["explain", "--last", "--from", str(path)]) == DONE
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "a\\x1b[2Jb\\nc" in out


def test_report_of_a_log(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert main(["report", log, "-o", str(out), "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert said["decisions"] == 3
    assert said["bytes"] == out.stat().st_size < 150_000
    assert said["numbers"]["decision"]["p99_us"] == 80.0


def test_report_names_the_broken_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(row()) + "\nbroken\n")
    out = tmp_path / "report.html"
    assert main(["report", str(path), "-o", str(out)]) == CANNOT_TELL
    assert f"{path}:2" in capsys.readouterr().err
    assert not out.exists()


def test_report_where_nothing_can_be_written(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", log, "-o", "/nonexistent/report.html"]) == CANNOT_TELL
    assert "/nonexistent" in capsys.readouterr().err


async def test_running_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explained and reported over HTTP, with the admin key of the environment."""
    async with rig(1, 2, admin_key="s3cret", shadow=("round_robin",)) as r:
        body = {"model": "m", "prompt": "x", "max_tokens": 2}
        for name in ("first", EVIL):
            headers = {"X-Request-Id": name}
            async with r.client.post(r.url + "/v1/completions", json=body, headers=headers) as a:
                assert a.status == 200
        out = tmp_path / "report.html"
        wrong = ["explain", "--last", "--from", r.url]
        assert await asyncio.to_thread(main, wrong) == CANNOT_TELL
        assert "ELDR_SERVE_ADMIN_KEY" in capsys.readouterr().err
        monkeypatch.setenv("ELDR_SERVE_ADMIN_KEY", "s3cret")
        assert await asyncio.to_thread(main, [*wrong, "--json"]) == DONE
        assert json.loads(capsys.readouterr().out)["decision"]["request_id"] == EVIL
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["explain", "first", "--from", r.url]) == DONE
        header, chosen, other = capsys.readouterr().out.splitlines()[-5:-2]
        assert header.split() == ["worker", "score", "running"]
        assert chosen.split()[0] == "*"
        assert [line.split()[-1] for line in (chosen, other)] == ["0", "0"]
        assert await asyncio.to_thread(main, ["explain", "other", "--from", r.url]) == NO
        assert await asyncio.to_thread(main, ["report", r.url, "-o", str(out)]) == DONE
        assert EVIL not in out.read_text()
        assert "first" in out.read_text()
