"""What setup.py builds on which machine, without building it; the fallback code compiles."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]


@pytest.fixture
def extensions(monkeypatch):
    """Runs setup.py under the given environment and returns the extensions it would build."""

    def run(torch: bool = True, nvcc: bool = False, **environment: str) -> dict[str, object]:
        for name in ("ELDR_SKIP_EXT", "CXX", "ELDR_CUDA", "ELDR_CUDA_ARCHS", "CUDA_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if not nvcc:
            monkeypatch.setenv("CUDA_HOME", "/nowhere")
        if not torch:
            monkeypatch.setitem(sys.modules, "torch", None)
        calls = []
        monkeypatch.setattr(setuptools, "setup", lambda **arguments: calls.append(arguments))
        monkeypatch.chdir(ROOT)
        runpy.run_path("setup.py")
        return {extension.name: extension for extension in calls[0]["ext_modules"]}

    return run


def test_both_libraries_with_torch_and_no_cuda_without_nvcc(extensions):
    built = extensions()
    assert set(built) == {"eldr._native", "eldr._C"}
    macros = [name for name, _ in built["eldr._C"].define_macros]
    assert "ELDR_WITH_CUDA" not in macros
    assert "Py_LIMITED_API" in macros


def test_only_the_torch_free_library_without_torch(extensions):
    assert set(extensions(torch=False)) == {"eldr._native"}


def test_nothing_when_asked_for_nothing(extensions):
    assert extensions(ELDR_SKIP_EXT="1") == {}


def test_nothing_without_a_compiler_unless_it_is_required(extensions, capsys):
    assert extensions(CXX="/nowhere/c++") == {}
    assert "no C++ compiler (/nowhere/c++)" in capsys.readouterr().out
    assert set(extensions(CXX="/nowhere/c++", ELDR_SKIP_EXT="0")) == {"eldr._native", "eldr._C"}


def test_an_unknown_wish_is_refused(extensions):
    with pytest.raises(SystemExit, match="ELDR_SKIP_EXT='yes', expected 0 or 1"):
        extensions(ELDR_SKIP_EXT="yes")


def test_setup_does_not_import_torch():
    code = (
        "import setuptools, runpy, sys; setuptools.setup = lambda **k: None; "
        "runpy.run_path('setup.py'); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split()[-1] == "False"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_cuda_kernels_for_three_architectures_when_nvcc_is_there(extensions):
    extension = extensions(nvcc=True)["eldr._C"]
    assert ("ELDR_CUDA_ARCHITECTURES", '"80,90,100"') in extension.define_macros
    assert "cudart_static" in extension.libraries
    assert extensions(nvcc=True, ELDR_CUDA_ARCHS="90")["eldr._C"].nvcc[2] == ["90"]
    without = extensions(nvcc=True, ELDR_CUDA="0")["eldr._C"]
    assert "cudart_static" not in without.libraries


def test_wishes_that_cannot_be_met_are_errors(extensions):
    with pytest.raises(SystemExit, match="ELDR_CUDA=1 but there is no /nowhere/bin/nvcc"):
        extensions(ELDR_CUDA="1")
    with pytest.raises(SystemExit, match="ELDR_CUDA='yes', expected 0 or 1"):
        extensions(ELDR_CUDA="yes")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_the_code_for_other_processors_compiles(tmp_path):
    """-DELDR_PORTABLE_ONLY leaves out what only x86-64 has."""
    for source in sorted((ROOT / "csrc" / "cpu").glob("*.cpp")):
        command = ["g++", "-std=c++17", "-fopenmp", "-O1", "-Wall", "-Werror", "-Wno-psabi"]
        command += ["-DELDR_PORTABLE_ONLY", "-c", str(source), "-o", str(tmp_path / "out.o")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        symbols = subprocess.run(
            ["nm", "-C", str(tmp_path / "out.o")], capture_output=True, text=True, check=True
        )
        assert "avx2" not in symbols.stdout
