"""Traces from engine answers: phases, dense layers, labels, and what is refused."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from eldr.workload.assemble import RoutedRequest, assemble, decode_routed_experts
from eldr.workload.traces import TraceError, load


def routed(tokens, seed, layers=3, experts=12, k=2):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :k].astype(np.int16)


def test_requests_become_one_trace(tmp_path):
    a, b = routed(7, 0), routed(5, 1)
    requests = [
        RoutedRequest(a, 4, "law", np.arange(7, dtype=np.uint32)),
        RoutedRequest(b, 3, "", np.arange(5, dtype=np.uint32)),
    ]
    trace = assemble(requests, 12, "m")
    trace.save(tmp_path / "t.npz")
    again = load(tmp_path / "t.npz")
    assert again.cuts.tolist() == [4, 10]
    assert again.domains == ("law", "unlabelled")
    np.testing.assert_array_equal(again.topk[7:], b)
    assert again.tokens is not None
    assert again.tokens.tolist() == [*range(7), *range(5)]


def test_dense_layers_are_left_out():
    topk = routed(6, 0)
    topk[:, 0] = 0
    trace = assemble([RoutedRequest(topk, 4)], 12)
    assert trace.geometry.layers == 2
    np.testing.assert_array_equal(trace.topk, topk[:, 1:])


def test_more_than_256_experts_take_two_bytes():
    trace = assemble([RoutedRequest(routed(6, 0, experts=400), 4)], 400)
    assert trace.topk.dtype == np.uint16


def test_refusals():
    with pytest.raises(TraceError, match="no request"):
        assemble([], 12)
    with pytest.raises(TraceError, match="differ"):
        assemble([RoutedRequest(routed(6, 0), 4), RoutedRequest(routed(6, 0, k=3), 4)], 12)
    with pytest.raises(TraceError, match="has 4"):
        assemble([RoutedRequest(routed(6, 0), 4)], 4)
    with pytest.raises(TraceError, match="prompt_tokens"):
        assemble([RoutedRequest(routed(6, 0), 6)], 12)


def test_vllms_form():
    buffer = io.BytesIO()
    np.save(buffer, routed(4, 0))
    text = base64.b64encode(buffer.getvalue()).decode()
    np.testing.assert_array_equal(decode_routed_experts(text), routed(4, 0))
    flat = io.BytesIO()
    np.save(flat, np.zeros(3))
    for bad in ("?", text[:40], base64.b64encode(flat.getvalue()).decode()):
        with pytest.raises(TraceError, match="routed_experts"):
            decode_routed_experts(bad)
