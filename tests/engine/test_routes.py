import asyncio
from types import SimpleNamespace

import pytest

fastapi = pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from eldr.engine import routes  # noqa: E402
from eldr.engine.config import EngineConfig  # noqa: E402


class Client:
    """vLLM's engine client: one answer per worker."""

    def __init__(self, answers):
        self.answers, self.calls = answers, []

    async def collective_rpc(self, method, timeout=None, args=()):
        self.calls.append((method, args))
        return self.answers[args[0]]


def get(path, client, times=1):
    return call("GET", path, client, times=times)


def call(method, path, client, times=1, admin=False, body=None):
    app = fastapi.FastAPI()
    routes.attach(app, EngineConfig("prefill", admin=admin))
    app.state.args = SimpleNamespace(model="path", served_model_name=["tiny"])
    app.state.engine_client = client

    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
            return [await http.request(method, path, content=body) for _ in range(times)][-1]

    return asyncio.run(ask())


def test_info_is_asked_once_and_comes_from_the_reporting_rank():
    client = Client({"info": [None, {"role": "prefill", "block_size": 32}]})
    answer = get("/eldr/info", client, times=3)
    assert answer.status_code == 200
    found = answer.json()
    assert (found["v"], found["model"], found["role"]) == (1, "tiny", "prefill")
    assert {"vllm", "series", "eldr"} <= set(found)
    assert client.calls == [("eldr", ("info",))]


def test_decode_is_asked_every_time():
    client = Client({"decode": [{"v": 1, "steps": 3}]})
    assert get("/eldr/decode", client, times=2).json() == {"v": 1, "steps": 3}
    assert len(client.calls) == 2


def test_a_role_without_decode_counters_answers_404_and_why():
    answer = get("/eldr/decode", Client({"decode": [None]}))
    assert answer.status_code == 404
    assert "role" in answer.json()["detail"]


def test_a_server_without_an_engine_answers_503():
    assert get("/eldr/info", None).status_code == 503


def test_metrics_have_closed_labels_and_every_counter():
    signatures = {"full": 5, "partial": 2, "none": 1, "guarded_blocks": 3}
    decode = {"steps": 7, "tokens": 20, "kv_tokens": 900, "seconds": 1.5, "distinct": [30, 40]}
    client = Client({"counters": [{"signatures": signatures, "decode": decode, "failed": 0}]})
    answer = get("/eldr/metrics", client)
    assert answer.headers["content-type"].startswith("text/plain")
    lines = {line for line in answer.text.splitlines() if not line.startswith("#")}
    assert {
        'eldr_signatures_total{coverage="full"} 5.0',
        'eldr_signatures_total{coverage="partial"} 2.0',
        'eldr_signatures_total{coverage="none"} 1.0',
        "eldr_guarded_blocks_total 3.0",
        "eldr_decode_steps_total 7.0",
        "eldr_decode_tokens_total 20.0",
        "eldr_decode_kv_tokens_total 900.0",
        "eldr_decode_seconds_total 1.5",
        'eldr_decode_distinct_experts_total{layer="1"} 40.0',
    } <= lines


def test_metrics_of_the_host_store():
    store = {"hits": 4, "misses": 3, "evictions": 2, "rows": 9, "bytes": 55296}
    counters = {"signatures": None, "decode": None, "store": store, "failed": 0}
    lines = set(get("/eldr/metrics", Client({"counters": [counters]})).text.splitlines())
    assert {
        "eldr_host_store_hits_total 4.0",
        "eldr_host_store_misses_total 3.0",
        "eldr_host_store_evictions_total 2.0",
        "eldr_host_store_rows 9.0",
        "eldr_host_store_bytes 55296.0",
    } <= lines


def test_the_window_is_passed_on():
    client = Client({"decode": [{"v": 1}]})
    get("/eldr/decode", client)
    get("/eldr/decode?window=true", client)
    assert client.calls == [("eldr", ("decode", False)), ("eldr", ("decode", True))]


def test_metrics_of_a_prefill_worker_have_no_decode_counters():
    signatures = dict.fromkeys(("full", "partial", "none", "guarded_blocks"), 0)
    answer = get(
        "/eldr/metrics",
        Client({"counters": [{"signatures": signatures, "decode": None, "failed": 1}]}),
    )
    assert "eldr_decode" not in answer.text
    assert "eldr_failed 1.0" in answer.text.splitlines()


def test_vectors_are_replaced_only_where_the_admin_route_is_on():
    client = Client({"load_vectors": [{"digest": "d", "kind": "centroids", "workers": 2}]})
    assert call("POST", "/eldr/vectors", client, body=b"file").status_code == 405
    answer = call("POST", "/eldr/vectors", client, admin=True, body=b"file")
    assert answer.json()["digest"] == "d"
    assert client.calls == [("eldr", ("load_vectors", b"file"))]


def test_a_refused_vectors_file_answers_400_and_why():
    client = Client({"load_vectors": [{"error": "vectors: made for geometry x"}]})
    answer = call("POST", "/eldr/vectors", client, admin=True, body=b"file")
    assert (answer.status_code, answer.json()["detail"]) == (400, "vectors: made for geometry x")


def test_another_series_in_vllm_is_named_with_the_remedy(monkeypatch, caplog):
    monkeypatch.setattr(routes, "installed_series", lambda: "0123")
    routes.attach(fastapi.FastAPI(), EngineConfig("prefill"))
    assert "holds patch series 0123" in caplog.text
    assert "eldr patch apply" in caplog.text


def test_the_shipped_series_is_not_remarked_on(monkeypatch, caplog):
    monkeypatch.setattr(routes, "installed_series", routes.shipped_series)
    routes.attach(fastapi.FastAPI(), EngineConfig("prefill"))
    assert caplog.text == ""
