"""The peer that counts on the host, and the benchmark's other peers: do they count the same?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import accumulate
from eldr.kernels import gather_signatures
from eldr.kernels.recipes import Shape
from profiling.gpu_check.host_capture import NAME, HostCapture


@pytest.mark.parametrize("experts", [60, 256, 512])
def test_counts_every_request(experts: int) -> None:
    rng = np.random.default_rng(experts)
    ids = rng.integers(0, experts, (30, 3, 4)).astype(np.int32)
    ids[0] = experts - 1
    tensor = torch.from_numpy(ids)
    capture = HostCapture(tensor, experts, [7, 0, 23])
    for _ in range(2):
        got = capture(tensor)
        for counts, part in zip(got, (ids[:7], ids[7:7], ids[7:]), strict=True):
            for layer in range(3):
                want = np.bincount(part[:, layer].ravel(), minlength=experts)
                np.testing.assert_array_equal(counts[layer], want)


def test_lengths_that_are_not_the_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths: \[1, 2\] do not add up to 4 tokens"):
        HostCapture(torch.zeros(4, 1, 1, dtype=torch.int32), 2, [1, 2])


def test_all_peers_of_the_benchmark_count_what_the_op_counts() -> None:
    step = accumulate.Step(Shape("small", 3, 20, 2, 16), 64, "cpu")
    step.ours()
    size = step.histograms.shape
    ours = step.histograms.int()
    for name, peer in step.torch_peers().items():
        assert torch.equal(peer().view(size).int(), ours), name  # type: ignore[attr-defined]
    in_order = ours[step.slots[:: step.shape.block_size] // step.shape.block_size]
    assert torch.equal(step.one_hot().int(), in_order)
    every = torch.arange(size[0], dtype=torch.int32)
    offsets = torch.tensor([0, size[0]], dtype=torch.int32)
    request = gather_signatures(step.histograms, every, offsets)[0].numpy()
    (counts,) = step.host_peer()[NAME]()  # type: ignore[misc]
    np.testing.assert_array_equal(counts, request)
    by_numpy = step.numpy_peers()["np.bincount per request"]()
    np.testing.assert_array_equal(np.asarray(by_numpy).reshape(request.shape), request)
