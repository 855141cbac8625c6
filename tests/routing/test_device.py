"""The device router chooses as the fleet does, and returns exactly to its start."""

import numpy as np
import pytest

from eldr.routing import Fleet, StepCost, Worker, fit_partition, lengths, make_policy
from tests.routing.helpers import SMALL, recorded, request, signatures

torch = pytest.importorskip("torch")
from eldr.routing import DeviceRouter  # noqa: E402

NAMES = [f"d{i}" for i in range(5)]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


def pair(policy, device):
    """A fleet and a device router with the same rule."""
    workers = [Worker(name) for name in NAMES]
    if policy == "locality_band":
        partition = fit_partition(recorded(40), NAMES)
        options = {"partition": partition, "tau": 0.2}
    else:
        options = {"cost": StepCost(1e-3, 2e-5, 1e-9, 1e-6), "guard": 0.5}
    fleet = Fleet(make_policy(policy, **options), workers, geometry=SMALL)
    router = DeviceRouter(SMALL, [1.0] * 5, capacity=64, device=device, **options)
    return fleet, router


def tensors(batch, slots, device):
    counts = torch.from_numpy(np.stack([s.counts.astype(np.int32) for s in batch])).to(device)
    tokens = torch.tensor([s.tokens for s in batch], device=device)
    return counts, tokens, torch.tensor(slots, device=device), tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["marginal_cost", "locality_band"])
def test_same_choices_as_the_fleet(policy, device):
    fleet, router = pair(policy, device)
    made = signatures(120)[0]
    rng = np.random.default_rng(0)
    free, running = list(range(64)), {}
    for start in range(0, len(made), 4):
        batch = made[start : start + 4]
        slots = [free.pop() for _ in batch]
        got = router.route(*tensors(batch, slots, device)).tolist()
        for i, (signature, slot) in enumerate(zip(batch, slots, strict=True)):
            decision = fleet.reserve(request(start + i, signature))
            assert decision.worker.name == NAMES[got[i]], (start, i)
            running[f"r{start + i}"] = slot
        for name in list(running):
            if rng.random() < 0.15 or len(free) < 4:
                slot = running.pop(name)
                fleet.release(name)
                router.release(torch.tensor([slot, -1], device=device))
                free.append(slot)
    table = fleet._table
    assert router.requests.tolist() == table.requests.tolist()
    assert router.kv_tokens.tolist() == table.kv_tokens.tolist()
    np.testing.assert_array_equal(router.load.cpu().numpy(), table.experts.load)
    np.testing.assert_array_equal(router.survival.cpu().numpy(), table.experts.survival)
    router.release(torch.tensor(list(running.values()), device=device))
    assert not router.load.any()
    assert not router.requests.any()
    assert not router.kv_tokens.any()
    assert (router.survival == 255).all()


@pytest.mark.parametrize("device", DEVICES)
def test_predicted_lengths_weigh_as_in_the_fleet(device, monkeypatch):
    monkeypatch.setattr(lengths, "WINDOW", 50)  # old ones fade during the test
    fleet, router = pair("marginal_cost", device)
    _, blind = pair("marginal_cost", device)
    rng, differ = np.random.default_rng(2), 0
    for start in range(0, 160, 4):
        batch = signatures(4, seed=start)[0]
        new = rng.choice([-3, 0, 1, 40, 300, 5000], 4)
        slots = [start % 64 + i for i in range(4)]
        args = tensors(batch, slots, device)
        if start >= 64:
            for one in (router, blind):
                one.release(args[2])
            for i in range(4):
                fleet.release(f"r{start - 64 + i}")
        got = router.route(*args, torch.tensor(new, device=device)).tolist()
        differ += got != blind.route(*args).tolist()
        for i, signature in enumerate(batch):
            known = None if new[i] < 0 else int(new[i])
            decision = fleet.reserve(request(start + i, signature, new_tokens=known))
            assert decision.worker.name == NAMES[got[i]], (start, i)
    assert differ  # the lengths decided something
    held = fleet._table.lengths
    assert (int(router._length_sum), int(router._length_count)) == (held._sum, held._count)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_empty_rows_and_closed_workers(device):
    _, router = pair("marginal_cost", device)
    router.open[0] = False
    batch = signatures(3)[0]
    counts, tokens, _, kv = tensors(batch, [0, 1, 2], device)
    counts[1] = 0
    slots = torch.tensor([0, 1, -1], device=device)
    workers = router.route(counts, tokens, slots, kv).tolist()
    assert workers[2] == -1
    assert 0 not in workers[:2]
    assert int(router.requests.sum()) == 2
    router.release(torch.tensor([5, 0, 1, 1], device=device))
    assert not router.requests.any()
    assert not router.load.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_graph_routes_like_eager_code():
    _, eager = pair("marginal_cost", "cuda")
    _, captured = pair("marginal_cost", "cuda")
    new = torch.tensor([-1, 20, 100, 900], device="cuda")
    static = [t.clone() for t in (*tensors(signatures(4)[0], [-1] * 4, "cuda"), new)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured.route(*static)  # padding: warms up without a trace
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.route(*static)
    for step in range(6):
        slots = list(range(4 * step, 4 * step + 4))
        fresh = [*tensors(signatures(4, seed=step)[0], slots, "cuda"), new.roll(step)]
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        graph.replay()
        assert out.tolist() == eager.route(*fresh).tolist()


def test_bad_fleets_are_refused():
    with pytest.raises(ValueError, match="workers"):
        DeviceRouter(SMALL, [])
    with pytest.raises(ValueError, match="partition of 5"):
        DeviceRouter(SMALL, [1.0], partition=fit_partition(recorded(20), NAMES))
