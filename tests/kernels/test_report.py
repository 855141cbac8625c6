"""The kernel report: its readers, its bounds, and the committed rows against what compiles here."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eldr.kernels import nvrtc
from eldr.kernels.accumulate import accumulate_hits_triton
from eldr.kernels.device_kernel import record_launches
from eldr.kernels.recipes import Recipe
from eldr.kernels.report import __main__ as command
from eldr.kernels.report import amd, bounds, cuda_kernels, nvidia, triton_kernels
from eldr.kernels.report.row import Row

COMMITTED = Path(__file__).resolve().parents[2] / "results/kernel_report.json"
# A few that stand for all; the full report is `python -m eldr.kernels.report`.
SUBSET = {
    "sm_90": ("accumulate qwen3-30b-a3b", "decide R=1 W=16 qwen3-30b-a3b: decide_kernel"),
    "gfx942": ("accumulate deepseek-v3", "gather qwen3-30b-a3b: gather_kernel"),
}
CUDA_SUBSET = ("eldr::accumulate<int32_t, uint8_t, 8, 16>", "eldr::decide<uint8_t, true, 1>")

AMD_ASSEMBLY = """
kernel:
\ts_load_dwordx4 s[0:3], s[0:1], 0x0
\tglobal_load_dwordx4 v[0:3], v0, s[0:1]
\tglobal_load_dwordx4 v[4:7], v0, s[0:1]
.LBB0_1:
\tglobal_load_dwordx4 v[0:3], v0, s[0:1]
\ts_cbranch_vccnz .LBB0_1
\tds_add_u32 v0, v1
\ts_endpgm
  .vgpr_count:     50
  .vgpr_spill_count: 0
  .sgpr_spill_count: 2
  .private_segment_fixed_size: 0
"""


def needs_compilers() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    try:
        nvidia.tool("cuobjdump")
    except FileNotFoundError as error:
        pytest.skip(str(error))


def needs_nvrtc() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        nvrtc.version()
    except ImportError as error:
        pytest.skip(str(error))


def committed() -> dict[tuple[str, str, str], Row]:
    rows = json.loads(COMMITTED.read_text())["rows"]
    return {row.key: row for row in (Row(**data) for data in rows)}


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[Row, bounds.Bounds]]:
    needs_compilers()
    return {
        f"{recipe.name} {target}": (
            triton_kernels.row(recipe, target),
            bounds.of_triton(recipe.launch, target),
        )
        for target, names in SUBSET.items()
        for recipe in triton_kernels.launches(target)
        if recipe.name in names
    }


def test_the_committed_report_is_complete_and_without_problems() -> None:
    report = json.loads(COMMITTED.read_text())
    assert report["problems"] == []
    rows = committed()
    targets = ("sm_80", "sm_90", "sm_100", "gfx942")
    for target in targets:
        wanted = {("triton", r.name, target) for r in triton_kernels.launches(target)}
        if target != "gfx942":
            wanted |= {("cuda", name, target) for name in cuda_kernels.instances()}
        assert wanted == {key for key in rows if key[2] == target}, "run the report again"
    assert all(row.spills == 0 for row in rows.values())


def test_committed_rows_keep_their_bounds() -> None:
    rows = committed()
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        for recipe in triton_kernels.launches(target):
            row = rows["triton", recipe.name, target]
            assert bounds.problems(row, bounds.of_triton(recipe.launch, target)) == []
    for (backend, name, _), row in rows.items():
        if backend == "cuda":
            assert bounds.problems(row, bounds.of_cuda(name)) == []


def test_what_triton_makes_here_keeps_its_bounds(
    compiled: dict[str, tuple[Row, bounds.Bounds]],
) -> None:
    assert len(compiled) == 4
    assert [p for row, limits in compiled.values() for p in bounds.problems(row, limits)] == []


def test_what_triton_makes_here_is_what_was_committed(
    compiled: dict[str, tuple[Row, bounds.Bounds]],
) -> None:
    version = f"triton {importlib.import_module('triton').__version__}"
    rows = committed()
    known = {row.compiler for row in rows.values()}
    if version not in known:
        pytest.skip(f"{version} compiles otherwise than what was committed: {sorted(known)}")
    for row, _ in compiled.values():
        assert row == rows[row.key], "run the report again and commit it"


@pytest.mark.parametrize(
    ("ids", "experts"),
    [(torch.uint8, 256), (torch.uint16, 512), (torch.int64, 128)],
    ids=str,
)
def test_ids_of_every_dtype_compile(ids: torch.dtype, experts: int) -> None:
    """The report has int32 ids; the number of experts need not fit the ids' own dtype."""
    needs_compilers()

    def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = meta(torch.uint8, 100, 4, experts)
    with record_launches() as launches:
        accumulate_hits_triton(meta(ids, 512, 4, 8), meta(torch.int64, 512), 16, rows)
    row = triton_kernels.row(Recipe(f"ids {ids}", launches[0]), "sm_90")
    assert row.spills == row.global_atomics == 0


