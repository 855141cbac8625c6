"""The run-time compiled kernels without a GPU: cubins, and the launch plans run in emulation."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eldr.kernels import cuda_plan, nvrtc
from tests.kernels.cuda import emulation, oracle
from tests.kernels.cuda.steps import step_slots, top_k_ids

CHUNKS = ((0, 40), (5, 20), (16, 16))


def needs_nvrtc() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        nvrtc._nvrtc()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "symbol"),
    [
        ("eldr::accumulate<int32_t, uint8_t, 8, 16>", "accumulateIih"),
        ("eldr::decide<uint8_t, true, 1>", "decideIhLb1ELi1E"),
    ],
)
def test_compiles_to_machine_code_without_a_gpu(kernel: str, symbol: str, arch: int) -> None:
    needs_nvrtc()
    cubin, name = nvrtc.compile_cubin(kernel, arch)
    assert cubin[:4] == b"\x7fELF"
    assert symbol in name
    assert name.encode() in cubin


def test_a_source_that_does_not_compile_says_what_and_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_nvrtc()
    monkeypatch.setattr(nvrtc, "source", lambda: "__global__ void f() { undeclared = 1; }")
    with pytest.raises(RuntimeError, match=r"sm_90.*undeclared"):
        nvrtc.compile_cubin("f", 90)


def test_the_text_is_complete() -> None:
    text = nvrtc.source()
    assert not re.search(r'#include "', text)
    for name in nvrtc.FILES:
        for include in re.findall(r'#include "(.+)"', (nvrtc.folder() / name).read_text()):
            assert nvrtc.FILES.index(include) < nvrtc.FILES.index(name)


class Emulated:
    """Runs plans: one function per kernel instance, compiled for emulation."""

    def __init__(self, folder: Path, plans: list[cuda_plan.Plan]) -> None:
        kernels = sorted({plan.kernel for plan in plans})
        lines = ['#include "cuda/accumulate.cuh"', '#include "cuda/decide.cuh"']
        for i, kernel in enumerate(kernels):
            params = "AccumulateParams" if "accumulate" in kernel else "DecideParams"
            lines.append(
                f'extern "C" int run_{i}(const void* raw, int x, int y, int block) {{'
                f"  const auto p = *static_cast<const eldr::{params}*>(raw);"
                f"  emu::launch(dim3(x, y), dim3(block), [=] {{ {kernel}(p); }});"
                "  return cudaGetLastError(); }"
                f' extern "C" int size_{i}() {{ return sizeof(eldr::{params}); }}'
            )
        source = folder / "plans.cpp"
        source.write_text("\n".join(lines))
        library = emulation.build(folder / "plans.so", sources=(str(source),))
        self.device = emulation.Device(library)
        self.number = {kernel: i for i, kernel in enumerate(kernels)}

    def run(self, plan: cuda_plan.Plan) -> None:
        i, lib = self.number[plan.kernel], self.device.lib
        assert getattr(lib, f"size_{i}")() == plan.params.dtype.itemsize
        raw = ctypes.c_void_p(plan.params.ctypes.data)
        self.device.checked(getattr(lib, f"run_{i}")(raw, *plan.grid, plan.block))


ACCUMULATE_CASES: list[tuple[type, type, int, int, int]] = [
    # ids, rows, experts, top_k, block_size: every width of loads and of bins
    (np.int32, np.uint8, 128, 8, 16),
    (np.int32, np.uint8, 60, 6, 16),
    (np.uint8, np.uint8, 62, 8, 64),
    (np.uint16, np.uint16, 256, 8, 256),
    (np.int64, np.uint8, 128, 4, 16),
]


def accumulate_case(case: tuple[type, type, int, int, int]) -> tuple[Any, ...]:
    id_dtype, row, experts, top_k, block_size = case
    rng = np.random.default_rng(experts)
    slots = step_slots(rng, block_size, 9, CHUNKS)
    ids = top_k_ids(rng, len(slots), 3, top_k, experts, id_dtype)
    rows = rng.integers(0, 100, (9, 3, experts)).astype(row)
    tensors = torch.from_numpy(ids), torch.from_numpy(slots), torch.from_numpy(rows)
    return ids, slots, rows, tensors


def decide_arguments(row: type, requests: int, workers: int, cells: int) -> dict[str, Any]:
    rng = np.random.default_rng(cells)
    arrays = {
        "histograms": rng.integers(0, 17, (20, 1, cells)).astype(row),
        "block_ids": rng.integers(-1, 21, requests * 5).astype(np.int32),
        "offsets": np.arange(0, requests * 5 + 1, 5).astype(np.int32),
        "vectors": rng.random((workers, cells)).astype(np.float32),
        "squares": rng.random(cells).astype(np.float32),
        "cost": np.ones(requests, np.int32),
        "scores": np.zeros((requests, workers), np.float32),
        "load": np.zeros(workers, np.int32),
        "chosen": np.zeros(requests, np.int32),
    }
    size = cuda_plan.decide_workspace(requests, cells, workers)
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    absent = dict.fromkeys(("prior", "tokens", "request_kv", "counts", "state"))
    return (
        given
        | absent
        | {"shrinkage": 0.0, "rule": 2, "coefficients": [0.5]}
        | {"workspace": torch.zeros(size, dtype=torch.uint8)}
    )


DECIDE_CASES: list[tuple[type, int, int, int]] = [
    (np.uint8, 3, 4, 640),
    (np.uint16, 3, 4, 640),
    (np.uint8, 5, 3, 333),
    (np.uint8, 45, 2, 12288),  # groups of requests
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if reason := emulation.why_not():
        pytest.skip(reason)
    plans = []
    for accumulate in ACCUMULATE_CASES:
        *tensors, rows = accumulate_case(accumulate)[3]
        plans.append(cuda_plan.accumulate(*tensors, accumulate[4], rows))
    plans += [cuda_plan.decide(**decide_arguments(*case)) for case in DECIDE_CASES]
    assert None not in plans
    return Emulated(tmp_path_factory.mktemp("plans"), [plan for plan in plans if plan])


@pytest.mark.parametrize("case", ACCUMULATE_CASES, ids=str)
def test_accumulate_plan(emulated: Emulated, case: tuple[type, type, int, int, int]) -> None:
    ids, slots, rows, (id_tensor, slot_tensor, row_tensor) = accumulate_case(case)
    expected = oracle.accumulate(ids, slots, rows, case[4])
    plan = cuda_plan.accumulate(id_tensor, slot_tensor, case[4], row_tensor)
    assert plan is not None
    emulated.run(plan)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("case", DECIDE_CASES, ids=str)
def test_decide_plan(emulated: Emulated, case: tuple[type, int, int, int]) -> None:
    given = decide_arguments(*case)
    emulated.run(cuda_plan.decide(**given))
    rows, ids, offsets, vectors, squares = (
        given[name].numpy() for name in ("histograms", "block_ids", "offsets", "vectors", "squares")
    )
    counts = oracle.gather(rows, ids, offsets)
    reference = oracle.scores(counts, vectors, squares=squares)
    np.testing.assert_allclose(given["scores"].numpy(), reference, rtol=3e-6)
    zero = np.zeros(case[2], np.int32)
    rule = oracle.Assignment(2, zero, np.ones(case[1], np.int32), tau=0.5)
    np.testing.assert_array_equal(given["chosen"].numpy(), rule.run(given["scores"].numpy()))


def test_what_there_is_no_kernel_for() -> None:
    slots = torch.zeros(1, dtype=torch.int64)
    rows = torch.zeros(1, 1, 513, dtype=torch.uint8)
    ids = torch.zeros(1, 1, 8, dtype=torch.int32)
    assert cuda_plan.accumulate(ids, slots, 16, rows) is None
    assert cuda_plan.accumulate(ids, slots, 2**14, rows[:, :, :8]) is None
    assert cuda_plan.decide_workspace(1, 16, 1025) == 0
    assert cuda_plan.decide_workspace(1025, 16, 2) == 0


def test_workspace_is_what_the_built_extension_asks_for(emulated: Emulated, tmp_path: Path) -> None:
    built = emulation.Device(
        emulation.build(tmp_path / "d.so", sources=("cuda/decide.cu",), flags=("-O0", "-shared"))
    )
    for shape in ((1, 6144, 16), (256, 14848, 1024), (7, 60, 3), (1025, 1, 1), (1, 2**25, 1)):
        assert built.lib.eldr_cuda_decide_workspace(*shape) == cuda_plan.decide_workspace(*shape)
