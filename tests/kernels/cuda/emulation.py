"""Builds the CUDA sources with g++ over csrc/emu, and calls their launchers on NumPy arrays.

The argument structures mirror csrc/eldr_launch.h; `test_layout` compares them with the compiler's.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.kernels.cuda import oracle

CSRC = Path(__file__).resolve().parents[3] / "csrc"
DTYPES = {
    np.dtype(np.uint8): 0,
    np.dtype(np.uint16): 1,
    np.dtype(np.int32): 2,
    np.dtype(np.int64): 3,
}
CLOSED = 2**31 - 1
UNSUPPORTED = -1
LAUNCH_FAILURE = 719
LEAST_LOAD, LOCALITY_BAND, MARGINAL_COST = 1, 2, 3

_p, _i, _q, _f = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class AccumulateArgs(ctypes.Structure):
    _fields_ = (
        ("ids", _p), ("ids_dtype", _i), ("ids_stride_token", _q), ("ids_stride_layer", _q),
        ("slots", _p), ("histograms", _p), ("hist_dtype", _i), ("hist_stride_block", _q),
        ("num_blocks", _q), ("tokens", _q), ("layers", _i), ("top_k", _i), ("experts", _i),
        ("block_size", _i),
    )  # fmt: skip


class GatherArgs(ctypes.Structure):
    _fields_ = (
        ("histograms", _p), ("hist_dtype", _i), ("hist_stride_block", _q), ("num_blocks", _q),
        ("cells", _q), ("block_ids", _p), ("num_ids", _q), ("offsets", _p), ("requests", _i),
        ("counts", _p),
    )  # fmt: skip


class ScoreArgs(ctypes.Structure):
    _fields_ = (
        ("vectors", _p), ("workers", _i), ("prior", _p), ("squares", _p), ("tokens", _p),
        ("shrinkage", _f), ("scores", _p),
    )  # fmt: skip


class AssignArgs(ctypes.Structure):
    _fields_ = (
        ("rule", _i), ("tau", _f), ("c_expert", _f), ("c_kv", _f), ("c_request", _f), ("hedge", _f),
        ("load", _p), ("cost", _p), ("state", _p), ("request_kv", _p), ("chosen", _p),
    )  # fmt: skip


class DecideArgs(ctypes.Structure):
    _fields_ = (("gather", GatherArgs), ("score", ScoreArgs), ("assign", AssignArgs))


def why_not() -> str | None:
    """The reason this machine cannot emulate, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return (
            f"the emulation switches stacks with x86-64 code; this machine is {platform.machine()}"
        )
    if shutil.which("g++") is None:
        return "no g++ to compile the CUDA sources with"
    return None


