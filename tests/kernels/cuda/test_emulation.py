"""The emulation itself: layout of the argument structures, CUDA's rules, and AddressSanitizer."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cuda import emulation
from tests.kernels.cuda.emulation import Device

STRUCTURES = {
    "eldr_accumulate_args": emulation.AccumulateArgs,
    "eldr_gather_args": emulation.GatherArgs,
    "eldr_score_args": emulation.ScoreArgs,
    "eldr_assign_args": emulation.AssignArgs,
    "eldr_decide_args": emulation.DecideArgs,
}

PROBES = """
#include "cuda/common.cuh"
__global__ void shared_is_not_zero(unsigned* out) {
  ELDR_SHARED(unsigned, memory, 4);
  if (threadIdx.x == 0) out[blockIdx.x] = memory[3];
}
__global__ void barrier_in_a_branch() { if (threadIdx.x < 7) __syncthreads(); __syncwarp(); }
__global__ void not_in_its_mask() { __syncwarp(0xfffffffeu); }
__global__ void two_masks() { __ballot_sync(threadIdx.x == 3 ? 0xffffu : eldr::kFull, true); }
__global__ void two_operations() { if (threadIdx.x & 1) __syncwarp(); else __ballot_sync(eldr::kFull, true); }
__global__ void lane_that_left() { if (threadIdx.x == 5) return; __syncwarp(); }
__global__ void count(unsigned* out) { atomicAdd(out, 1u); }
__global__ void shuffles(int* out) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_sync(eldr::kFull, lane * 10, 7) + __shfl_xor_sync(eldr::kFull, lane, 1);
}
#define RUN(kernel, grid, block, ...) \\
  extern "C" int run_##kernel(void* out) { (void)out; ELDR_LAUNCH((kernel), dim3(grid), dim3(block), nullptr, ##__VA_ARGS__); return cudaGetLastError(); }
RUN(shared_is_not_zero, 9, 32, static_cast<unsigned*>(out))
RUN(barrier_in_a_branch, 1, 32)
RUN(not_in_its_mask, 1, 32)
RUN(two_masks, 1, 32)
RUN(two_operations, 1, 32)
RUN(lane_that_left, 1, 32)
RUN(count, 50, 96, static_cast<unsigned*>(out))
RUN(shuffles, 1, 32, static_cast<int*>(out))
"""  # noqa: E501 - C++


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Device:
    if reason := emulation.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("probes")
    (folder / "probes.cpp").write_text(PROBES)
    source = str(folder / "probes.cpp")
    return Device(emulation.build(folder / "probes.so", sources=(source,)))


def run(probes: Device, name: str, out: np.ndarray | None = None) -> None:
    probes.reset(seed=5)
    pointer = ctypes.c_void_p(emulation.pointer(out))
    probes.checked(getattr(probes.lib, f"run_{name}")(pointer))


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("barrier_in_a_branch", "never reach"),
        ("not_in_its_mask", "not in the mask"),
        ("two_masks", "different masks"),
        ("two_operations", "different collectives"),
        ("lane_that_left", "never reach"),
    ],
)
def test_broken_rules_end_the_launch_with_a_message(probes: Device, kernel: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        run(probes, kernel)


def test_a_launch_after_a_failed_one_works(probes: Device) -> None:
    with pytest.raises(RuntimeError):
        run(probes, "lane_that_left")
    out = np.zeros(1, np.uint32)
    run(probes, "count", out)
    assert out[0] == 50 * 96


def test_shared_memory_is_filled_with_a_pattern_in_every_block(probes: Device) -> None:
    out = np.zeros(9, np.uint32)
    run(probes, "shared_is_not_zero", out)
    assert (out == 0xA5A5A5A5).all()


def test_shuffles(probes: Device) -> None:
    out = np.zeros(32, np.int32)
    run(probes, "shuffles", out)
    assert (out == 70 + (np.arange(32) ^ 1)).all()


def test_layout(tmp_path: Path) -> None:
    if reason := emulation.why_not():
        pytest.skip(reason)
    lines = ['#include <stdio.h>\n#include "eldr_launch.h"\nint main() {']
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in structure._fields_:
            text = f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));'
            lines.append(text)
    (tmp_path / "layout.cpp").write_text("\n".join([*lines, "}"]))
    command = ["g++", f"-I{emulation.CSRC}", "layout.cpp", "-o", "layout"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True)
    expected = []
    for name, structure in STRUCTURES.items():
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field in structure._fields_:
            expected.append(f"{name}.{field[0]} {getattr(structure, field[0]).offset}")
    assert printed.stdout.split("\n")[:-1] == expected


def sanitized(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if reason := emulation.why_not():
        pytest.skip(reason)
    main = Path(__file__).with_name("asan_main.cpp")
    try:
        program = emulation.build(
            tmp_path / "asan",
            sources=(str(main), "cuda/accumulate.cu", "cuda/decide.cu"),
            flags=("-O0", "-g", "-fsanitize=address", "-fno-omit-frame-pointer"),
        )
    except RuntimeError as error:
        if "asan" in str(error):
            pytest.skip(f"this g++ has no AddressSanitizer: {str(error)[-200:]}")
        raise
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    environment.pop("LD_PRELOAD", None)
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_no_kernel_touches_memory_that_is_not_its_own(tmp_path: Path) -> None:
    done = sanitized(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "accumulate 0\ndecide 0\n"
    # The same program finds a row that is one element too short.
    short = subprocess.run(
        [tmp_path / "asan", "short"], capture_output=True, text=True, check=False,
        env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"},
    )  # fmt: skip
    assert short.returncode != 0
    assert "heap-buffer-overflow" in short.stderr
