"""`eldr record`, `eldr fit` and `eldr assess` against a stand-in for a patched prefill worker."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from eldr.cli import CANNOT_TELL, DONE, NO, USAGE, main
from eldr.geometry import Geometry
from eldr.routing import load_partition, load_recorded
from eldr.signature import encode
from tests.routing.helpers import SMALL, recorded, signatures

INFO = {
    "v": 1, "role": "prefill", "model": "tiny", "vllm": "0", "series": "0", "block_size": 16,
    "geometry": {"layers": 3, "experts": 16, "top_k": 2, "digest": SMALL.digest},
    "histogram_bytes": 0,
}  # fmt: skip


class Worker:
    """Answers like a patched prefill worker; `answer` may be replaced per test."""

    def __init__(self):
        self.info, self.bodies, self.lock = dict(INFO), [], threading.Lock()
        self.made = signatures(50)[0]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                found = self.path == "/eldr/info" and outer.info is not None
                self.reply(200 if found else 404, outer.info if found else {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.bodies.append((body, self.headers.get("Authorization")))
                self.reply(*outer.answer(body))

            def reply(self, code, value):
                data = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, body):
        which = body["prompt"] if isinstance(body["prompt"], list) else [int(body["prompt"])]
        payload = encode(self.made[which[0]], SMALL)
        return 200, {"choices": [], "kv_transfer_params": {"eldr": payload}}


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.server.shutdown()
    made.server.server_close()


def prompts(tmp_path, lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


def record(worker, tmp_path, lines, *more):
    url = worker if isinstance(worker, str) else worker.url
    out = str(tmp_path / "out.npz")
    return main(
        ["record", "--prefill", url, "--prompts", prompts(tmp_path, lines), "-o", out, *more]
    ), out


def test_record_then_fit(worker, tmp_path, capsys):
    lines = [{"prompt": str(i), "domain": f"d{i % 4}"} for i in range(30)]
    lines += [{"prompt_token_ids": [30 + i]} for i in range(10)] + [""]
    code, out = record(worker, tmp_path, lines, "--json", "--api-key", "secret")
    assert code == DONE
    report = json.loads(capsys.readouterr().out)
    assert (report["signatures"], report["failed"], report["model"]) == (40, 0, "tiny")
    loaded = load_recorded(out)
    np.testing.assert_array_equal(loaded.counts[7], worker.made[7].counts)
    assert loaded.labels[:5].tolist() == ["d0", "d1", "d2", "d3", "d0"]
    body, key = worker.bodies[0]
    assert key == "Bearer secret"
    assert (body["model"], body["max_tokens"]) == ("tiny", 1)
    assert body["kv_transfer_params"] == {"eldr": {"counts": True}}
    target = str(tmp_path / "p.safetensors")
    assert main(["fit", out, "--worker", "x=3", "--worker", "y", "-o", target, "--json"]) == DONE
    report = json.loads(capsys.readouterr().out)
    assert report["sizes"] == [30, 10]
    assert load_partition(target, geometry=SMALL, workers=["x", "y"]).digest == report["digest"]


def test_some_prompts_fail(worker, tmp_path, capsys):
    good = worker.answer
    worker.answer = lambda b: (400, {"error": "too long"}) if b["prompt"] == "1" else good(b)
    code, out = record(worker, tmp_path, [{"prompt": str(i), "id": f"p{i}"} for i in range(3)])
    assert code == DONE
    text = capsys.readouterr()
    assert "p1: " in text.err
    assert "too long" in text.err
    assert "1 failed" in text.out
    assert len(load_recorded(out)) == 2


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"kv_transfer_params": {"eldr": {"v": 9}}},
        {"kv_transfer_params": {"eldr": {**encode(signatures(1)[0][0], SMALL), "geometry": "x"}}},
        {"kv_transfer_params": {"eldr": {**encode(signatures(1)[0][0], SMALL), "coverage": 0}}},
        ["not an object"],
    ],
)
def test_nothing_usable_is_no(worker, tmp_path, capsys, answer):
    worker.answer = lambda _: (200, answer)
    code, out = record(worker, tmp_path, [{"prompt": "0"}])
    assert code == NO
    assert "all 1 prompts failed; nothing written" in capsys.readouterr().err
    with pytest.raises(ValueError, match="cannot read"):
        load_recorded(out)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (None, "eldr patch apply"),
        ({**INFO, "role": "decode"}, "is a decode worker"),
        ({**INFO, "v": 2}, "version 2"),
        ({**INFO, "geometry": {"layers": 3}}, "malformed"),
        ({**INFO, "geometry": {**INFO["geometry"], "digest": "0"}}, "digest"),
    ],
)
def test_workers_that_cannot_be_used(worker, tmp_path, capsys, info, message):
    worker.info = info
    code, _ = record(worker, tmp_path, [{"prompt": "0"}])
    assert code == CANNOT_TELL
    assert message in capsys.readouterr().err
    assert not worker.bodies


def test_a_worker_that_does_not_answer(tmp_path, capsys):
    code, _ = record("http://127.0.0.1:9", tmp_path, [{"prompt": "0"}])
    assert code == CANNOT_TELL
    assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: expected an object"),
        ("{}", "line 1: needs `prompt`"),
        ('{"prompt": ["a"]}', "line 1: needs `prompt`"),
        ('{"prompt": ""}', "line 1: needs `prompt`"),
        ("", "no prompts"),
    ],
)
def test_bad_prompts(worker, tmp_path, capsys, line, message):
    code, _ = record(worker, tmp_path, [line])
    assert code == USAGE
    assert message in capsys.readouterr().err


def test_fit_refusals(tmp_path, capsys):
    path, out = str(tmp_path / "s.npz"), str(tmp_path / "p")
    recorded(5).save(path)
    assert main(["fit", path, "--workers", "9", "-o", out]) == NO
    assert "5 signatures for 9 workers" in capsys.readouterr().err
    assert main(["fit", path, "--workers", "0", "-o", out]) == USAGE
    assert main(["fit", path, "--worker", "a=0", "-o", out]) == USAGE
    assert main(["fit", path, "--worker", "a", "--worker", "a", "-o", out]) == USAGE
    assert main(["fit", str(tmp_path / "none"), "--workers", "2", "-o", out]) == CANNOT_TELL
    assert main(["fit", path, "--workers", "2", "-o", str(tmp_path / "no" / "p")]) == CANNOT_TELL


def test_assess_exit_codes(tmp_path, capsys):
    path = str(tmp_path / "s.npz")
    recorded(160).save(path)
    arguments = ["assess", path, "--workers", "4", "--batch", "3", "--rounds", "2", "--json"]
    assert main(arguments) == DONE
    assert json.loads(capsys.readouterr().out)["verdict"] == "deploy"
    recorded(30).save(path)
    assert main(arguments[:-1]) == CANNOT_TELL
    assert "needs more data" in capsys.readouterr().out
    assert main([*arguments, "--expert-mb", "9"]) == USAGE
    assert main(["assess", str(tmp_path / "none"), "--workers", "4"]) == CANNOT_TELL


@pytest.mark.parametrize(
    ("form", "sampled"), [("exact", False), ("8bit", False), ("sampled", True)]
)
def test_a_recording_shows_what_a_smaller_form_keeps(worker, tmp_path, form, sampled):
    worker.made = signatures(8, tokens=(900, 2000))[0]
    lines = [{"prompt": str(i)} for i in range(8)]
    code, out = record(worker, tmp_path, lines, "--form", form)
    assert code == DONE
    loaded = load_recorded(out)
    exact = np.stack([s.counts for s in worker.made])
    assert np.array_equal(loaded.counts, exact) is (form == "exact")
    assert (loaded.tokens == 128).all() == sampled
    flat = loaded.counts.reshape(8, -1).astype(float), exact.reshape(8, -1).astype(float)
    cosine = (flat[0] * flat[1]).sum(1) / np.prod([np.linalg.norm(f, axis=1) for f in flat], 0)
    assert cosine.min() > 0.99


def row(number, signature=None, payload=None):
    if signature is not None:
        payload = encode(signature, SMALL)
    return {"v": 1, "request_id": f"r{number}", "signature": payload}


def log(tmp_path, rows, name="decisions.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_a_decision_log_is_recorded_fitted_and_assessed(tmp_path, capsys):
    made = signatures(160)[0]
    rows = [row(i, s) for i, s in enumerate(made)]
    rows.insert(3, row(900))
    rows.insert(4, {"v": 2, "kind": "counters", "workers": {}})
    rows.insert(9, row(901, payload={"v": 9}))
    rows.insert(9, row(902, type(made[0])(np.zeros((3, 16), np.uint32), 4)))
    first, second = log(tmp_path, rows[:50], "d.1"), log(tmp_path, rows[50:], "d")
    out = str(tmp_path / "s.npz")
    command = ["record", "--log", first, "--log", second, "-o", out, "--model", "tiny", "--json"]
    assert main(command) == DONE
    report = json.loads(capsys.readouterr().out)
    assert (report["signatures"], report["failed"], report["model"]) == (160, 3, "tiny")
    loaded = load_recorded(out)
    assert loaded.geometry == SMALL
    np.testing.assert_array_equal(loaded.counts, np.stack([s.counts for s in made]))
    assert main([*command, "--limit", "7"]) == DONE
    assert json.loads(capsys.readouterr().out)["signatures"] == 7
    whole = log(tmp_path, rows)
    target = str(tmp_path / "p")
    assert main(["fit", whole, "--workers", "4", "-o", target, "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["sizes"] == [40] * 4
    arguments = ["assess", whole, "--workers", "4", "--batch", "3", "--rounds", "2", "--json"]
    assert main(arguments) == DONE
    assert json.loads(capsys.readouterr().out)["verdict"] == "deploy"


OTHER = Geometry(2, 16, 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "none with a usable signature"),
        ([row(1)], "none with a usable signature; run `eldr serve` with --decision-log-sig"),
        ([{"v": 7}], "version 7"),
        ([row(1, payload={"v": 1, "counts": {}})], "none with a usable"),
        ([row(1, payload={"v": 1, "geometry": "0" * 16, "tokens": 1, "coverage": 1.0,
                                  "counts": {"encoding": "u8", "data": "AAAA"}})], "none with a"),
        ([row(1, signatures(1)[0][0]),
          row(2, payload=encode(signatures(1, OTHER)[0][0], OTHER))], "one log, one model"),
    ],
)  # fmt: skip
def test_logs_that_cannot_be_used(tmp_path, capsys, rows, message):
    path = log(tmp_path, rows)
    assert main(["record", "--log", path, "-o", str(tmp_path / "o")]) == CANNOT_TELL
    assert re.search(message, capsys.readouterr().err)
    if rows:
        assert main(["fit", path, "--workers", "2", "-o", str(tmp_path / "o")]) == CANNOT_TELL
        assert re.search(message, capsys.readouterr().err)
        assert main(["assess", path, "--workers", "2"]) == CANNOT_TELL


def test_where_signatures_come_from_is_said_once(worker, tmp_path, capsys):
    path = log(tmp_path, [row(1)])
    assert main(["record", "--log", path, "--prompts", path, "-o", "x"]) == USAGE
    assert main(["record", "--prefill", worker.url, "-o", "x"]) == USAGE
    with pytest.raises(SystemExit):
        main(["record", "--prefill", worker.url, "--router", worker.url, "-o", "x"])
    missing = str(tmp_path / "none")
    assert main(["record", "--log", missing, "-o", "x"]) == CANNOT_TELL
    assert missing in capsys.readouterr().err
    command = ["record", "--router", worker.url, "--prompts", prompts(tmp_path, [{"prompt": "1"}])]
    assert main([*command, "-o", "x"]) == CANNOT_TELL
    assert "/workers" in capsys.readouterr().err