def build(
    out: Path,
    csrc: Path = CSRC,
    sources: Sequence[str] = ("cuda/accumulate.cu", "cuda/decide.cu"),
    flags: Sequence[str] = ("-O1", "-shared"),
) -> Path:
    """The emulated launchers at `out`, a shared library unless `flags` say otherwise."""
    command = [
        "g++", "-std=c++17", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas",
        "-ffp-contract=off", f"-I{csrc}", "-include", str(csrc / "emu/cuda_emu.h"), *flags,
        "-x", "c++", *(str(csrc / name) for name in (*sources, "emu/control.cpp")),
        "-o", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return out


def mutated(out: Path, file: str, old: str, new: str, sources: Sequence[str]) -> Path:
    """Like `build`, from a copy of csrc in which `old` (found exactly once) is `new`."""
    copy = out.parent / f"{out.stem}-csrc"
    shutil.copytree(CSRC, copy)
    path = copy / file
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(
            f"{file}: {text.count(old)} places read {old!r}; a mutation needs exactly one"
        )
    path.write_text(text.replace(old, new))
    return build(out, copy, sources, ("-O0", "-shared"))


def pointer(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


@dataclass
class Decision:
    """What the launcher wrote."""

    scores: np.ndarray
    counts: np.ndarray | None
    chosen: np.ndarray | None


class Device:
    """An emulated build; a launch that breaks a CUDA rule raises RuntimeError with the reason."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self.lib.eldr_emu_message.restype = ctypes.c_char_p
        if hasattr(self.lib, "eldr_cuda_accumulate"):
            self.lib.eldr_cuda_accumulate.argtypes = (_p, _p)
        if hasattr(self.lib, "eldr_cuda_decide"):
            self.lib.eldr_cuda_decide.argtypes = (_p, _p, _p)
            self.lib.eldr_cuda_decide_workspace.argtypes = (_i, _q, _i)
            self.lib.eldr_cuda_decide_workspace.restype = ctypes.c_size_t
        self.reset(1)

    def reset(self, seed: int, resident: int = 3) -> None:
        self.lib.eldr_emu_reset(ctypes.c_uint64(seed), ctypes.c_uint(resident))

    def checked(self, code: int) -> int:
        if code > 0:
            raise RuntimeError(f"launch failed ({code}): {self.lib.eldr_emu_message().decode()}")
        return code

    def accumulate(
        self, ids: np.ndarray, slots: np.ndarray, rows: np.ndarray, block_size: int
    ) -> int:
        """Like eldr_cuda_accumulate, in place. Tokens, layers and blocks may be strided."""
        args = AccumulateArgs(
            ids=pointer(ids), ids_dtype=DTYPES[ids.dtype],
            ids_stride_token=ids.strides[0] // ids.itemsize,
            ids_stride_layer=ids.strides[1] // ids.itemsize,
            slots=pointer(slots), histograms=pointer(rows), hist_dtype=DTYPES[rows.dtype],
            hist_stride_block=rows.strides[0] // rows.itemsize, num_blocks=rows.shape[0],
            tokens=ids.shape[0], layers=ids.shape[1], top_k=ids.shape[2], experts=rows.shape[2],
            block_size=block_size,
        )  # fmt: skip
        return self.checked(self.lib.eldr_cuda_accumulate(ctypes.byref(args), None))

    def decide(
        self,
        rows: np.ndarray,
        block_ids: np.ndarray,
        offsets: np.ndarray,
        vectors: np.ndarray,
        *,
        counts: bool = False,
        prior: np.ndarray | None = None,
        squares: np.ndarray | None = None,
        tokens: np.ndarray | None = None,
        shrinkage: float = 0.0,
        assignment: oracle.Assignment | None = None,
        workspace: np.ndarray | None = None,
    ) -> Decision:
        """Like eldr_cuda_decide on rows [num_blocks, cells]; updates `assignment` in place."""
        requests, workers = len(offsets) - 1, len(vectors)
        out = Decision(
            np.full((requests, workers), np.nan, np.float32),
            np.full((requests, rows.shape[1]), -1, np.int32) if counts else None,
            np.full(requests, -7, np.int32) if assignment else None,
        )
        if workspace is None:
            workspace = self.workspace(requests, rows.shape[1], workers)
        args = DecideArgs(
            GatherArgs(
                histograms=pointer(rows), hist_dtype=DTYPES[rows.dtype],
                hist_stride_block=rows.strides[0] // rows.itemsize, num_blocks=len(rows),
                cells=rows.shape[1], block_ids=pointer(block_ids), num_ids=len(block_ids),
                offsets=pointer(offsets), requests=requests, counts=pointer(out.counts),
            ),
            ScoreArgs(
                vectors=pointer(vectors), workers=workers, prior=pointer(prior),
                squares=pointer(squares), tokens=pointer(tokens), shrinkage=shrinkage,
                scores=pointer(out.scores),
            ),
            AssignArgs() if assignment is None else _assign_args(assignment, out.chosen),
        )  # fmt: skip
        self.checked(self.lib.eldr_cuda_decide(ctypes.byref(args), pointer(workspace), None))
        return out

    def workspace(self, requests: int, cells: int, workers: int) -> np.ndarray:
        """Zeroed bytes of the size the launcher asks for."""
        size = self.lib.eldr_cuda_decide_workspace(requests, cells, workers)
        return np.zeros(max(size, 16), np.uint8)


def _assign_args(assignment: oracle.Assignment, chosen: np.ndarray | None) -> AssignArgs:
    c_expert, c_kv, c_request, hedge = assignment.coefficients
    return AssignArgs(
        rule=assignment.rule, tau=assignment.tau, c_expert=c_expert, c_kv=c_kv, c_request=c_request,
        hedge=hedge, load=pointer(assignment.load), cost=pointer(assignment.cost),
        state=pointer(assignment.state), request_kv=pointer(assignment.request_kv),
        chosen=pointer(chosen),
    )  # fmt: skip
