"""The CUDA sources compiled at run time, through CuPy, where eldr._C was built without CUDA.

NVRTC needs neither nvcc nor a host compiler. An instance is compiled when a shape first asks for it
(seconds) and kept in CuPy's cache on disk.

Nothing is copied. Arrays of other libraries, CuPy's among them, become tensors by DLPack where they
enter, in the launchers (`eldr.kernels.arrays`). From here to CuPy no array object is made: a kernel
takes one structure by value that holds up to 17 addresses besides strides and sizes, exactly as the
built extension passes it, so that the same sources serve both. CuPy arrays over the tensors would
cost an exchange per tensor and launch, only to be unpacked into the same addresses again. The
order of streams, which DLPack's exchange would see to, needs no care: the launch is put on torch's
current stream, where torch's allocator knows the tensors to be in use.
"""

from __future__ import annotations

import functools
import importlib
import logging
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eldr.kernels import cuda_plan, workspace
from eldr.kernels.backend import UNSUPPORTED

_log = logging.getLogger(__name__)

# In the order in which they include each other.
FILES = (
    "common.cuh",
    "accumulate.cuh",
    "decide_params.cuh",
    "gather.cuh",
    "score.cuh",
    "assign.cuh",
    "decide.cuh",
)
OPTIONS = ("-std=c++17",)


def folder() -> Path:
    """Where the CUDA sources lie: in the installed package, or in the checkout's csrc/cuda.

    Raises:
        FileNotFoundError: in neither.
    """
    here = Path(__file__).resolve()
    candidates = (here.parent / "cuda_sources", here.parents[2] / "csrc" / "cuda")
    for candidate in candidates:
        if (candidate / FILES[0]).exists():
            return candidate
    places = " or ".join(map(str, candidates))
    raise FileNotFoundError(f"the CUDA sources are not in {places}: reinstall eldr")


@functools.cache
def source() -> str:
    """All device code as one text: CuPy's cache is keyed by text and would not see an include."""
    lines = []
    for name in FILES:
        for line in (folder() / name).read_text(encoding="utf-8").splitlines():
            if not line.startswith(("#pragma once", '#include "')):
                lines.append(line)
    return "\n".join(lines) + "\n"


def compile_cubin(kernel: str, arch: int) -> tuple[bytes, str]:
    """Machine code of one instance for compute capability `arch` (90 = 9.0); needs no GPU.

    Returns:
        The cubin and the instance's symbol in it.

    Raises:
        ImportError: without CuPy or without NVRTC.
        RuntimeError: the sources do not compile; with the compiler's messages.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source(), "eldr.cu", (), ())
    try:
        nvrtc.addNameExpression(program, kernel)
        nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{arch}", *OPTIONS))
        return _whole(nvrtc.getCUBIN(program)), nvrtc.getLoweredName(program, kernel)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{kernel}, sm_{arch}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _whole(cubin: bytes) -> bytes:
    """CuPy takes the last byte for a string's end and drops it; readers of the file want it."""
    table, size, count = (
        struct.unpack_from("<Q", cubin, 32)[0],
        *struct.unpack_from("<HH", cubin, 54),
    )
    return cubin.ljust(table + size * count, b"\0")


def version() -> tuple[int, int]:
    """NVRTC's major and minor version.

    Raises:
        ImportError: as `compile_cubin`.
    """
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def _nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cupy.cuda").nvrtc
        nvrtc.getVersion()
    except ImportError:
        raise
    except Exception as error:  # CuPy raises a type of its loader's own
        raise ImportError(
            "CuPy finds no libnvrtc: pip install nvidia-cuda-nvrtc (of the major version that "
            "cupy-cudaNNx names)"
        ) from error
    return nvrtc


@functools.cache
def _function(kernel: str, device: int) -> Any:
    cupy = importlib.import_module("cupy")
    _log.info("compiling %s", kernel)
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=source(), options=OPTIONS, name_expressions=(kernel,))
        return module.get_function(kernel)


def _launch(plan: cuda_plan.Plan, device: torch.device) -> None:
    cupy = importlib.import_module("cupy")
    stream = torch.cuda.current_stream(device)
    function = _function(plan.kernel, stream.device_index)
    external = cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index)
    with cupy.cuda.Device(stream.device_index), external:
        function((*plan.grid, 1), (plan.block, 1, 1), (plan.params,))


def accumulate_hits(
    topk_ids: Tensor, slot_mapping: Tensor, block_size: int, histograms: Tensor
) -> int:
    """`eldr::accumulate_hits` on CUDA tensors; 0, or UNSUPPORTED when nothing was launched."""
    plan = cuda_plan.accumulate(topk_ids, slot_mapping, block_size, histograms)
    if plan is None:
        return UNSUPPORTED
    if topk_ids.shape[0] and topk_ids.shape[1]:
        _launch(plan, histograms.device)
    return 0


def decide(*arguments: Any) -> int:
    """`eldr::decide` on CUDA tensors; 0, or UNSUPPORTED when nothing was launched."""
    histograms, _, offsets, vectors = arguments[:4]
    size = cuda_plan.decide_workspace(offsets.numel() - 1, vectors.shape[1], vectors.shape[0])
    if size == 0:
        return UNSUPPORTED
    scratch = workspace.zeroed(histograms.device, size)
    _launch(cuda_plan.decide(*(*arguments, scratch)), histograms.device)
    return 0
