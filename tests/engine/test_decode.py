import pytest

torch = pytest.importorskip("torch")

from eldr.engine.decode import DecodeCounters  # noqa: E402
from eldr.engine.step import StepMetadata  # noqa: E402
from eldr.geometry import Geometry  # noqa: E402

GEOMETRY = Geometry(3, 16, 4)


def routed(tokens, generator):
    scores = torch.rand(tokens, GEOMETRY.layers, GEOMETRY.experts, generator=generator)
    return scores.topk(GEOMETRY.top_k, dim=-1).indices.int()


def test_counts_equal_a_plain_recount():
    generator = torch.Generator().manual_seed(3)
    counters = DecodeCounters(GEOMETRY, torch.device("cpu"))
    use = [[0] * GEOMETRY.experts for _ in range(GEOMETRY.layers)]
    sizes = [1, 7, 2, 30]
    for tokens in sizes:
        ids = routed(tokens, generator)
        counters.count(ids, StepMetadata(decode=True, requests=tokens, kv_tokens=10 * tokens))
        for layer in range(GEOMETRY.layers):
            for expert in set(ids[:, layer].flatten().tolist()):
                use[layer][expert] += 1
    found = counters.snapshot()
    assert found["use"] == use
    assert found["distinct"] == [sum(row) for row in use]
    assert (found["steps"], found["tokens"], found["kv_tokens"]) == (4, sum(sizes), 10 * sum(sizes))
    assert found["geometry"] == GEOMETRY.digest


def test_ids_may_be_a_view_of_a_larger_buffer():
    buffer = torch.full((9, GEOMETRY.layers, GEOMETRY.top_k), 5, dtype=torch.int32)
    buffer[0] = torch.arange(GEOMETRY.top_k)
    counters = DecodeCounters(GEOMETRY, torch.device("cpu"))
    counters.count(buffer[:1], StepMetadata(decode=True, requests=1))
    assert counters.snapshot()["distinct"] == [4, 4, 4]


def test_time_counts_overlap_once_and_idleness_never():
    counters = DecodeCounters(GEOMETRY, torch.device("cpu"))
    counters.ended(started=10.0, ended=11.0)
    counters.ended(started=10.5, ended=12.5)  # scheduled while the first one ran
    counters.ended(started=20.0, ended=20.25)  # after an idle while
    assert counters.snapshot()["seconds"] == pytest.approx(1.0 + 1.5 + 0.25)


def test_reads_are_also_kept_by_batch_size() -> None:
    counters = DecodeCounters(GEOMETRY, torch.device("cpu"))
    for requests in (1, 3, 3):
        ids = torch.arange(requests, dtype=torch.int32)[:, None, None]
        ids = ids.expand(-1, GEOMETRY.layers, 1).contiguous()
        counters.count(ids, StepMetadata(decode=True, requests=requests))
    by_batch = counters.snapshot()["by_batch"]
    assert by_batch == {"1": [1, GEOMETRY.layers], "3": [2, 2 * 3 * GEOMETRY.layers]}
    assert sum(reads for _, reads in by_batch.values()) == sum(counters.snapshot()["distinct"])
