"""Rows of counters in the decision log: they add up to what the workers counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr.serving.decision_log import read_decisions, read_log
from eldr.serving.page import build
from eldr.serving.page.counters import Counters
from eldr.serving.page.snapshots import Seen, row
from eldr.serving.page.window import Window
from tests.serving.page.rows import row as decision
from tests.serving.page.test_numbers import ONE, counters, status
from tests.serving.page.traced import TracedDecode, TracedPrefill, drive
from tests.serving.rig import rig


async def logged(path: Path, **options: Any) -> tuple[dict[str, Any], list[TracedDecode]]:
    """The page's data from the log of a run, and the workers that it ran on."""
    decode = [TracedDecode(0.002) for _ in range(2)]
    shared = {"policy": "marginal_cost", "shadow": ("round_robin",), "decision_log": str(path)}
    async with rig([TracedPrefill()], decode, **shared, **options) as r:
        await drive(r, 60, 8)
    return build.from_log(read_log(str(path)), path.name), decode


async def test_a_log_shows_what_the_live_page_shows(tmp_path: Path) -> None:
    """Every step of the workers is in the log's rows, and the figures follow from them."""
    data, decode = await logged(tmp_path / "run.jsonl", decision_log_counters=0.05)
    steps = {w.url: w.steps for w in decode}
    assert dict(zip(data["heat"]["workers"], data["heat"]["steps"], strict=True)) == steps
    experts = data["numbers"]["experts"]
    weight = sum(b * s for w in decode for b, (s, _) in w.by_batch.items())
    read = sum(b * x for w in decode for b, (_, x) in w.by_batch.items())
    assert experts["realised"] == pytest.approx(read / weight / 4)
    assert experts["shadow"]["policy"] == "round_robin"
    assert experts["basis"] == "estimate"
    assert data["numbers"]["error"]["n"] == len(data["pairs"]) >= 2
    assert data["numbers"]["error"]["mae"] < 8
    assert data["numbers"]["skew"]["unit"] == "mean running requests"
    assert sorted(data["layers"]) == ["0", "1", "2", "3"]
    assert data["source"]["window"].startswith("over ")
    assert data["decisions_total"] == 60


async def test_counters_are_read_past_and_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    data, _ = await logged(path, decision_log_counters=0.0)
    assert "this log holds no decode counters" in data["heat"]["why"]
    with path.open("a") as file:
        file.write(json.dumps({"v": 2, "kind": "counters", "anything": 1}) + "\n")
    assert len(list(read_decisions(str(path)))) == 60
    with pytest.raises(ValueError, match=r"run\.jsonl: row 61: .*not a row of counters"):
        build.from_log(read_log(str(path)), path.name)


def test_a_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    for bad in ({"v": 2}, {"v": 3, "kind": "counters"}, {"v": 1, "kind": "counters"}):
        path = tmp_path / "run.jsonl"
        path.write_text(json.dumps(decision()) + "\n" + json.dumps(bad) + "\n")
        with pytest.raises(ValueError, match=r"run\.jsonl:2: version"):
            list(read_log(str(path)))


def interval(first: Counters, last: Counters, requests: int = 2) -> dict[str, Any]:
    """One row, as it comes back from JSON."""
    window = Window(2)
    window.poll(0.0, {"w": first})
    window.tick(status(w=(requests, 4.0)), {"shadow": status(w=(requests, 6.0))})
    window.poll(5.0, {"w": last})
    made: dict[str, Any] = json.loads(json.dumps(row(window, 5.0, [])))
    return made


def test_rows_add_up() -> None:
    later = counters(4, [[4, 1, 2], [1, 3, 1]], {"1": [2, 4], "3": [2, 8]})
    whole, halves = Seen(), Seen()
    whole.add(interval(ONE, later))
    middle = counters(3, [[3, 1, 1], [1, 2, 1]], {"1": [2, 4], "3": [1, 5]})
    halves.add(interval(ONE, middle))
    halves.add(interval(middle, later))
    a, b = whole.changes["w"], halves.changes["w"]
    assert a.steps == b.steps == later.steps - ONE.steps
    np.testing.assert_array_equal(a.use, b.use)
    assert a.request_weight() == b.request_weight()
    assert halves.seconds == 10.0
    assert halves.load() == {"w": 2.0}
    assert halves.sums == {"": (16.0, 4.0), "shadow": (24.0, 4.0)}


def test_another_model_begins_anew() -> None:
    seen = Seen()
    seen.add(interval(ONE, counters(3, [[3, 1, 1], [1, 2, 1]], {"3": [2, 9]})))
    other = {**interval(ONE, ONE), "layers": 1, "expected": {"": [5.0, 1.0]}}
    other["workers"]["w"] |= {"shape": [1, 6]}
    seen.add(other)
    assert seen.sums == {"": (5.0, 1.0)}
    assert seen.changes["w"].use.shape == (1, 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [1 << 10, 1 << 10]},
        {"shape": [3]},
        {"shape": [2, 4]},
        {"use": "%"},
        {"use": "AAAA"},
        {"steps": None},
        {"by_batch": [[1, 2]]},
    ],
)
def test_counters_of_a_broken_row_are_refused(wrong: dict[str, Any]) -> None:
    broken = interval(ONE, counters(3, [[3, 1, 1], [1, 2, 1]], {"3": [2, 9]}))
    broken["workers"]["w"] |= wrong
    with pytest.raises(ValueError, match=r"."):
        Seen().add(broken)
