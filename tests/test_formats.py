"""Files and messages that earlier versions wrote (`tests/formats/`) are read as they were meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from eldr.geometry import Geometry
from eldr.routing import load_partition, load_recorded
from eldr.serving.decision_log import read_decisions, read_log
from eldr.serving.page import build
from eldr.serving.page.counters import parse
from eldr.serving.page.explanation import explanation
from eldr.signature import decode

STORED = Path(__file__).parent / "formats"
ROOT = Path(__file__).resolve().parent.parent
SMALL = Geometry(2, 16, 2)


def stored(name: str):
    return json.loads((STORED / name).read_text())


def test_every_stored_file_is_read_here() -> None:
    source = Path(__file__).read_text()
    assert [p.name for p in STORED.iterdir() if p.name not in source] == []


def test_signature_1_in_every_encoding() -> None:
    found = stored("signature-v1.json")
    encodings = set()
    for entry in found["signatures"]:
        signature = decode(entry["wire"], Geometry(*found["geometry"]))
        assert signature.counts.tolist() == entry["counts"]
        assert (signature.tokens, signature.coverage) == (entry["tokens"], entry["coverage"])
        encodings.add(entry["wire"]["counts"]["encoding"])
    assert encodings == {"u8", "u16+deflate"}


def test_signature_1_of_a_long_prompt() -> None:
    found = stored("signature-large-v1.json")
    signature = decode(found["wire"], Geometry(*found["geometry"]))
    assert int(signature.counts.sum(dtype=np.int64)) == found["total"]
    for layer, expert, count in found["nonzero"]:
        assert signature.counts[layer, expert] == count


def test_signature_2_in_every_smaller_form() -> None:
    found = stored("signature-v2.json")
    for entry in found["signatures"]:
        signature = decode(entry["wire"], Geometry(*found["geometry"]))
        assert signature.counts.tolist() == entry["counts"]
        told = signature.tokens, signature.coverage, signature.sampled
        assert told == (entry["tokens"], entry["coverage"], entry["sampled"])
    assert [entry["form"] for entry in found["signatures"]] == ["8bit", "sampled", "exact"]


def test_recorded_signatures_1() -> None:
    recorded = load_recorded(STORED / "recorded-v1.npz")
    assert (len(recorded), recorded.model) == (24, "tiny-test")
    assert recorded.geometry == SMALL
    assert (recorded.counts.sum(axis=(1, 2), dtype=np.int64) == 60 * SMALL.layers * 2).all()


def test_partition_1() -> None:
    workers = ["http://d0:8200", "http://d1:8200"]
    path = STORED / "partition-v1.safetensors"
    partition = load_partition(path, geometry=SMALL, workers=workers)
    assert list(partition.names) == workers
    assert re.fullmatch("[0-9a-f]+", partition.digest)


def test_decode_counters_1() -> None:
    answer = stored("decode-counters-v1.json")
    counters = parse(answer)
    assert counters.steps == answer["steps"] > 0
    assert counters.use.sum(axis=1).tolist() == answer["distinct"]


def test_decision_log_1_with_counters_2() -> None:
    path = str(STORED / "decisions-v1-counters-v2.jsonl")
    rows = list(read_decisions(path))
    assert len(rows) == 30
    assert all(explanation(row)["sentence"] for row in rows)
    data = build.from_log(read_log(path), "stored")
    assert data["heat"]["workers"] == ["http://d0:8200", "http://d1:8200"]
    assert data["numbers"]["experts"]["realised"] == pytest.approx(14, abs=6)
    assert data["pairs"]


def test_changelog_names_every_version() -> None:
    """The table says which versions this one writes; the code says the same."""
    from eldr.routing.partition import FORMAT_VERSION
    from eldr.serving import decision_log
    from eldr.signature import SMALL_VERSION, WIRE_VERSION

    table = (ROOT / "CHANGELOG.md").read_text()
    for label, version in (
        ("signature in the prefill answer", rf"{WIRE_VERSION} \(.*\), {SMALL_VERSION} \(.*\)"),
        (r"partition \(`.safetensors`\)", FORMAT_VERSION),
        (r"decision log: decisions", decision_log.VERSION),
        (r"decision log: counters", decision_log.COUNTERS_VERSION),
        (r"page data, `GET /eldr/data`", build.VERSION),
    ):
        assert re.search(rf"\| {label} \| {version} \|", table), label
