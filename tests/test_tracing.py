"""NVTX ranges: nothing when off, exactly the named ranges when a tool listens, balanced sites."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eldr import tracing

ROOT = Path(__file__).parents[1]


def nvtx_headers():
    """Folder of nvtx3's headers, which the CUDA toolkit brings."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    for home in (*homes, "/usr/local/cuda"):
        if home and (Path(home) / "include/nvtx3/nvToolsExt.h").is_file():
            return Path(home) / "include"
    pytest.skip("no nvtx3 headers: the CUDA toolkit is not installed")


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    """Environment for a process whose NVTX calls a tool of ours writes to a file, and that file."""
    headers = nvtx_headers()
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("nvtx")
    library, out = folder / "listener.so", folder / "events"
    source = ROOT / "tests/nvtx_listener.c"
    command = ["gcc", "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    tool = {"NVTX_INJECTION64_PATH": str(library), "NVTX_LISTENER_OUT": str(out)}
    return {**os.environ, **tool}, out


def python(code, environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_off_by_default_and_harmless():
    if os.environ.get("ELDR_NVTX", "0") == "0":
        assert tracing.ON is False
        tracing.push(tracing.COPY, 3)
        tracing.pop()


def test_ranges_reach_a_tool_with_domain_category_and_payload(listener):
    pytest.importorskip("nvtx")
    environment, out = listener
    out.unlink(missing_ok=True)
    code = (
        "from eldr import tracing as t\nassert t.ON\n"
        "t.push(t.ACCUMULATE, 42); t.push(t.DECIDE, 2**40); t.pop(); t.pop()\n"
        "t.push(t.ACCUMULATE); t.pop()"
    )
    done = python(code, {**environment, "ELDR_NVTX": "1"})
    assert done.returncode == 0, done.stderr
    assert out.read_text().splitlines() == [
        "push eldr accumulate signature 42",
        f"push eldr decide kernel {2**40}",
        "pop eldr",
        "pop eldr",
        "push eldr accumulate signature 0",
        "pop eldr",
    ]


def test_canary_reads_once_in_128_steps(listener):
    pytest.importorskip("nvtx")
    environment, out = listener
    out.unlink(missing_ok=True)
    code = (
        "from eldr import tracing\n"
        "class Buffer:\n    reads = 0\n    view = lambda self, n: [self]\n"
        "    def item(self): Buffer.reads += 1\n"
        "for _ in range(257): tracing.canary(Buffer())\n"
        "print(Buffer.reads)"
    )
    done = python(code, {**environment, "ELDR_NVTX": "1"})
    assert done.stdout.strip() == "3", done.stderr
    pushed = [line for line in out.read_text().splitlines() if line.startswith("push")]
    assert pushed == [f"push eldr canary canary {step}" for step in (1, 129, 257)]


def test_wish_without_a_tool_stays_off():
    pytest.importorskip("nvtx")
    environment = {k: v for k, v in os.environ.items() if k != "NVTX_INJECTION64_PATH"}
    code = "from eldr import tracing; print(tracing.ON)"
    assert python(code, {**environment, "ELDR_NVTX": "1"}).stdout == "False\n"


def test_wrong_wish_and_missing_package_fail_loudly():
    done = python("import eldr.tracing", {**os.environ, "ELDR_NVTX": "yes"})
    assert "expected 0, 1 or torch" in done.stderr
    code = "import sys; sys.modules['nvtx'] = None; import eldr.tracing"
    done = python(code, {**os.environ, "ELDR_NVTX": "1"})
    assert "pip install eldr[profile]" in done.stderr


def test_loads_nothing_heavy():
    heavy = "{'torch', 'numpy', 'nvtx'}"
    code = f"import eldr.tracing, sys; print(sorted({heavy} & sys.modules.keys()))"
    assert python(code, {**os.environ, "ELDR_NVTX": "0"}).stdout == "[]\n"


def sites():
    """Every function of the package that opens a range: (file, function node)."""
    for path in sorted((ROOT / "eldr").rglob("*.py")):
        if path.name == "tracing.py" or "tracing." not in path.read_text("utf-8"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path.relative_to(ROOT).as_posix(), node


def calls(node, name):
    return [
        inner.lineno
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and isinstance(inner.func.value, ast.Name)
        and (inner.func.value.id, inner.func.attr) == ("tracing", name)
    ]


def test_sites_are_balanced_and_never_span_an_await():
    for path, node in sites():
        pushes, pops = calls(node, "push"), calls(node, "pop")
        assert len(pushes) == len(pops), f"{path}: {node.name}"
        for start, end in zip(sorted(pushes), sorted(pops), strict=True):
            assert start < end, f"{path}: {node.name}"
            waits = [n.lineno for n in ast.walk(node) if isinstance(n, ast.Await | ast.AsyncFor)]
            assert not [line for line in waits if start <= line <= end], f"{path}: {node.name}"


CPP = """
#include "nvtx_range.h"
int main() {
    for (int tokens = 7; tokens < 9; ++tokens) { ELDR_NVTX_RANGE("accumulate", tokens); }
}
"""


def compile_cpp(folder, *flags):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    source = folder / "main.cpp"
    source.write_text(CPP)
    program = folder / "main"
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    command = ["g++", *strict, *flags, str(source), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)
    return program


def test_cpp_ranges_reach_the_same_domain(listener, tmp_path):
    environment, out = listener
    out.unlink(missing_ok=True)
    program = compile_cpp(tmp_path, "-DELDR_WITH_NVTX", f"-isystem{nvtx_headers()}")
    subprocess.run([str(program)], env=environment, check=True)
    assert out.read_text().splitlines() == [
        "push eldr accumulate - 7",
        "pop eldr",
        "push eldr accumulate - 8",
        "pop eldr",
    ]


def test_cpp_ranges_are_compiled_out_by_default(tmp_path):
    program = compile_cpp(tmp_path)
    assert b"nvtx" not in program.read_bytes().lower()
