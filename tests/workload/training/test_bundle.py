from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")

from eldr.workload import traces
from eldr.workload.tiny import TRACE_PATH
from eldr.workload.training.bundle import bundle, main


@pytest.fixture
def mixed():
    """The bundled trace with its second domain declared one that may not be shipped."""
    trace = traces.load(TRACE_PATH)
    names = list(trace.domains)
    names[1] = "code_cpp"
    return replace(trace, domains=tuple(names))


def test_only_shippable_domains_stay_with_their_requests(mixed):
    small = bundle(mixed, per_domain=5, seed=1)
    assert small.domains == tuple(d for d in mixed.domains if d != "code_cpp")
    assert np.bincount(small.domain).tolist() == [5] * 6
    prompts = {mixed.tokens[a:b].tobytes() for a, b in zip(mixed.offsets, mixed.cuts, strict=False)}
    for request in range(len(small)):
        rows = slice(small.offsets[request], small.cuts[request])
        assert small.tokens[rows].tobytes() in prompts
    assert np.array_equal(bundle(mixed, 5, seed=1).topk, small.topk)
    assert not np.array_equal(bundle(mixed, 5, seed=2).topk, small.topk)


def test_too_little_to_ship_is_an_error(mixed, tmp_path, capsys):
    mixed.save(tmp_path / "in.npz")
    argv = [str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    assert main([*argv, "--per-domain", "61"]) == 2
    assert "60 requests, need 61" in capsys.readouterr().err
    replace(mixed, domains=("a", "b", "c", "d", "e", "f", "g")).save(tmp_path / "in.npz")
    assert main(argv) == 2
    assert not (tmp_path / "out.npz").exists()
