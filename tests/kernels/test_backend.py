"""Which implementation serves, what is loaded when, and what happens without the extension."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eldr.kernels import backend

ROOT = Path(__file__).parents[2]

USE = """
import torch
from eldr.kernels import accumulate_hits, gather_signatures
histograms = torch.zeros(2, 1, 4, dtype=torch.uint8)
for _ in range(2):
    accumulate_hits(torch.ones(3, 1, 2, dtype=torch.int32), torch.arange(3), 16, histograms)
ids, offsets = torch.tensor([0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
print(gather_signatures(histograms, ids, offsets).tolist())
"""
WITHOUT_EXTENSION = "import sys; sys.modules['eldr._C'] = None\n"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | environment,
    )  # fmt: skip


def test_without_the_extension_torch_serves_and_says_so_once():
    log = "import logging; logging.basicConfig(format='%(message)s')\n"
    result = python(WITHOUT_EXTENSION + log + USE)
    assert result.stdout.strip() == "[[[0, 6, 0, 0]]]", result.stderr
    said = [line for line in result.stderr.splitlines() if "eldr._C was not built" in line]
    assert len(said) == 1
    assert "Reinstall eldr with a C++ compiler" in said[0]


def test_a_named_backend_that_is_missing_is_an_error():
    result = python(WITHOUT_EXTENSION + USE, ELDR_KERNELS="cpp")
    assert result.returncode != 0
    assert "ImportError: ELDR_KERNELS=cpp, but eldr._C was not built" in result.stderr


def test_torch_serves_silently_when_named():
    result = python(USE, ELDR_KERNELS="torch")
    assert result.stdout.strip() == "[[[0, 6, 0, 0]]]"
    assert result.stderr == ""


def test_triton_is_not_imported_on_a_cpu():
    result = python(USE + "import sys; print('triton' in sys.modules)")
    assert result.stdout.split()[-1] == "False", result.stderr


def test_named_and_interpreted_triton_serves_cpu_tensors():
    pytest.importorskip("triton")
    code = USE + "import sys; print('triton' in sys.modules)"
    result = python(code, ELDR_KERNELS="triton", TRITON_INTERPRET="1")
    assert result.stdout.split("\n")[:2] == ["[[[0, 6, 0, 0]]]", "True"], result.stderr


def test_unknown_names_are_refused(monkeypatch):
    monkeypatch.setenv("ELDR_KERNELS", "fastest")
    with pytest.raises(ValueError, match="ELDR_KERNELS: 'fastest' is not one of auto, torch"):
        backend.requested()


def reference(*_: object) -> str:
    return "reference"


@pytest.fixture
def machine(monkeypatch):
    """A machine that has the named device backends, whose launchers say who they are."""

    def build(*names: str, requested: str = "auto", supported: bool = True) -> None:
        monkeypatch.setenv("ELDR_KERNELS", requested)
        monkeypatch.setattr(backend, "have", lambda name: name == "torch" or name in names)
        monkeypatch.setattr(
            backend, "triton_launcher", lambda op: lambda *a: calls.append("triton")
        )

        def compiled(name: str, op: str):
            def launch(*_: object) -> int:
                calls.append(name)
                return 0 if supported else backend.UNSUPPORTED

            return launch

        monkeypatch.setattr(backend, "_launcher", compiled)
        backend.on_cuda.cache_clear()

    calls: list[str] = []
    build.calls = calls
    yield build
    backend.on_cuda.cache_clear()


@pytest.mark.parametrize(
    ("have", "requested", "op", "expected"),
    [
        (("triton", "cuda", "cupy"), "auto", "decide", ["triton"]),
        (("cuda", "cupy"), "auto", "decide", ["cuda"]),
        (("cupy",), "auto", "accumulate_hits", ["cupy"]),
        (("triton", "cuda", "cupy"), "cuda", "decide", ["cuda"]),
        (("triton", "cuda", "cupy"), "cupy", "accumulate_hits", ["cupy"]),
        (("triton", "cuda", "cupy"), "cuda", "gather_signatures", ["triton"]),  # has no CUDA C++
        (("cuda",), "auto", "gather_signatures", []),
        ((), "auto", "decide", []),
        (("triton",), "torch", "decide", []),
    ],
)
def test_choice_on_a_gpu(machine, have, requested, op, expected):
    machine(*have, requested=requested)
    result = backend.on_cuda(op, reference)()
    assert machine.calls == expected
    assert (result == "reference") == (not expected)


def test_shapes_without_a_cuda_kernel_go_to_triton(machine):
    machine("triton", "cuda", requested="cuda", supported=False)
    backend.on_cuda("decide", reference)()
    machine("cuda", supported=False)
    backend.on_cuda("decide", reference)()
    assert machine.calls == ["cuda", "triton", "cuda"]


@pytest.mark.parametrize("name", ["triton", "cuda", "cupy"])
def test_a_named_device_backend_that_is_missing_is_an_error(machine, name):
    machine(requested=name)
    with pytest.raises(ImportError, match=f"ELDR_KERNELS={name}, but this process cannot load it"):
        backend.on_cuda("decide", reference)
