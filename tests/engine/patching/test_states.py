"""Any order of applies, reverts, edits, reinstalls and kills: never a lost file, never a lie."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eldr.engine.patching import change, series, target, write
from eldr.engine.patching.errors import PatchError
from eldr.engine.patching.pin import pinned
from eldr.engine.patching.place import place
from eldr.engine.patching.state import PATCHED, SOUND, survey
from tests.engine.patching import toy as toys

FILES = ("vllm/core/scheduler.py", "vllm/hook.py", "vllm/runner.py")


class Killed(BaseException):
    """The process is gone: no clean-up code runs after this."""


class Tree(RuleBasedStateMachine):
    """A wheel, two series for it, and a model of which files the user has touched."""

    both = ()  # the whole series and its first two patches, set by the test

    @initialize()
    def install(self):
        self.folder = tempfile.TemporaryDirectory()
        self.site = toys.wheel(Path(self.folder.name) / "site")
        self.pristine = self.contents()
        self.edited = set()

    def contents(self):
        return {
            path: (self.site / path).read_bytes() if (self.site / path).exists() else None
            for path in (*FILES, "vllm/__init__.py")
        }

    def where(self):
        return target.locate(self.both[0][0].upstream, self.site)

    def result_of(self, which):
        """What the files must be once a series is applied."""
        return {**self.pristine, **which[1]}

    @rule(number=st.integers(0, 1))
    def apply(self, number):
        before = self.contents()
        try:
            change.apply(self.both[number][0], self.where())
        except PatchError:
            assert self.edited, "refused although nobody edited anything"
            assert self.contents() == before
        else:
            expected = self.result_of(self.both[number])
            for path in self.edited:  # a file that this series has nothing to do with
                assert path not in self.both[number][1]
                expected[path] = before[path]
            assert self.contents() == expected

    @rule(number=st.integers(0, 1), after=st.integers(1, 4), back=st.booleans())
    def kill(self, number, after, back):
        """An apply or revert dies after some of its renames."""
        left = [after]

        def die(file):
            left[0] -= 1
            if not left[0]:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(write, "_drop_bytecode", die)
            patch.setattr(write, "_put_back", lambda undo: None)
            patch.setattr(write, "_discard", lambda staged: None)
            try:
                work = change.revert if back else change.apply
                work(self.both[number][0], self.where())
            except Killed:
                pass  # the tree is as the kill left it; the invariant below judges it
            except PatchError:
                assert self.edited

    @rule(number=st.integers(0, 1))
    def revert(self, number):
        before = self.contents()
        try:
            change.revert(self.both[number][0], self.where())
        except PatchError:
            assert self.edited
            assert self.contents() == before
        else:
            # What the user edited after a revert is none of the tool's business.
            assert self.contents() == {**self.pristine, **{p: before[p] for p in self.edited}}
            assert not (self.site / "vllm/_eldr_patches.json").exists()

    @precondition(lambda self: not self.edited)
    @rule(path=st.sampled_from(FILES), gone=st.booleans())
    def edit(self, path, gone):
        """The user changes or removes a file, and puts it back later or reinstalls."""
        self.edited.add(path)
        self.saved = self.contents()[path]
        (self.site / path).unlink(missing_ok=True)
        if not gone:
            (self.site / path).write_text("mine = 1\n")
        if self.contents()[path] == self.saved or self.contents()[path] == self.pristine[path]:
            self.edited.clear()  # an absent file was removed

    @precondition(lambda self: self.edited)
    @rule()
    def put_back(self):
        (path,) = self.edited
        (self.site / path).unlink(missing_ok=True)
        if self.saved is not None:
            (self.site / path).write_bytes(self.saved)
        self.edited.clear()

    @rule()
    def reinstall(self):
        """As pip does: the wheel's files come back, others stay."""
        toys.wheel(self.site)
        self.edited -= set(toys.FILES)

    @invariant()
    def says_the_truth(self):
        if not hasattr(self, "site"):
            return
        for which, made in self.both:
            found = survey(which, self.where())
            if found.state == PATCHED:
                now = self.contents()
                assert {path: now[path] for path in made} == made
            if not self.edited:
                assert all(file.state in SOUND for file in found.files), found.files

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


def test_tree_survives_any_history(built):
    _, patches = built
    whole = series.load(patches)
    tree = {path: text.encode() for path, text in toys.FILES.items()} | {"vllm/hook.py": None}

    both = []
    for count in (3, 2):
        part = series.Series(patches, whole.upstream, whole.patches[:count])
        part = replace(part, upstream=pinned(part, {path: tree[path] for path in part.paths}))
        both.append((part, place(part.patches, tree).contents))

    class Machine(Tree):
        pass

    Machine.both = tuple(both)
    case = Machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
    case().runTest()
