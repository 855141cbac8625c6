"""`eldr capture` from a real vLLM over HTTP: every row of the trace, checked against ELDR's counts.

The server returns vLLM's own routed experts (runner V2), and ELDR counts beside it in the same
process, in another way: prompts in the KV blocks' histograms, decode steps in the counters.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")

from eldr import cli
from eldr.demo.ports import free_ports
from eldr.geometry import Geometry
from eldr.signature import decode
from eldr.workload.tiny import GEOMETRY, MODEL_DIR, load_prompts
from eldr.workload.traces import load

pytestmark = pytest.mark.vllm
OUTPUT = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL of the bundled model's server, one request at a time."""
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("routed_server.py")),
             "--model", str(MODEL_DIR), "--served-model-name", "tiny", "--port", str(port),
             "--enable-return-routed-experts", "--max-model-len", "512", "--max-num-seqs", "1",
             "--enforce-eager", "--dtype", "bfloat16", "--block-size", "32",
             "--chat-template", "{{ messages[0]['content'] }}",
             "--additional-config", json.dumps({"eldr": {"role": "both"}})],
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 600
        while not answers(f"{url}/health"):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def get(url):
    with urllib.request.urlopen(url, timeout=180) as answer:
        return json.loads(answer.read())


def post(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def prompt_counts(server, prompt):
    """ELDR's signature of a prompt, uint32 [L, E], from the same server."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0,
            "kv_transfer_params": {"eldr": {"counts": True}}}  # fmt: skip
    payload = post(f"{server}/v1/completions", body)["kv_transfer_params"]["eldr"]
    return decode(payload, Geometry(GEOMETRY.layers, GEOMETRY.experts, GEOMETRY.top_k)).counts


@pytest.mark.timeout(900)
def test_the_trace_of_a_prompts_file_is_what_the_engine_computed(server, tmp_path, capsys):
    prompts = load_prompts("reference")[:3]
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": p.prompt, "domain": p.domain}) for p in prompts)
    )
    before = get(f"{server}/eldr/decode")
    code = cli.main(["capture", server, "--prompts", str(file), "-o", str(tmp_path / "t.npz"),
                     "--output-tokens", str(OUTPUT), "--concurrency", "1", "--json"])  # fmt: skip
    after = get(f"{server}/eldr/decode")
    assert code == cli.DONE, capsys.readouterr().err
    trace = load(tmp_path / "t.npz")
    assert (trace.geometry, trace.model, len(trace)) == (GEOMETRY, "tiny", 3)
    decoded = trace.offsets[1:] - trace.cuts
    assert decoded.tolist() == [OUTPUT - 1] * 3  # the last token was never run through the model
    for i, prompt in enumerate(prompts):
        assert trace.domains[trace.domain[i]] == prompt.domain
        np.testing.assert_array_equal(trace.prompt_counts[i], prompt_counts(server, prompt.prompt))
    # One request at a time: a step reads an expert once, so reads are the decoded tokens' picks.
    use = np.array(after["use"]) - np.array(before["use"])
    np.testing.assert_array_equal(use, trace.decode_counts.sum(axis=0))
    assert after["steps"] - before["steps"] == decoded.sum()
    assert trace.tokens is not None
    assert len(trace.tokens) == trace.offsets[-1]


@pytest.mark.timeout(900)
def test_a_sample_of_mirrored_chat_and_completion_requests(server, tmp_path, capsys):
    prompts = load_prompts("reference")[3:5]
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "eldr", "capture", server, "--listen", str(port),
               "--requests", "2", "--seconds", "300", "--output-tokens", str(OUTPUT),
               "--concurrency", "2", "-o", str(tmp_path / "t.npz"), "--json"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as capture:
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert capture.poll() is None
            time.sleep(0.1)
        live = {"model": "served-name", "prompt": prompts[0].prompt, "max_tokens": 400,
                "stream": True, "ignore_eos": True, "temperature": 0}  # fmt: skip
        chat = {"messages": [{"role": "user", "content": prompts[1].prompt}], "ignore_eos": True,
                "max_completion_tokens": 4}  # fmt: skip
        post(f"http://127.0.0.1:{port}/v1/completions", live)
        post(f"http://127.0.0.1:{port}/v1/chat/completions", chat)
        out, _ = capture.communicate(timeout=600)
        assert capture.returncode == cli.DONE
    summary = json.loads(out)
    assert (summary["requests"], summary["seen"], summary["failed"]) == (2, 2, 0)
    trace = load(tmp_path / "t.npz")
    by_length = dict(zip(np.diff(trace.offsets) - trace.prompt_tokens, range(2), strict=True))
    assert set(by_length) == {OUTPUT - 1, 3}  # each answer less its last token
    counts = prompt_counts(server, prompts[0].prompt)
    np.testing.assert_array_equal(trace.prompt_counts[by_length[OUTPUT - 1]], counts)
