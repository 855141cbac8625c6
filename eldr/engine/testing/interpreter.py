"""Makes vLLM's Triton kernels run on a CPU, through Triton's interpreter.

Model runner V2, the GPU default, needs Triton, and PyPI's Triton has no CPU backend. Its
interpreter runs kernels on the host, and vLLM only asks whether one driver is active: so an
active driver that describes a CPU is all that is missing. Slow, and for tests only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Call before Triton is imported; sets TRITON_INTERPRET=1 for this process.

    Raises:
        RuntimeError: Triton was imported without it; its own library is then compiled code.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before its interpreter was chosen")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends
    from triton.runtime import driver

    kind = _driver_class()
    backends["cpu"] = Backend(compiler=next(iter(backends.values())).compiler, driver=kind)
    driver.set_active(kind())


def _driver_class() -> type[Any]:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class CpuDriver(DriverBase):  # type: ignore[misc]  # triton is not typed
        """The answers that vLLM and Triton's runtime ask of a driver."""

        def __init__(self) -> None:
            """Unlike a GPU's driver, loads nothing."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", 0, 1)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cpu

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Callable[..., float]:
            return lambda kernel, **_: 0.0

        def get_empty_cache_for_benchmark(self) -> None:
            return None

        def clear_cache(self, cache: object) -> None:
            return None

    CpuDriver.__abstractmethods__ = frozenset()
    return CpuDriver
