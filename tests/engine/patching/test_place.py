"""Placing hunks: equal to git on what it accepts, and stricter about everything else."""

import subprocess

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from eldr.engine.patching import mail
from eldr.engine.patching.place import place, unplace
from tests.engine.patching import toy as toys

HEAD = "From 0 Mon Sep 17 00:00:00 2001\nSubject: x\n\n"


def diff(tmp_path, old, new):
    """A patch made by git; both sides are texts or None."""
    for name, text in (("a", old), ("b", new)):
        path = tmp_path / name / "f.py"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_bytes(text.encode())
    command = ["git", "diff", "--no-index", "--no-prefix", "a", "b"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).stdout
    return mail.parse("x.patch", HEAD.encode() + out)


LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "d\u2028\n", "é\r\n"]), max_size=30)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(old=LINES, new=LINES, cut=st.booleans())
def test_forth_and_back_is_what_git_says(tmp_path, old, new, cut):
    before, after = "".join(old), "".join(new)
    if cut:
        after = after.rstrip("\n")
    if before == after:
        return
    patch = diff(tmp_path, before, after)
    result = place([patch], {"f.py": before.encode()})
    assert not result.conflicts
    assert all(p.verdict == "ok" for p in result.placements)
    assert result.contents == {"f.py": after.encode()}
    assert unplace([patch], result.contents) == {"f.py": before.encode()}


def body(*names):
    return "".join(f"{name}\n" for name in names)


@pytest.fixture
def patch(tmp_path):
    """Two hunks: line 12 changed, a line inserted after line 30."""
    lines = [str(i) for i in range(1, 41)]
    old = body(*lines)
    new = body(*lines[:11], "twelve", *lines[12:30], "extra", *lines[30:])
    return old, new, diff(tmp_path, old, new)


def test_moved_lines_are_found_and_counted(patch):
    old, new, made = patch
    result = place([made], {"f.py": ("x\n" * 5 + old).encode()})
    assert [p.offset for p in result.placements] == [5, 5]
    assert result.contents["f.py"] == ("x\n" * 5 + new).encode()


def test_lines_inserted_between_two_hunks(patch):
    old, new, made = patch
    result = place([made], {"f.py": old.replace("20\n", "20\ny\ny\n").encode()})
    assert [p.offset for p in result.placements] == [0, 2]
    assert result.contents["f.py"] == new.replace("20\n", "20\ny\ny\n").encode()


def test_changed_context_is_a_conflict_never_fuzz(patch):
    """GNU patch applies this hunk with fuzz 2 and exits 0."""
    old, _, made = patch
    result = place([made], {"f.py": old.replace("10\n", "ten\n").encode()})
    (conflict,) = result.conflicts
    assert conflict.number == 1
    assert "12\n" in conflict.expected
    assert "ten\n" in conflict.found
    # The other hunk is still tried and reported.
    assert result.placements[1].verdict == "ok"


def test_start_and_end_of_a_file_are_anchors(tmp_path):
    """As for git: a hunk without context before (after) it belongs to the first (last) line."""
    old = body(*"abcdefghij")
    first, last = diff(tmp_path, old, "new\n" + old), diff(tmp_path, old, old + "new\n")
    assert place([first], {"f.py": b"x\n" + old.encode()}).conflicts
    assert place([last], {"f.py": old.encode() + b"x\n"}).conflicts
    moved = place([last], {"f.py": b"x\n" + old.encode()})
    assert moved.placements[0].offset == 1


def test_two_places_are_a_conflict(patch):
    old, _, made = patch
    result = place([made], {"f.py": ("z\n" + old + old).encode()})
    assert "several places" in result.conflicts[0].problem


def test_added_file_that_exists_and_changed_file_that_does_not(tmp_path, patch):
    _, _, made = patch
    assert place([made], {"f.py": None}).conflicts[0].problem == "the file does not exist"
    raw = (
        HEAD + "diff --git a/n.py b/n.py\nnew file mode 100644\nindex 0..1\n--- /dev/null\n"
        "+++ b/n.py\n@@ -0,0 +1 @@\n+x\n"
    )
    added = mail.parse("n.patch", raw.encode())
    assert place([added], {"n.py": b"x\n"}).conflicts[0].problem == "the file exists already"
    made = place([added], {"n.py": None})
    assert made.contents == {"n.py": b"x\n"}
    assert unplace([added], made.contents) == {"n.py": None}
    assert unplace([added], {"n.py": b"x\ny\n"}) is None


def test_bytes_that_are_not_utf8_survive(patch):
    old, new, made = patch
    raw = old.encode() + b"\xff\xfe\n"
    result = place([made], {"f.py": raw})
    assert result.contents["f.py"] == new.encode() + b"\xff\xfe\n"


def test_unplace_refuses_another_content(patch):
    _, new, made = patch
    other = new.replace("twelve", "thirteen").encode()
    assert unplace([made], {"f.py": other}) is None


def test_a_series_is_cumulative(built):
    """The second and third toy patches change the same file."""
    repo, patches = built
    mails = [mail.parse(p.name, p.read_bytes()) for p in sorted(patches.glob("*.patch"))]
    tree = {path: text.encode() for path, text in toys.FILES.items()} | {"vllm/hook.py": None}
    result = place(mails, tree)
    assert not result.conflicts
    after = toys.git(repo, "show", "HEAD:vllm/runner.py").stdout
    assert result.contents["vllm/runner.py"].decode() == after
