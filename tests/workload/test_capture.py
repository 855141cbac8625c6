"""`eldr capture` against a server that answers as vLLM does."""

from __future__ import annotations

import base64
import io
import json
import threading
import urllib.error
import urllib.request
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest

from eldr import cli
from eldr.cli.capture_client import Server
from eldr.cli.capture_mirror import Mirror, MirrorConfig, shortened
from eldr.demo.ports import free_ports
from eldr.workload.traces import load

EXPERTS, LAYERS, K = 16, 3, 2


class FakeVllm(BaseHTTPRequestHandler):
    """Completions with routing; prompts that contain "bad" fail, `routing` off returns none."""

    routing = True
    bodies: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def do_GET(self):
        if self.path == "/v1/models":
            self._answer({"data": [{"id": "moe"}]})
        elif self.path == "/eldr/info" and type(self).routing:
            self._answer({"geometry": {"layers": LAYERS, "experts": EXPERTS, "top_k": K}})
        else:
            self._answer({}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).bodies.append((self.path, body))
        chat = self.path.endswith("/chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        made = body["max_tokens"]
        if "bad" in prompt:
            return self._answer({"error": "no"}, 500)
        if "odd" in prompt:
            return self._answer({"choices": []})
        count = len(prompt)
        rng = np.random.default_rng(count)
        order = np.argsort(rng.random((count + made - 1, LAYERS, EXPERTS)), axis=2)
        buffer = io.BytesIO()
        np.save(buffer, order[:, :, :K].astype(np.int16))
        choice, ids = {"token_ids": [7] * made}, {"prompt_token_ids": list(range(count))}
        if type(self).routing:
            choice["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
        usage = {"prompt_tokens": count}
        if chat:
            return self._answer({"choices": [choice], "usage": usage, **ids})
        return self._answer({"choices": [choice | ids], "usage": usage})

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
    FakeVllm.bodies.clear()
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


def test_saved_answers_become_a_trace(url, tmp_path, capsys):
    saved = tmp_path / "answers.jsonl"
    out = str(tmp_path / "t.npz")
    lines = []
    for text in ("a" * 5, "b" * 8):
        body = json.dumps({"prompt": text, "max_tokens": 4}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=60) as answer:
            lines.append(json.loads(answer.read()) | {"domain": text[0]})
    saved.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    arguments = ["capture", "--answers", str(saved), "--experts", "16", "--model", "moe", "-o", out]
    assert cli.main(arguments) == cli.DONE
    trace = load(out)
    assert trace.prompt_tokens.tolist() == [5, 8]
    assert trace.domains == ("a", "b")
    assert trace.model == "moe"
    for line, message in (
        ("{", "line 1"),
        ("[]", "not an answer"),
        ('{"choices": [{}], "usage": {"prompt_tokens": 3}}', "no routing"),
        ('{"choices": [{"routed_experts": "?"}], "usage": {"prompt_tokens": 3}}', "cannot be read"),
    ):
        saved.write_text(line)
        assert cli.main(arguments) == cli.USAGE
        assert message in capsys.readouterr().err
    assert cli.main(["capture", "--answers", str(saved), "-o", out]) == cli.USAGE
    assert "--experts" in capsys.readouterr().err
    assert cli.main(["capture", url, "--answers", str(saved), "--experts", "9", "-o", out]) == 2
    assert cli.main(["capture", "--prompts", str(saved), "-o", out]) == cli.USAGE
    assert "needs a URL" in capsys.readouterr().err


def test_failed_requests_are_left_out_and_a_sample_is_a_sample(url, tmp_path, capsys):
    file = prompts(tmp_path / "p.jsonl", ["a" * 5, "bad", "c" * 7, "d" * 8, "odd"])
    out = tmp_path / "t.npz"
    arguments = ["capture", url, "--prompts", file, "-o", str(out), "--output-tokens", "4"]
    assert cli.main(arguments) == cli.DONE
    captured = capsys.readouterr()
    assert "2 failed" in captured.out
    assert "HTTP 500" in captured.err
    assert "not an answer of vLLM" in captured.err
    assert cli.main([*arguments, "--sample", "0.5", "--seed", "2"]) == cli.DONE
    assert "requests" in capsys.readouterr().out
    assert len(load(out)) <= 3


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
    for given in (["here"], ["1", "--requests", "0"], ["70000"], ["1", "--seconds", "-1"]):
        assert cli.main(["capture", "http://x", "-o", "t", "--listen", *given]) == cli.USAGE
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["capture", "http://x", "-o", "t"])
    assert "--prompts --listen --answers" in capsys.readouterr().err


def mirror(url, **changes):
    args = Namespace(url=url, model="", experts=None, timeout=120.0, api_key="")
    given = {"host": "127.0.0.1", "port": 0, "requests": 3, "seconds": 60.0, "share": 1.0,
             "output_tokens": 6, "concurrency": 2, "seed": 0, "label_header": "X-Kind"}  # fmt: skip
    return Mirror(Server(args), MirrorConfig(**{**given, **changes}))


def send(port, body, path="/v1/completions", **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_copies_of_a_deployments_requests_are_replayed_until_there_are_enough(url):
    taking, results = mirror(url), []
    thread = threading.Thread(target=lambda: results.extend(taking.run()))
    thread.start()
    port = taking.port
    assert send(port, b"{") == 400
    assert send(port, [1]) == 400
    assert send(port, {"model": "x"}, "/v1/embeddings") == 404
    assert send(port, {"prompt": "bad", "max_tokens": 9}) == 202  # the copy's fate is not told
    live = {"prompt": "a" * 5, "max_tokens": 50, "stream": True, "model": "alias",
            "stream_options": {}, "kv_transfer_params": {}}  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "b" * 9}], "max_tokens": 4}
    while thread.is_alive():  # copies that find both replays busy are dropped
        try:
            send(port, live, **{"X-Kind": "law"})
            send(port, chat, "/v1/chat/completions?x=1")
        except OSError:
            break  # enough: it has stopped listening
    thread.join()
    assert len(results) == 3
    kinds = {(r.domain, r.prompt_tokens, len(r.topk)) for r in results}
    assert kinds <= {("law", 5, 10), ("", 9, 12)}
    assert all(r.tokens is not None for r in results)
    path, body = next((p, b) for p, b in FakeVllm.bodies if b.get("prompt") == "a" * 5)
    assert path == "/v1/completions"
    assert body == {"prompt": "a" * 5, "max_tokens": 6, "model": "moe", "stream": False, "n": 1,
                    "return_token_ids": True}  # fmt: skip
    assert taking.counts["failed"] == 1
    assert taking.counts["seen"] == taking.counts["sampled"] + taking.counts["dropped"]


