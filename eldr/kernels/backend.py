"""Which implementation serves an op, per device.

CPU tensors: `cpp` (eldr._C), else `torch`. CUDA tensors: the first of `triton`, `cuda` (eldr._C
with CUDA kernels), `cupy` (the same CUDA sources compiled at run time), `torch` that this process
has.

The environment variable ELDR_KERNELS asks for one by name. An automatic choice falls back and says
so once in the log; a named one that is missing is an error. An op that the named backend does not
have is served as if none were named.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable

_log = logging.getLogger(__name__)

NAMES = ("auto", "torch", "cpp", "triton", "cuda", "cupy")
Implementation = Callable[..., object]

# Launchers by op: Triton's beside the op itself, CuPy's in one module. CUDA C++ is in
# torch.ops.eldr_cuda.
_TRITON = {
    "accumulate_hits": ("eldr.kernels.accumulate", "accumulate_hits_triton"),
    "gather_signatures": ("eldr.kernels.gather", "gather_signatures_triton"),
    "score": ("eldr.kernels.score", "score_triton"),
    "assign": ("eldr.kernels.assign", "assign_triton"),
    "decide": ("eldr.kernels.decide", "decide_triton"),
}
_CUDA_OPS = ("accumulate_hits", "decide")
_DEVICE_ORDER = ("triton", "cuda", "cupy")
UNSUPPORTED = -1  # a CUDA launcher's answer when it has no kernel for the shape


def requested() -> str:
    """The value of ELDR_KERNELS, `auto` when unset.

    Raises:
        ValueError: not one of NAMES.
    """
    name = os.environ.get("ELDR_KERNELS", "auto")
    if name not in NAMES:
        raise ValueError(f"ELDR_KERNELS: {name!r} is not one of {', '.join(NAMES)}")
    return name


def interpreting() -> bool:
    """True when Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def have(name: str) -> bool:
    """True if the backend can be loaded in this process; loads nothing but `eldr._C`."""
    if name == "torch":
        return True
    if name in ("cpp", "cuda"):
        if importlib.util.find_spec("eldr._C") is None:
            return False
        extension = importlib.import_module("eldr._C")
        return name == "cpp" or bool(extension.cuda_architectures)
    return importlib.util.find_spec(name) is not None


def on_cpu() -> str:
    """The backend of CPU tensors: `triton` only when named and interpreted.

    Raises:
        ImportError: ELDR_KERNELS=cpp without the extension.
    """
    name = requested()
    if name == "torch" or (name == "triton" and interpreting()):
        return name
    if have("cpp"):
        return "cpp"
    if name == "cpp":
        raise ImportError(
            "ELDR_KERNELS=cpp, but eldr._C was not built: reinstall eldr with a C++ compiler and "
            "without ELDR_SKIP_EXT"
        )
    _log.warning(
        "eldr._C was not built: plain torch serves CPU tensors, more slowly. Reinstall eldr with "
        "a C++ compiler and without ELDR_SKIP_EXT to change that."
    )
    return "torch"


def _on_cuda(op: str) -> str:
    name = requested()
    if name in _DEVICE_ORDER and not have(name):
        raise ImportError(f"ELDR_KERNELS={name}, but this process cannot load it: {_CURE[name]}")
    if name == "torch" or (name in _DEVICE_ORDER and _serves(name, op)):
        return name
    for candidate in _DEVICE_ORDER:
        if _serves(candidate, op) and have(candidate):
            return candidate
    _log.warning("%s: no device backend, plain torch serves it, with synchronisations", op)
    return "torch"


_CURE = {
    "triton": "pip install triton",
    "cuda": "build eldr where nvcc is installed",
    "cupy": "pip install cupy-cuda13x",
}


def _serves(name: str, op: str) -> bool:
    return name == "triton" or op in _CUDA_OPS


def triton_launcher(op: str) -> Implementation:
    """The Triton launcher of an op; it takes the op's arguments."""
    module, function = _TRITON[op]
    launcher: Implementation = getattr(importlib.import_module(module), function)
    return launcher


@functools.cache
def on_cuda(op: str, reference: Implementation) -> Implementation:
    """What serves `op` on CUDA tensors; it takes the op's arguments. Chosen once per process."""
    name = _on_cuda(op)
    if name == "torch":
        return reference
    if name == "triton":
        return triton_launcher(op)
    return _compiled(name, op, reference)


def _launcher(name: str, op: str) -> Implementation:
    """CUDA C++, built or compiled by CuPy; answers UNSUPPORTED for shapes it has no kernel for."""
    launch: Implementation
    if name == "cupy":
        launch = getattr(importlib.import_module("eldr.kernels.nvrtc"), op)
    elif op == "decide":
        launch = importlib.import_module("eldr.kernels.decide").decide_cuda
    else:
        launch = importlib.import_module("torch").ops.eldr_cuda.accumulate_hits
    return launch


def _compiled(name: str, op: str, reference: Implementation) -> Implementation:
    """Serves with CUDA C++, and shapes it has no kernel for with Triton or else torch."""
    launch = _launcher(name, op)

    def serve(*args: object) -> None:
        if launch(*args) == UNSUPPORTED:
            rest = triton_launcher(op) if have("triton") else reference
            rest(*args)

    return serve
