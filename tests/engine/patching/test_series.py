"""The series directory: strict about its order file, its manifest, and what is lying around."""

import pytest

from eldr.engine.patching import manifest, series
from eldr.engine.patching.errors import PatchError


@pytest.fixture
def folder(toy, tmp_path):
    copy = tmp_path / "patches"
    copy.mkdir()
    for path in toy.patches.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_load_and_digest(folder):
    loaded = series.load(folder)
    assert [patch.added for patch in loaded.patches] == [2, 3, 2]
    assert len(loaded.digest) == 16
    first = folder / loaded.patches[0].name
    first.write_bytes(first.read_bytes().replace(b"Because", b"As"))
    assert series.load(folder).digest != loaded.digest


def test_manifest_round_trip(folder):
    upstream = manifest.read(folder / "UPSTREAM.toml")
    (folder / "UPSTREAM.toml").write_text(manifest.render(upstream))
    assert manifest.read(folder / "UPSTREAM.toml") == upstream
    assert upstream.files["vllm/hook.py"].before == "absent"


def test_versions():
    upstream = manifest.Upstream("vllm", "0.32.0", "v0.32.0", ("vllm",))
    assert upstream.matches("0.32.0+cpu")
    assert not upstream.matches("0.32.0rc1")
    assert not upstream.matches("0.32.0.post1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: (d / "series").write_text("nowhere.patch\n"), "not listed"),
        (lambda d: (d / "stray.patch").write_text("x"), "not listed in `series`: stray.patch"),
        (
            lambda d: (d / "series").write_text((d / "series").read_text() * 2),
            "listed twice",
        ),
        (lambda d: next(d.glob("0002*")).unlink(), "cannot be read"),
        (lambda d: (d / "series").unlink(), "series: cannot be read"),
        (lambda d: (d / "UPSTREAM.toml").unlink(), "UPSTREAM.toml: cannot be read"),
        (lambda d: (d / "UPSTREAM.toml").write_text("x = ["), "not TOML"),
        (lambda d: (d / "UPSTREAM.toml").write_text('nmae = "x"\n'), "unknown keys"),
        (lambda d: (d / "UPSTREAM.toml").write_text('name = "x"\n'), "missing keys"),
    ],
)
def test_refuses(folder, change, says):
    change(folder)
    with pytest.raises(PatchError, match=says):
        series.load(folder)


def test_manifest_must_pin_exactly_the_touched_files(folder):
    toml = folder / "UPSTREAM.toml"
    toml.write_text(toml.read_text().replace("vllm/hook.py", "vllm/other.py"))
    with pytest.raises(PatchError, match=r"eldr patch pin"):
        series.load(folder)


def test_malformed_hash(folder):
    toml = folder / "UPSTREAM.toml"
    toml.write_text(toml.read_text().replace('before = "absent"', 'before = "ABSENT"'))
    with pytest.raises(PatchError, match="not a sha256"):
        series.load(folder)


def test_wrong_pin_stops_apply(folder, toy, run):
    toml = folder / "UPSTREAM.toml"
    upstream = manifest.read(toml)
    toml.write_text(toml.read_text().replace(upstream.files["vllm/runner.py"].after, "0" * 64))
    before = toy.snapshot()
    code, _, err = run("apply", patches=folder)
    assert code == 1
    assert "eldr patch pin" in err
    assert toy.snapshot() == before
    assert run("pin", patches=folder)[1]["changed"] is True
    assert run("apply", patches=folder)[0] == 0


def test_pin_works_from_a_patched_wheel_but_not_from_an_edited_one(folder, toy, run):
    run("apply", patches=folder)
    assert run("pin", patches=folder)[1]["changed"] is False
    (toy.site / "vllm/_eldr_patches.json").unlink()
    assert run("pin", patches=folder)[1]["changed"] is False
    (toy.site / "vllm/runner.py").write_text("x = 1\n")
    assert run("pin", patches=folder)[0] == 1


def test_list(run):
    code, data, _ = run("list")
    assert code == 0
    assert data["patches"][0]["subject"] == "Add a hook"
    assert data["patches"][0]["trailers"]["Why-Patch"] == "no-hook"
