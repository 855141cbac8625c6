"""What torch.compile and a device see of the ops: whole graphs, and launchers that read no data."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eldr.kernels import (
    Assignment,
    Centroids,
    LocalityBand,
    Survival,
    accumulate_hits,
    backend,
    decide,
    gather_signatures,
    score,
)


def step(device: str) -> dict[str, torch.Tensor]:
    """A step's tensors; the device's launchers get fake ones."""
    return {
        "ids": torch.ones(5, 2, 2, dtype=torch.int32, device=device),
        "slots": torch.arange(5, device=device),
        "histograms": torch.zeros(3, 2, 4, dtype=torch.uint8, device=device),
        "block_ids": torch.zeros(1, dtype=torch.int32, device=device),
        "offsets": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "vectors": torch.ones(3, 8, device=device),
        "load": torch.zeros(3, dtype=torch.int32, device=device),
        "cost": torch.ones(1, dtype=torch.int32, device=device),
    }


def test_torch_compile_keeps_the_op_in_one_graph():
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(ids, slots, histograms):
        torch.ops.eldr.accumulate_hits(ids + 1, slots, 16, histograms)
        return histograms.int() * 2

    t = step("cpu")
    got = compiled(t["ids"], t["slots"], t["histograms"])
    assert len(graphs) == 1
    assert any("accumulate_hits" in str(target) for target in graphs[0])
    want = torch.zeros(3, 2, 4, dtype=torch.uint8)
    accumulate_hits(t["ids"] + 1, t["slots"], 16, want)
    assert torch.equal(got, want.int() * 2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torch_compile_keeps_a_whole_step_of_launchers_in_one_graph(device):
    """Meta tensors stand for a device's: the launchers take them the same way."""
    t = step(device)
    scorer = Centroids(t.pop("vectors"), torch.ones(8, device=device))

    def run(ids, slots, histograms, block_ids, offsets, load, cost):
        accumulate_hits(ids, slots, 16, histograms)
        counts = gather_signatures(histograms, block_ids, offsets)
        rule = Assignment(LocalityBand(0.1), load, cost)
        done = decide(histograms, block_ids, offsets, scorer, assignment=rule)
        return counts * 2, score(counts, scorer), done.scores, done.chosen

    plain = run(**{name: tensor.clone() for name, tensor in t.items()})
    got = torch.compile(run, backend="eager", fullgraph=True)(**t)
    for ours, theirs in zip(got, plain, strict=True):
        assert ours.shape == theirs.shape
        assert device == "meta" or torch.equal(ours, theirs)


@pytest.mark.skipif(not backend.have("cpp"), reason="eldr._C was not built; it is what refuses")
def test_compiled_code_refuses_what_would_lead_out_of_bounds():
    t = step("cpu")
    compiled = torch.compile(accumulate_hits, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="slot_mapping: slot 48 of token 0 is not in"):
        compiled(t["ids"], t["slots"] + 48, 16, t["histograms"])


@pytest.mark.parametrize("kind", ["centroids", "survival"])
def test_launchers_read_no_data_of_device_tensors(kind):
    """Fake tensors of a CUDA device have none: reading, that is synchronising, would raise."""
    with FakeTensorMode():
        t = step("cuda")
        accumulate_hits(t["ids"], t["slots"], 16, t["histograms"])
        blocks = t["histograms"], t["block_ids"], t["offsets"]
        counts = gather_signatures(*blocks)
        if kind == "centroids":
            scorer, tokens = Centroids(t["vectors"], torch.ones(8, device="cuda")), None
        else:
            scorer, tokens = Survival(t["vectors"], torch.ones(3, device="cuda"), 1.0), t["cost"]
        assert score(counts, scorer, tokens=tokens).shape == (1, 3)
        rule = Assignment(LocalityBand(0.1), t["load"], t["cost"])
        done = decide(*blocks, scorer, tokens=tokens, assignment=rule)
        assert done.chosen.device.type == "cuda"
        with pytest.raises(RuntimeError):  # the same tensors notice it when something does read
            bool(t["load"].any())
