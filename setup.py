"""Builds the native libraries; metadata is in pyproject.toml.

`eldr._C` holds the torch ops (stable ABI: one binary for every Python >= 3.11 and torch >= 2.13).
It is built when torch is installed, and gets CUDA kernels when nvcc is found.
`eldr._native` needs Python only.

Environment:
    ELDR_SKIP_EXT=0|1     1: build neither, NumPy and plain torch serve; 0: fail without a C++
                          compiler; default: build them when there is a compiler.
    ELDR_CUDA=0|1         0: no CUDA kernels even with nvcc; 1: fail without nvcc; default: with
                          CUDA kernels when nvcc is found.
    ELDR_CUDA_ARCHS=...   comma-separated compute capabilities, default 80,90,100.
    ELDR_BUILD_NVTX=1     NVTX ranges in the CUDA launchers; without it they are compiled out.
    CUDA_HOME             where nvcc lives, default: the one on PATH, then /usr/local/cuda.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
ABI3 = ("Py_LIMITED_API", "0x030B0000")
# aoti_torch_* symbols are versioned by this; 2.13 is the first with a stream's native handle.
TORCH_TARGET = ("TORCH_TARGET_VERSION", "0x020D000000000000")
CXX_FLAGS = [
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]


def sources(*folders: str) -> list[str]:
    """C++ files below csrc/, relative to this file."""
    return sorted(
        str(path.relative_to(ROOT)) for f in folders for path in (ROOT / "csrc" / f).glob("*.cpp")
    )


def headers() -> list[str]:
    """Headers whose change rebuilds everything."""
    return sorted(str(p) for pattern in ("*.h", "*.cuh") for p in (ROOT / "csrc").rglob(pattern))


def native_extension() -> list[Extension]:
    """`eldr._native`: plain C API over buffers."""
    files = sources("native")
    # Uncontracted float arithmetic: the NumPy fallback must decide bit-identically.
    flags = [flag for flag in CXX_FLAGS if flag != "-fopenmp"] + ["-ffp-contract=off"]
    options = {"define_macros": [ABI3], "extra_compile_args": flags, "py_limited_api": True}
    return [Extension("eldr._native", files, depends=headers(), **options)] if files else []


def torch_extension() -> list[Extension]:
    """`eldr._C`: found without importing torch; none when torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        print("setup.py: torch is not installed, eldr._C is not built")
        return []
    torch = Path(spec.submodule_search_locations[0])
    extension = Extension(
        "eldr._C",
        sources("cpu", "bindings"),
        depends=headers(),
        include_dirs=["csrc"],
        define_macros=[ABI3, TORCH_TARGET],
        extra_compile_args=[*CXX_FLAGS, f"-isystem{torch / 'include'}"],
        extra_link_args=["-fopenmp"],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu", "c10"],
        py_limited_api=True,
    )
    add_cuda(extension)
    return [extension]


