"""The page's data from a log, the explanation of a decision, and the document around it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from eldr.serving.page import build, render
from eldr.serving.page.counters import Counters
from eldr.serving.page.explanation import explanation
from eldr.serving.page.snapshots import row as snapshot
from eldr.serving.page.window import Window
from tests.serving.page.rows import EVIL, fallback, marginal, row


def test_log_by_hand() -> None:
    """d1 runs 2 + 2 request seconds, d0 1, d2 none: mean 5 / 3, so the skew is 2.4."""
    rows = [
        row(),
        row(time=1_800_000_001.0, request_id="r2", decision_us=100.0),
        fallback(
            time=1_800_000_002.0,
            worker="http://d0:8200",
            seconds=1.0,
            request_id="r3",
            decision_us=60.0,
        ),
    ]
    data = build.from_log(rows, "run.jsonl")
    assert data["decisions_total"] == 3
    assert data["numbers"]["decision"] == {"p50_us": 80.0, "p99_us": 100.0, "n": 3, "why": None}
    assert data["numbers"]["skew"]["max_over_mean"] == pytest.approx(2.4)
    assert data["branches"]["names"] == ["band", "fallback: no_signature"]
    assert data["branches"]["totals"] == [2, 1]
    assert [d["request_id"] for d in data["decisions"]] == ["r3", "r2", "r1"]
    same = {a["policy"]: (a["same"], a["of"]) for a in data["agreement"]}
    assert same == {"least_requests": (2, 3), "round_robin": (0, 3)}
    notes = data["numbers"]["experts"]["notes"]
    assert "no decode counters" in notes[0]
    assert "least_requests 67 %, round_robin 0 %" in notes[1]
    assert "decode counters" in data["heat"]["why"]
    assert "decode counters" in data["numbers"]["error"]["why"]


def test_empty_log_is_a_page_that_says_so() -> None:
    data = build.from_log([], "empty.jsonl")
    assert data["numbers"]["decision"]["why"] == "no decision yet"
    assert render.page(data)


@pytest.mark.parametrize("broken", [{"v": 1}, row(candidates=None), row(time=None)])
def test_broken_row_is_named(broken: dict) -> None:
    with pytest.raises(ValueError, match=r"x.jsonl: row 2: not a decision"):
        build.from_log([row(), broken], "x.jsonl")


def test_band_is_explained() -> None:
    found = explanation(row())
    assert found["sentence"] == (
        "http://d1:8200 was the least loaded of 2 in the similarity band, of 3 candidates."
    )
    assert found["score"] == "similarity"
    first, second, third = found["candidates"]
    assert (first["worker"], first["score"], first["band"]) == ("http://d0:8200", 0.9, True)
    assert (second["chosen"], second["shadows"]) == (True, ["least_requests"])
    assert (third["band"], third["shadows"]) == (False, ["round_robin"])


def test_load_is_shown_where_it_was_recorded() -> None:
    found = explanation(row(load={"http://d0:8200": 7, "http://d1:8200": 3}))
    assert [c["load"] for c in found["candidates"]] == [7, 3, None]


def test_of_many_candidates_the_best_and_the_chosen_are_shown() -> None:
    names = [f"w{i:02d}" for i in range(40)]
    scores = {name: 1.0 - i / 100 for i, name in enumerate(names)}
    data = build.from_log([row(candidates=names, scores=scores, worker="w39", band=None)], "x")
    found = data["decisions"][0]["explanation"]
    shown = [c["worker"] for c in found["candidates"]]
    assert shown == [*names[:12], "w39"]
    assert found["left_out"] == 27


def test_cost_is_relative_to_the_least() -> None:
    found = explanation(marginal())
    assert [(c["worker"][-6], c["score"]) for c in found["candidates"]] == [
        ("1", 1.0),
        ("0", pytest.approx(1.5)),
        ("2", None),
    ]
    assert found["candidates"][2]["why_not"] == "over the load limit"
    assert "costs 1.5 times as much; 1 over the load limit" in found["sentence"]


def test_live_infinity_is_what_null_is_in_the_log() -> None:
    costs = {"http://d0:8200": 0.003, "http://d1:8200": 0.002, "http://d2:8200": math.inf}
    assert explanation(marginal(scores=costs)) == explanation(marginal())
    json.dumps(explanation(marginal(scores=costs)), allow_nan=False)


def test_fallback_says_why_and_ranks_by_load() -> None:
    found = explanation(fallback())
    assert "its prefill sent no signature" in found["sentence"]
    assert [c["score"] for c in found["candidates"]] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("branch", ["turn", "draw", "single", "pair", "home", "overflow", "pool"])
def test_policies_without_scores(branch: str) -> None:
    found = explanation(row(branch=branch, scores=None, band=None))
    assert found["score"] == "none"
    assert found["candidates"][0]["chosen"]
    assert "http://d1:8200" in found["sentence"]


@pytest.mark.parametrize("branch", ["nearest", "overflow", "pair"])
def test_rules_of_similarity(branch: str) -> None:
    found = explanation(row(branch=branch))
    assert found["score"] == "similarity"
    assert "similar" in found["sentence"]


def test_a_policy_of_somebody_else_is_explained_as_far_as_possible() -> None:
    found = explanation(row(branch="mine", policy="own"))
    assert "Rule mine of own chose http://d1:8200" in found["sentence"]


class _Scripts(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[str] = []
        self.open = ""
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open = tag
        self.name = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open in ("script", "style"):
            self.texts[self.name] = self.texts.get(self.name, "") + data


@pytest.mark.parametrize(
    "text", [EVIL, "<!--<script>", "@data@@script@", "\u2028\u2029&lt;", "'\"\\", "\0\x1b[31m"]
)
def test_strings_of_clients_stay_data(text: str) -> None:
    evil = row(request_id=text, worker=text, branch=text, policy=text, candidates=[text])
    data = build.from_log([evil], text)
    html = render.page(data)
    parser = _Scripts()
    parser.feed(html)
    clean = _Scripts()
    clean.feed(render.page())
    assert parser.tags == clean.tags
    assert json.loads(parser.texts["data"]) == json.loads(json.dumps(render.compact(data)))
    assert EVIL not in html


def test_the_script_never_makes_markup_of_a_string() -> None:
    html = render.page()
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert sink not in html
    assert not re.search(r'\bon\w+="', html)


def test_the_page_is_self_contained() -> None:
    """Nothing is loaded: every address in it is a namespace, and the policy allows no other."""
    html = render.page()
    assert set(re.findall(r"https?://[\w./]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"\bsrc=|@import|url\(", html)
    assert re.findall(r'href="([^"]*)"', html) == ["data:,", "#decisions-title"]


def test_the_policy_names_the_script_and_style_that_are_there() -> None:
    parser = _Scripts()
    parser.feed(render.page())
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parser.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in render.policy()


def test_size() -> None:
    """The page is a fifth of what is allowed; logs of large fleets and models still fit."""
    assert len(render.page().encode()) < 40_000
    names = [f"http://decode-{i}.fleet.local:8200" for i in range(64)]
    scores = {name: 1.0 - i / 100 for i, name in enumerate(names)}
    rows = (
        row(time=float(i), request_id=f"{i:036d}", candidates=names, scores=scores, worker=names[1])
        for i in range(5000)
    )
    assert len(render.page(build.from_log(rows, "x")).encode()) < 150_000
    for workers, layers, experts in ((10, 48, 128), (4, 61, 256), (64, 16, 64)):
        data = build.from_log([noise(names[:workers], layers, experts), *decisions(names)], "x")
        assert data["heat"]["why"] is None
        assert len(data["pairs"]) == build.SHOWN_PAIRS
        assert len(render.page(data).encode()) < 150_000


def decisions(names: list[str]) -> list[dict]:
    scores = {name: 1.0 / (3 + i) for i, name in enumerate(names)}
    shared = {"candidates": names, "scores": scores, "band": names, "worker": names[0]}
    shadows = {"round_robin": names[1], "least_requests": names[0]}
    return [row(request_id=f"{i:036d}", shadows=shadows, **shared) for i in range(100)]


def noise(names: list[str], layers: int, experts: int) -> dict:
    """A row of counters that does not compress."""
    use = np.random.default_rng(0).integers(0, 1000, (layers, experts)).astype(float)
    window = Window(layers)
    window.poll(0.0, {name: Counters(0, 0 * use, np.zeros((0, 3), np.int64)) for name in names})
    by_batch = np.array([[8, 1000, 10000]])
    window.poll(30.0, {name: Counters(1000, use, by_batch) for name in names})
    window.pairs.extend((1 / 3 + i, 2 / 3, names[i % len(names)]) for i in range(400))
    return {"kind": "counters", **snapshot(window, 30.0, [])}
