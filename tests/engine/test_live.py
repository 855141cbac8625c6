"""A real server on a CPU: vectors replaced while prompts run, and what it says of itself."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import eldr
from eldr.demo.ports import free_ports
from eldr.demo.workers import ENGINE_ENV
from eldr.geometry import Geometry
from eldr.signature import decode

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
vectors = pytest.importorskip("eldr.engine.vectors")

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1500)]
MODEL = Path(eldr.__file__).parent / "workload" / "tiny_moe"
BLOCK_SIZE, BLOCKS = 32, 256


class Server:
    """vLLM's API server with ELDR in both roles and its admin route on."""

    def __init__(self, log: Path) -> None:
        (port,) = free_ports(1)
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(MODEL), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--enforce-eager", "--distributed-executor-backend", "uni"),
            *("--max-model-len", "512", "--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(BLOCKS), "--max-num-batched-tokens", "96"),
            *("--additional-config", json.dumps({"eldr": {"role": "both", "admin": True}})),
        ]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **ENGINE_ENV}
            )

    def call(self, path, body=None):
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.read()

    def ask(self, path, body=None):
        return json.loads(self.call(path, body))

    def wait(self):
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                return self.call("/health")
            except OSError:
                time.sleep(0.5)  # between two looks; nothing to wait on before it listens
        raise AssertionError(self.log.read_text()[-3000:])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("live") / "log")
    try:
        found.wait()
        yield found
    finally:
        found.process.terminate()
        found.process.wait(60)


@pytest.fixture(scope="module")
def geometry(server):
    found = server.ask("/eldr/info")["geometry"]
    return Geometry(found["layers"], found["experts"], found["top_k"])


class Version:
    """One file of vectors, and what a prompt's counts score against it."""

    def __init__(self, name, kind, workers, geometry):
        rng = np.random.default_rng(workers)
        shape = (geometry.layers, geometry.experts)
        self.kind, self.workers = kind, workers
        self.tensors = {
            "centroids": {
                "centroids": rng.random((workers, *shape), np.float32),
                "weights": rng.random(shape, np.float32),
            },
            "survival": {
                "survival": rng.random((workers, *shape), np.float32),
                "mean": rng.random(shape, np.float32),
                "shrinkage": np.array([16.0], np.float32),
            },
        }[kind]
        self.file = vectors.pack(kind, name, geometry, self.tensors)

    def scores(self, counts, tokens):
        if self.kind == "survival":
            p = (counts + 16.0 * self.tensors["mean"]) / (tokens + 16.0)
            return (self.tensors["survival"] * p).sum((1, 2))
        weighted = counts * self.tensors["weights"]
        dots = (self.tensors["centroids"] * self.tensors["weights"] * counts).sum((1, 2))
        return dots / np.linalg.norm(weighted)


def complete(server, prompt, **params):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **params}
    params = {"kv_transfer_params": {"eldr": {"counts": True}}}
    return server.ask("/v1/completions", {**body, **params})


def test_every_request_is_scored_against_one_version_which_its_answer_names(server, geometry):
    versions = {
        "a": Version("a", "centroids", 2, geometry),
        "b": Version("b", "centroids", 7, geometry),
        "c": Version("c", "survival", 4, geometry),
    }
    assert server.ask("/eldr/vectors") == {"digest": None}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 900, int(rng.integers(1, 300))).tolist() for _ in range(120)]
    answered = threading.Semaphore(0)

    def send(prompt):
        answer = complete(server, prompt)["kv_transfer_params"]["eldr"]
        answered.release()
        return answer

    names = [*versions] * 5
    with ThreadPoolExecutor(6) as clients:
        sent = [clients.submit(send, prompt) for prompt in prompts]
        for name in names:  # while prompts run: every eight answers another version
            found = server.ask("/eldr/vectors", versions[name].file)
            assert (found["digest"], found["workers"]) == (name, versions[name].workers)
            for _ in range(8):
                assert answered.acquire(timeout=600)
        answers = [future.result() for future in sent]

    seen = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (answer["tokens"], answer["coverage"]) == (len(prompt), 1.0)
        scored = answer.get("scores")
        if scored is None:
            continue  # it ended before the first version came
        version = versions[scored["digest"]]
        counts = decode(answer, geometry).counts.astype(np.float64)
        np.testing.assert_allclose(scored["values"], version.scores(counts, len(prompt)), rtol=1e-4)
        seen.add(scored["digest"])
    assert seen == set(versions)


def test_a_refused_file_changes_nothing_and_an_empty_one_removes_the_vectors(server, geometry):
    version = Version("kept", "centroids", 3, geometry)
    server.ask("/eldr/vectors", version.file)
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.call("/eldr/vectors", version.file[:-7])
    assert refused.value.code == 400
    assert server.ask("/eldr/vectors")["digest"] == "kept"
    scored = complete(server, [9, 8, 7])["kv_transfer_params"]["eldr"]["scores"]
    assert scored["digest"] == "kept"
    assert server.ask("/eldr/vectors", b"") == {"digest": None}
    assert "scores" not in complete(server, [9, 8, 6])["kv_transfer_params"]["eldr"]


def test_memory_and_geometry_are_printed_at_start(server, geometry):
    info = server.ask("/eldr/info")
    line = next(text for text in server.log.read_text().splitlines() if "ELDR both worker" in text)
    assert str(geometry) in line
    assert f"{BLOCKS} histograms of {BLOCK_SIZE}-token blocks" in line
    assert info["histogram_bytes"] == (BLOCKS + 1) * geometry.layers * geometry.experts
    assert f"{info['histogram_bytes'] / 2**20:.1f} MiB" in line
    assert re.search(r"\d+\.\d\d % of the KV cache", line)


def test_the_window_comes_on_request_and_metrics_say_that_nothing_failed(server, geometry):
    before = server.ask("/eldr/decode")
    assert "window" not in before
    complete(server, [5, 6, 7], max_tokens=20)
    after = server.ask("/eldr/decode?window=true")
    assert after["steps"] - before["steps"] == 19
    window = after["window"]
    assert after["steps"] == window["steps"]  # fewer than a window so far
    assert window["distinct"] == [sum(row) for row in window["use"]] == after["distinct"]
    assert len(window["use"][0]) == geometry.experts
    lines = server.call("/eldr/metrics").decode().splitlines()
    assert "eldr_failed 0.0" in lines
    assert "eldr_guarded_blocks_total 0.0" in lines