def find_nvcc() -> Path | None:
    """The CUDA compiler, or None when ELDR_CUDA=0 or there is none."""
    wish = os.environ.get("ELDR_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"setup.py: ELDR_CUDA={wish!r}, expected 0 or 1")
    if wish == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    found = str(Path(home) / "bin/nvcc") if home else shutil.which("nvcc")
    nvcc = Path(found or "/usr/local/cuda/bin/nvcc")
    if nvcc.exists():
        return nvcc.resolve()
    if wish == "1":
        raise SystemExit(f"setup.py: ELDR_CUDA=1 but there is no {nvcc}")
    return None


def add_cuda(extension: Extension) -> None:
    """Adds the CUDA sources; the static runtime is linked, so that no CUDA torch is needed."""
    cuda_sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    nvcc = find_nvcc() if cuda_sources else None
    if nvcc is None:
        return
    architectures = os.environ.get("ELDR_CUDA_ARCHS", "80,90,100")
    extension.define_macros += [
        ("ELDR_WITH_CUDA", None),
        ("ELDR_CUDA_ARCHITECTURES", f'"{architectures}"'),
    ]
    extension.library_dirs += cuda_libraries(nvcc)
    extension.libraries += ["cudart_static", "dl", "rt", "pthread"]
    extension.nvcc = (nvcc, cuda_sources, architectures.split(","))


def cuda_libraries(nvcc: Path) -> list[str]:
    """Where the static runtime lies, as nvcc itself says: it may be a wrapper around another."""
    plan = subprocess.run(
        [str(nvcc), "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=True
    ).stderr
    folders = re.findall(r'-L"?([^"\s]+)', plan)
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    if top:
        folders += [f"{top[1]}/lib64", f"{top[1]}/lib"]
    found = [folder for folder in folders if (Path(folder) / "libcudart_static.a").exists()]
    if not found:
        raise SystemExit(f"setup.py: {nvcc} names no folder with libcudart_static.a: {folders}")
    return found


def nvtx_flags() -> list[str]:
    """NVTX ranges in the launchers, when ELDR_BUILD_NVTX=1; the toolkit brings the headers."""
    wish = os.environ.get("ELDR_BUILD_NVTX", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"setup.py: ELDR_BUILD_NVTX={wish!r}, expected 0 or 1")
    return ["-DELDR_WITH_NVTX"] if wish == "1" else []


def nvcc_command(nvcc: Path, source: Path, target: Path, architectures: list[str]) -> list[str]:
    """One object with machine code for every architecture and PTX of the last for newer ones."""
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    code.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    flags = [
        "-O3",
        "-std=c++17",
        "-lineinfo",
        "--threads=0",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        *nvtx_flags(),
    ]
    return [str(nvcc), *flags, *code, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)]


class Build(build_ext):
    """Compiles CUDA sources with nvcc, and the C++ files of an extension side by side."""

    def build_extension(self, ext: Extension) -> None:
        """CUDA objects first, then the C++ side, then the link."""
        if hasattr(ext, "nvcc"):
            nvcc, cuda_sources, architectures = ext.nvcc
            folder = Path(self.build_temp)
            folder.mkdir(parents=True, exist_ok=True)
            for source in cuda_sources:
                target = folder / f"{source.stem}.cu.o"
                subprocess.check_call(nvcc_command(nvcc, source, target, architectures))
                ext.extra_objects.append(str(target))
        self.compile_in_parallel()
        super().build_extension(ext)

    def compile_in_parallel(self) -> None:
        """Setuptools compiles one file after the other; they are independent."""
        compile_all = type(self.compiler).compile.__get__(self.compiler)

        def compile_each(files: list[str], *args: object, **kwargs: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                done = pool.map(lambda file: compile_all([file], *args, **kwargs), files)
            return [obj for objects in done for obj in objects]

        self.compiler.compile = compile_each


class Package(build_py):
    """Copies patches/ and the CUDA sources into a built package; an editable install reads them."""

    def run(self) -> None:
        """Python files first, then the series and the sources, each beside its user."""
        super().run()
        if not self.editable_mode:
            shipped = Path(self.build_lib) / "eldr/engine/patching/shipped"
            shutil.rmtree(shipped, ignore_errors=True)  # a patch that is gone must not stay
            shutil.copytree(ROOT / "patches", shipped)
            cuda = Path(self.build_lib) / "eldr/kernels/cuda_sources"
            shutil.rmtree(cuda, ignore_errors=True)
            shutil.copytree(ROOT / "csrc/cuda", cuda, ignore=shutil.ignore_patterns("*.cu", "*.h"))


def skip_extensions() -> bool:
    """Whether to build a pure wheel: asked for, or there is nothing to compile with."""
    wish = os.environ.get("ELDR_SKIP_EXT", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"setup.py: ELDR_SKIP_EXT={wish!r}, expected 0 or 1")
    if wish:
        return wish == "1"
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if shutil.which(compiler):
        return False
    print(f"setup.py: no C++ compiler ({compiler}), eldr is built without its native libraries")
    return True


skip = skip_extensions()
setup(
    ext_modules=[] if skip else [*native_extension(), *torch_extension()],
    cmdclass={"build_ext": Build, "build_py": Package},
    options={} if skip else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
