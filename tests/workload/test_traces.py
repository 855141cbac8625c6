"""Expert traces survive a round trip, and everything malformed is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from eldr.workload.traces import ExpertTrace, TraceError, load


def arrays() -> dict[str, np.ndarray]:
    """A valid file: three requests of 4, 3 and 6 tokens, L = 2, E = 5, K = 2."""
    rng = np.random.default_rng(0)
    topk = np.argsort(rng.random((13, 2, 5)), axis=2)[:, :, :2].astype(np.uint8)
    return {
        "topk": topk,
        "offsets": np.array([0, 4, 7, 13], np.int64),
        "prompt_tokens": np.array([2, 0, 5], np.int32),
        "domain": np.array([1, 0, 1], np.uint8),
        "domains": np.array(["law", "code"]),
        "num_experts": np.int64(5),
    }


def write(path, **changes):
    content = {k: v for k, v in {**arrays(), **changes}.items() if v is not None}
    np.savez(path, **content)
    return path


def test_round_trip(tmp_path):
    trace = load(write(tmp_path / "a.npz", tokens=np.arange(13, dtype=np.uint16), model="m"))
    trace.save(tmp_path / "b.npz")
    again = load(tmp_path / "b.npz")
    for name in ("topk", "offsets", "prompt_tokens", "domain", "tokens"):
        np.testing.assert_array_equal(getattr(trace, name), getattr(again, name))
    assert (again.domains, again.num_experts, again.model) == (("law", "code"), 5, "m")
    assert str(again.geometry) == "2 layers x 5 experts, top-2"


def test_phases_are_marked_or_cut_at_two_thirds_and_counted_apart(tmp_path):
    trace = load(write(tmp_path / "a.npz"))
    assert trace.cuts.tolist() == [2, 6, 12]
    for i in range(3):
        a, b, c = trace.offsets[i], trace.cuts[i], trace.offsets[i + 1]
        for counts, rows in (
            (trace.prompt_counts, slice(a, b)),
            (trace.decode_counts, slice(b, c)),
        ):
            for layer in range(2):
                picks = trace.topk[rows, layer].ravel()
                assert counts[i, layer].tolist() == np.bincount(picks, minlength=5).tolist()


def test_select_keeps_the_requests_whole(tmp_path):
    trace = load(write(tmp_path / "a.npz"))
    part = trace.select([2, 0, 2])
    assert len(part) == 3
    np.testing.assert_array_equal(part.decode_counts, trace.decode_counts[[2, 0, 2]])
    with pytest.raises(TraceError, match="select"):
        trace.select([3])


BAD = {
    "missing": ({"topk": None}, "missing keys.*topk"),
    "unknown": ({"extra": np.zeros(1)}, "unknown keys.*extra"),
    "float topk": ({"topk": np.zeros((13, 2, 2), np.float32)}, "'topk'.*float32"),
    "flat topk": ({"topk": np.zeros((13, 4), np.uint8)}, "'topk'"),
    "no layers": ({"topk": np.zeros((13, 0, 2), np.uint8)}, "'topk'.*empty"),
    "id too large": ({"num_experts": np.int64(3)}, "'topk': expert 4"),
    "k above E": ({"num_experts": np.int64(1)}, "'num_experts'"),
    "picked twice": ({"topk": np.zeros((13, 2, 2), np.uint8)}, "same expert"),
    "short offsets": ({"offsets": np.array([0, 4, 7, 12], np.int64)}, "'offsets'.*13 rows"),
    "late offsets": ({"offsets": np.array([1, 4, 7, 13], np.int64)}, "'offsets'"),
    "back offsets": ({"offsets": np.array([0, 7, 4, 13], np.int64)}, "'offsets'.*request 1"),
    "one row": ({"offsets": np.array([0, 1, 7, 13], np.int64)}, "'offsets'.*request 0"),
    "no requests": ({"offsets": np.array([0], np.int64)}, "'offsets'"),
    "int32 offsets": ({"offsets": np.array([0, 4, 7, 13], np.int32)}, "'offsets'.*int32"),
    "whole prompt": ({"prompt_tokens": np.array([4, 0, 5], np.int32)}, "'prompt_tokens'"),
    "negative prompt": ({"prompt_tokens": np.array([-1, 0, 5], np.int32)}, "'prompt_tokens'"),
    "few prompts": ({"prompt_tokens": np.array([1], np.int32)}, "'prompt_tokens'"),
    "unknown domain": ({"domain": np.array([2, 0, 1], np.uint8)}, "'domain'"),
    "numeric names": ({"domains": np.array([1, 2])}, "'domains'"),
    "vector experts": ({"num_experts": np.array([5, 5])}, "'num_experts'"),
    "few tokens": ({"tokens": np.zeros(3, np.uint16)}, "'tokens'"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_files_name_the_key(tmp_path, name):
    changes, message = BAD[name]
    path = write(tmp_path / "a.npz", **changes)
    with pytest.raises(TraceError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_truncated_files_are_refused(tmp_path, share):
    whole = write(tmp_path / "a.npz").read_bytes()
    path = tmp_path / "cut.npz"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(TraceError):
        load(path)


def test_pickles_and_single_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **{**arrays(), "domains": np.array(["x", 1], object)})
    with pytest.raises(TraceError, match="'domains'"):
        load(tmp_path / "a.npz")
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(TraceError, match=r"not an \.npz"):
        load(tmp_path / "b.npy")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.npz")


def test_construction_checks_too():
    good = arrays()
    with pytest.raises(TraceError, match="'domain'"):
        ExpertTrace(
            good["topk"], good["offsets"], good["prompt_tokens"], good["domain"], ("law",), 5
        )
