"""The report: the same numbers in three forms, one file without requests, honest about gaps."""

import json
import re
from html.parser import HTMLParser

import pytest

from eldr import tracing
from profiling import decode_log, timeline
from profiling.audit import Options, collect
from profiling.decode_log import DecodeLogError
from profiling.export import Export
from profiling.faults import FAULTS
from profiling.fixture import Scenario, record_engine
from profiling.report import main


@pytest.fixture
def capture(tmp_path):
    return record_engine(tmp_path / "capture.sqlite", Scenario())


def snapshot(steps, tokens, distinct, seconds):
    line = {"v": 1, "steps": steps, "tokens": tokens, "seconds": seconds, "distinct": distinct}
    return json.dumps(line)


@pytest.fixture
def log(tmp_path):
    """Three intervals on the line 2 ms + 0.1 ms per distinct expert."""
    lines, steps, tokens, distinct, seconds = [], 0, 0, 0.0, 0.0
    for experts, count in ((0, 0), (10, 100), (20, 50), (40, 200)):
        steps, tokens = steps + count, tokens + 8 * count
        distinct += experts * count
        seconds += count * (2 + 0.1 * experts) / 1e3
        lines.append(snapshot(steps, tokens, [distinct, distinct], seconds))
    path = tmp_path / "decode.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    return path


class Page(HTMLParser):
    """Checks that tags close and collects what a browser would fetch."""

    void = ("meta", "line", "rect", "circle", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "action")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_three_files_and_the_audits_exit_code(capture, log, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(capture), "--out", str(out), "--decode-log", str(log)]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(out / f"report.{end}") for end in ("md", "json", "html")]
    data = json.loads((out / "report.json").read_text())
    assert data["audit"]["verdict"] == "PASS"
    markdown = (out / "report.md").read_text()
    assert markdown.startswith("# PASS: capture.sqlite\n")
    assert "| eldr_accumulate | 64 | 64 | 0.38 |" in markdown
    page = Page((out / "report.html").read_text())
    assert page.open == []
    assert page.links == []
    text = " ".join(page.text)
    for word in (
        "PASS",
        "eldr_gather_score",
        "stream 20",
        "Distinct experts",
        "thread 4242 ranges",
    ):
        assert word in text
    assert "url(" not in (out / "report.html").read_text()


def test_faulty_and_empty_captures_still_make_a_report(tmp_path):
    for name, code in (("hidden .item()", 1), ("no NVTX table", 3), ("no strings", 3)):
        path = next(f for f in FAULTS if f.name == name).write(tmp_path / "fault.sqlite")
        assert main([str(path), "--out", str(tmp_path / "out")]) == code
        assert Page((tmp_path / "out/report.html").read_text()).open == []
    assert main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 3


def test_names_from_the_capture_are_escaped(tmp_path):
    from profiling.fixture import Engine

    class Hostile(Engine):
        def forward(self):
            self.r.launch("void k<float, 4>(int*)|<script>alert(1)</script>", 1000)

    path = record_engine(tmp_path / "a.sqlite", Scenario(graphs=False), Hostile)
    main([str(path), "--out", str(tmp_path / "out")])
    assert "<script>" not in (tmp_path / "out/report.html").read_text()
    assert "\\|&lt;script>" in (tmp_path / "out/report.md").read_text()


def test_environment_variables_of_the_capture_are_not_shown(tmp_path):
    from profiling.fixture import Engine
    from profiling.recorder import Recorder

    recorder = Recorder()
    Engine(recorder, Scenario()).run()
    secret = {"PROCESS_0:ENVIRONMENT_VARIABLE": 'API_TOKEN="s3cr3t"'}
    path = recorder.write(tmp_path / "a.sqlite", secret)
    main([str(path), "--out", str(tmp_path / "out")])
    assert all("s3cr3t" not in p.read_text() for p in (tmp_path / "out").iterdir())


def test_range_and_step_numbers(capture, tmp_path):
    main([str(capture), "--out", str(tmp_path / "out")])
    data = json.loads((tmp_path / "out/report.json").read_text())
    ranges = {row["range"]: row for row in data["ranges"]}
    # 64 launches of 6 us each; the host is inside for the launch and the range's own two ends.
    accumulate = ranges[tracing.ACCUMULATE]
    assert accumulate["count"] == 64
    assert accumulate["device_ms"] == pytest.approx(64 * 6e-3)
    assert accumulate["host_us_p50"] == pytest.approx(4.0)
    (steps,) = data["steps"]
    assert (steps["count"], steps["ms_p50"]) == (63, 10.0)
    assert sum(row["share"] for row in data["kernels"]) == pytest.approx(1)


def test_strip_shows_a_step_with_all_ranges(capture):
    export = Export(capture)
    strip = timeline.strip(export, collect(export, Options()))
    bars = [bar for lane in strip.lanes for bar in lane.bars]
    names = {bar.name for bar in bars if bar.kind == timeline.ELDR}
    assert {"accumulate", "decide", "copy", "merge", "eldr_gather_score", "copy_ids"} <= names
    assert all(0 <= bar.start <= bar.end for bar in bars)
    closer = timeline.zoom(strip)
    assert closer.length < strip.length
    assert {b.name for lane in closer.lanes for b in lane.bars} >= {"accumulate", "merge"}


def test_decode_log_fit(log):
    points = decode_log.read(log)
    assert [p.distinct for p in points] == pytest.approx([10, 20, 40])
    assert [p.tokens for p in points] == [8, 8, 8]
    fit = decode_log.fit(points)
    assert (fit.base, fit.slope) == pytest.approx((2.0, 0.1))
    assert fit.correlation == pytest.approx(1.0)
    assert decode_log.fit(points[:2]) is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{"], "line 1: not a decode snapshot"),
        (['{"v": 2}'], "format 2"),
        (['{"v": 1, "steps": 1}'], "line 1: not a decode snapshot"),
        ([snapshot(5, 5, [5.0], 1.0), snapshot(4, 4, [4.0], 0.5)], "line 2: counters went back"),
        ([snapshot(5, 5, [], 1.0)], "not a decode snapshot"),
    ],
)
def test_bad_decode_logs_are_refused_with_the_line(lines, says, tmp_path, capture, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DecodeLogError, match=re.escape(says)):
        decode_log.read(path)
    command = [str(capture), "--out", str(tmp_path / "out"), "--decode-log", str(path)]
    assert main(command) == 2
    assert says in capsys.readouterr().err
