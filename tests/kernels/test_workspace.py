"""Scratch memory: kept per stream, grown, never shared with a graph that is being captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eldr.kernels import workspace

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for torch.cuda's stream state; the memory itself is the CPU's."""
    state = SimpleNamespace(stream=7, capturing=False)
    monkeypatch.setattr(workspace, "_kept", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    current = lambda device: SimpleNamespace(device_index=0, cuda_stream=state.stream)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    return state


def test_the_same_memory_serves_a_stream_until_more_is_needed(cuda: SimpleNamespace) -> None:
    first = workspace.zeroed(CPU, 1000)
    assert first.numel() >= 1000
    assert int(first.sum()) == 0
    first[0] = 1  # what the last call left
    assert workspace.zeroed(CPU, 900) is first
    larger = workspace.zeroed(CPU, first.numel() + 1)
    assert larger.numel() > first.numel()
    assert int(larger.sum()) == 0
    assert workspace.zeroed(CPU, 1) is larger


def test_streams_do_not_share(cuda: SimpleNamespace) -> None:
    first = workspace.zeroed(CPU, 64)
    cuda.stream = 8
    assert workspace.zeroed(CPU, 64) is not first


def test_a_captured_graph_gets_memory_of_its_own_and_leaves_none_behind(
    cuda: SimpleNamespace,
) -> None:
    kept = workspace.zeroed(CPU, 64)
    cuda.capturing = True
    captured = workspace.zeroed(CPU, 64)
    assert captured is not kept
    assert workspace.zeroed(CPU, 64) is not captured
    cuda.capturing = False
    assert workspace.zeroed(CPU, 64) is kept