def test_the_sample_is_a_share_of_the_copies(url):
    taking = mirror(url, share=0.25, seconds=0, requests=1000, seed=3)
    thread = threading.Thread(target=taking.run)
    thread.start()
    assert send(taking.port, b"", "/health") == 404
    for _ in range(200):
        assert send(taking.port, {"prompt": "a" * 5}) == 202
    taking.close()
    thread.join()
    assert taking.counts["seen"] == 200
    assert 30 < taking.counts["sampled"] + taking.counts["dropped"] < 70


def test_time_ends_a_capture_that_nobody_feeds(url):
    assert mirror(url, seconds=0.1).run() == []


def test_what_is_replayed_of_a_request():
    assert shortened({"max_tokens": 3}, 8) == {"max_tokens": 3}
    assert shortened({"max_completion_tokens": 30}, 8) == {"max_completion_tokens": 8}
    assert shortened({"max_tokens": None}, 8) == {"max_tokens": 8}


def test_the_mirror_by_command_line_writes_a_trace(url, tmp_path, capsys):
    out = tmp_path / "t.npz"
    (free,) = free_ports(1)
    feeding = threading.Event()

    def feed():
        while not feeding.is_set():
            try:
                send(free, {"prompt": "a" * 5, "max_tokens": 4}, **{"X-ELDR-Domain": "law"})
            except OSError:
                feeding.wait(0.05)

    thread = threading.Thread(target=feed)
    thread.start()
    code = cli.main(["capture", url, "--listen", str(free), "--requests", "4", "-o", str(out),
                     "--json"])  # fmt: skip
    feeding.set()
    thread.join()
    assert code == cli.DONE
    summary = json.loads(capsys.readouterr().out)
    assert summary["requests"] == len(load(out)) == 4
    assert summary["domains"] == ["law"]
    assert summary["seen"] >= 4