def test_what_nvrtc_makes_here_keeps_its_bounds() -> None:
    needs_compilers()
    needs_nvrtc()
    rows = cuda_kernels.rows("sm_90", list(CUDA_SUBSET))
    assert sorted(row.kernel for row in rows) == sorted(CUDA_SUBSET)
    for row in rows:
        assert row.compiler.startswith("nvrtc 1")
        assert bounds.problems(row, bounds.of_cuda(row.kernel)) == []


def test_a_kernel_with_local_memory_is_seen_to_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compilers()
    needs_nvrtc()
    body = "float a[256]; for (int i = 0; i < 999; ++i) a[i * n & 255] = p[i]; p[0] = a[n & 255];"
    text = f"__global__ void f(float* p, int n) {{ {body} }}"
    monkeypatch.setattr(nvrtc, "source", lambda: text)
    cubin = tmp_path / "f.cubin"
    cubin.write_bytes(nvrtc.compile_cubin("f", 90)[0])
    (usage,) = nvidia.functions(cubin).values()
    row = triton_kernels.from_nvidia("f", "cuda", "sm_90", "nvrtc", usage, usage.shared)
    assert row.spills >= 1024
    (problem,) = bounds.problems(row, bounds.Bounds(registers=255))
    assert problem.startswith("f (cuda, sm_90): spills ")


ROW = Row("k", "cuda", "sm_90", "nvcc 13", 40, 0, 0, 3, 2, 10, 0, 500)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spills": 8}, "spills 8 bytes"),
        ({"registers": 49}, "49 registers, expected at most 48"),
        ({"wide_loads": 2}, "2 128-bit loads, expected at least 3"),
        ({"batch": 1}, "1 128-bit loads without a branch"),
        ({"global_atomics": 1}, "1 global atomics, expected at most 0"),
    ],
)
def test_every_bound_is_checked(change: dict[str, int], said: str) -> None:
    limits = bounds.Bounds(registers=48, wide_loads=3, batch=2)
    assert bounds.problems(ROW, limits) == []
    (problem,) = bounds.problems(dataclasses.replace(ROW, **change), limits)
    assert said in problem


def test_every_instance_has_bounds_and_a_readable_symbol() -> None:
    names = cuda_kernels.instances()
    assert len(names) == len(set(names)) == 29
    for name in names:
        bounds.of_cuda(name)
    symbol = "_ZN4eldr10accumulateIlhLi8ELi16EEEvNS_16AccumulateParamsE"
    assert cuda_kernels.readable(symbol) == "eldr::accumulate<int64_t, uint8_t, 8, 16>"
    symbol = "_ZN4eldr6decideItLb1ELi4EEEvNS_12DecideParamsE"
    assert cuda_kernels.readable(symbol) == "eldr::decide<uint16_t, true, 4>"
    with pytest.raises(ValueError, match="not one of"):
        cuda_kernels.readable("_Z1fv")


def test_amd_assembly_is_read() -> None:
    usage = amd.kernel(AMD_ASSEMBLY)
    assert (usage.registers, usage.spills) == (50, 8)
    assert usage.opcodes["global_load_dwordx4"] == usage.wide_loads == 3
    assert usage.batch() == 2
    assert usage.opcodes["ds_add_u32"] == 1
    with pytest.raises(ValueError, match="vgpr_spill_count"):
        amd.kernel("s_endpgm")


def fake_rows(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    monkeypatch.setattr(cuda_kernels, "rows", lambda target: [row])


@pytest.mark.parametrize(("spills", "code"), [(0, 0), (16, 1)])
def test_exit_code_and_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    spills: int,
    code: int,
) -> None:
    needs_compilers()
    row = dataclasses.replace(
        ROW, kernel="eldr::accumulate<int32_t, uint8_t, 8, 16>", spills=spills
    )
    fake_rows(monkeypatch, row)
    output = tmp_path / "r.json"
    arguments = ["--arch", "90", "--only", "cuda", "--json", "--output", str(output)]
    assert command.main(arguments) == code
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert data == json.loads(output.read_text())
    assert data["rows"] == [row.as_dict()]
    assert len(data["problems"]) == code
    assert ("spills 16 bytes" in printed.err) is bool(code)


def test_without_compilers_it_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise FileNotFoundError(f"{name}: it comes with Triton, which is not installed")

    monkeypatch.setattr(nvidia, "tool", missing)
    assert command.main(["--arch", "90"]) == 3
    assert "cannot tell" in capsys.readouterr().err


def test_a_cubin_that_the_tools_cannot_read_is_not_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_compilers()

    def unreadable(target: str) -> list[Row]:
        cubin = tmp_path / "k.cubin"
        cubin.write_bytes(b"\x7fELF of another age")
        nvidia.functions(cubin)
        raise AssertionError("read it")

    monkeypatch.setattr(cuda_kernels, "rows", unreadable)
    assert command.main(["--arch", "90", "--only", "cuda"]) == 3
    assert "nvdisasm" in capsys.readouterr().err


def test_unknown_targets_are_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--arch", "90,volta"])
    assert stop.value.code == 2
