import pytest

torch = pytest.importorskip("torch")

from eldr.engine import decode  # noqa: E402
from eldr.engine.decode import DecodeCounters  # noqa: E402
from eldr.engine.ids import CopiedIds, ReferredIds  # noqa: E402
from eldr.engine.step import StepMetadata  # noqa: E402
from eldr.geometry import Geometry  # noqa: E402

GEOMETRY = Geometry(3, 16, 4)
ROWS = 64


def copied(experts=GEOMETRY.experts):
    return CopiedIds(ROWS, GEOMETRY.layers, GEOMETRY.top_k, experts, torch.device("cpu"))


def referred():
    return ReferredIds(GEOMETRY.layers)


def counters(ids, **settings):
    return DecodeCounters(GEOMETRY, torch.device("cpu"), ids, **settings)


def step(found, ids, requests=None, kv_tokens=0):
    """One decode step in which the layers route to ids [T, L, K]."""
    for layer in range(GEOMETRY.layers):
        found._ids.store(layer, ids[:, layer].contiguous())
    requests = len(ids) if requests is None else requests
    found.count(len(ids), StepMetadata(decode=True, requests=requests, kv_tokens=kv_tokens))


def routed(tokens, generator):
    scores = torch.rand(tokens, GEOMETRY.layers, GEOMETRY.experts, generator=generator)
    return scores.topk(GEOMETRY.top_k, dim=-1).indices.int()


def recount(steps):
    use = [[0] * GEOMETRY.experts for _ in range(GEOMETRY.layers)]
    for ids in steps:
        for layer in range(GEOMETRY.layers):
            for expert in set(ids[:, layer].flatten().tolist()):
                use[layer][expert] += 1
    return use


@pytest.mark.parametrize("keep", [copied, referred])
def test_counts_equal_a_plain_recount(keep):
    """More steps than are kept at once, more tokens than fit, and questions in between."""
    generator = torch.Generator().manual_seed(3)
    found = counters(keep())
    sizes = [1, 7, 2, 30, 64] + [3] * (2 * decode._STEPS_KEPT) + [40, 40]
    steps = []
    for tokens in sizes:
        steps.append(routed(tokens, generator))
        step(found, steps[-1], kv_tokens=10 * tokens)
        if tokens in (2, 64):
            assert found.snapshot()["use"] == recount(steps)
    said = found.snapshot()
    assert said["use"] == recount(steps)
    assert said["distinct"] == [sum(row) for row in said["use"]]
    tokens = sum(sizes)
    assert (said["steps"], said["tokens"], said["kv_tokens"]) == (len(sizes), tokens, 10 * tokens)
    assert said["geometry"] == GEOMETRY.digest
    assert "window" not in said


@pytest.mark.parametrize("keep", [copied, referred])
def test_the_window_moves_on_and_its_sums_are_those_of_its_steps(keep):
    generator = torch.Generator().manual_seed(5)
    found = counters(keep(), window=10)
    steps = []
    for index in range(57):
        steps.append(routed(1 + index % 4, generator))
        step(found, steps[-1], kv_tokens=index)
        window = found.snapshot(window=True)["window"]
        recent = steps[-window["steps"] :]
        assert window["steps"] == index + 1 if index < 19 else 10 <= window["steps"] < 20
        assert window["use"] == recount(recent)
        assert window["distinct"] == [sum(row) for row in window["use"]]
        assert window["tokens"] == sum(map(len, recent))
        assert window["kv_tokens"] == sum(range(index + 1 - len(recent), index + 1))


def test_rows_of_padding_are_cut_off_when_the_routers_tensors_are_referred_to():
    found, generator = counters(referred()), torch.Generator().manual_seed(7)
    steps = [routed(tokens, generator) for tokens in (3, 5, 2)]
    for ids, padding in zip(steps, (0, 3, 1), strict=True):
        padded = torch.cat([ids, torch.full((padding, *ids.shape[1:]), 9, dtype=torch.int32)])
        for layer in range(GEOMETRY.layers):
            found._ids.store(layer, padded[:, layer])
        found.count(len(ids), StepMetadata(decode=True, requests=len(ids)))
    assert found.snapshot()["use"] == recount(steps)


@pytest.mark.parametrize("experts", [16, 256])
def test_padding_is_no_expert(experts):
    found = DecodeCounters(
        Geometry(GEOMETRY.layers, experts, GEOMETRY.top_k), torch.device("cpu"), copied(experts)
    )
    ids = torch.full((5, GEOMETRY.layers, GEOMETRY.top_k), -1, dtype=torch.int32)
    ids[0] = torch.arange(GEOMETRY.top_k)
    step(found, ids, requests=1)
    assert found.snapshot()["distinct"] == [GEOMETRY.top_k] * GEOMETRY.layers


def test_time_counts_overlap_once_and_idleness_never():
    found = counters(copied())
    found.ended(started=10.0, ended=11.0)
    found.ended(started=10.5, ended=12.5)  # scheduled while the first one ran
    found.ended(started=20.0, ended=20.25)  # after an idle while
    assert found.snapshot()["seconds"] == pytest.approx(1.0 + 1.5 + 0.25)


def test_reads_are_also_kept_by_batch_size() -> None:
    found = counters(copied())
    for requests in (1, 3, 3):
        ids = torch.arange(requests, dtype=torch.int32)[:, None, None]
        ids = ids.expand(-1, GEOMETRY.layers, GEOMETRY.top_k).contiguous()
        step(found, ids)
    by_batch = found.snapshot()["by_batch"]
    assert by_batch == {"1": [1, GEOMETRY.layers], "3": [2, 2 * 3 * GEOMETRY.layers]}
    assert sum(reads for _, reads in by_batch.values()) == sum(found.snapshot()["distinct"])
