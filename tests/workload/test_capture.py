"""`eldr capture` against a server that answers as vLLM does."""

from __future__ import annotations

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from eldr import cli
from eldr.workload.traces import load

EXPERTS, LAYERS, K = 16, 3, 2


class FakeVllm(BaseHTTPRequestHandler):
    """Completions with routing; prompts that contain "bad" fail, `routing` off returns none."""

    routing = True

    def do_GET(self):
        if self.path == "/v1/models":
            self._answer({"data": [{"id": "moe"}]})
        elif self.path == "/eldr/info" and type(self).routing:
            self._answer({"geometry": {"layers": LAYERS, "experts": EXPERTS, "top_k": K}})
        else:
            self._answer({}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, made = body["prompt"], body["max_tokens"]
        if "bad" in prompt:
            return self._answer({"error": "no"}, 500)
        count = len(prompt)
        rng = np.random.default_rng(count)
        order = np.argsort(rng.random((count + made - 1, LAYERS, EXPERTS)), axis=2)
        buffer = io.BytesIO()
        np.save(buffer, order[:, :, :K].astype(np.int16))
        choice = {"prompt_token_ids": list(range(count)), "token_ids": [7] * made}
        if type(self).routing:
            choice["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
        return self._answer({"choices": [choice], "usage": {"prompt_tokens": count}})

    def _answer(self, content, code=200):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeVllm)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    FakeVllm.routing = True
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def prompts(path, texts):
    lines = [json.dumps({"prompt": t, "domain": f"d{i % 2}"}) for i, t in enumerate(texts)]
    path.write_text("\n".join(lines))
    return str(path)


def test_a_trace_of_prompt_and_decoded_tokens(url, tmp_path, capsys):
    file = prompts(tmp_path / "p.jsonl", ["a" * 5, "b" * 9, "c" * 7])
    out = tmp_path / "t.npz"
    arguments = ["capture", url, "--prompts", file, "-o", str(out), "--output-tokens", "6"]
    assert cli.main([*arguments, "--json"]) == cli.DONE
    summary = json.loads(capsys.readouterr().out)
    assert summary["requests"] == 3
    trace = load(out)
    assert (trace.geometry.layers, trace.geometry.experts) == (LAYERS, EXPERTS)
    assert trace.prompt_tokens.tolist() == [5, 9, 7]
    assert np.diff(trace.offsets).tolist() == [10, 14, 12]  # the last token has no row
    assert trace.domains == ("d0", "d1")
    assert trace.model == "moe"
    assert trace.tokens is not None
    assert trace.tokens[:10].tolist() == [0, 1, 2, 3, 4, 7, 7, 7, 7, 7]


def test_failed_requests_are_left_out_and_a_sample_is_a_sample(url, tmp_path, capsys):
    file = prompts(tmp_path / "p.jsonl", ["a" * 5, "bad", "c" * 7, "d" * 8])
    out = tmp_path / "t.npz"
    arguments = ["capture", url, "--prompts", file, "-o", str(out), "--output-tokens", "4"]
    assert cli.main(arguments) == cli.DONE
    captured = capsys.readouterr()
    assert "1 failed" in captured.out
    assert "HTTP 500" in captured.err
    assert cli.main([*arguments, "--sample", "0.5", "--seed", "2"]) == cli.DONE
    assert "requests" in capsys.readouterr().out
    assert len(load(out)) <= 2


def test_a_server_without_routing_is_told_the_flag(url, tmp_path, capsys):
    file = prompts(tmp_path / "p.jsonl", ["a" * 5])
    arguments = ["capture", url, "--prompts", file, "-o", str(tmp_path / "t.npz")]
    FakeVllm.routing = False
    assert cli.main(arguments) == cli.CANNOT_TELL  # nor does it say how many experts there are
    assert "--experts" in capsys.readouterr().err
    assert cli.main([*arguments, "--experts", "16"]) == cli.NO
    assert "--enable-return-routed-experts" in capsys.readouterr().err


def test_bad_arguments(tmp_path, capsys):
    file = prompts(tmp_path / "p.jsonl", ["a"])
    nowhere = ["capture", "http://127.0.0.1:9", "--prompts", file, "-o", str(tmp_path / "t.npz")]
    assert cli.main(nowhere) == cli.CANNOT_TELL
    assert cli.main([*nowhere, "--sample", "0"]) == cli.USAGE
    assert cli.main(["capture", "http://x", "--prompts", "none", "-o", "t"]) == cli.USAGE
    capsys.readouterr()
