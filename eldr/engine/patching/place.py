"""Places a series' hunks on file contents, in memory; never fuzzy, never silent.

A hunk fits where all its old lines match, byte for byte. It may sit elsewhere than its header
says (`offset`), but only if there is exactly one such place: an ambiguous hunk is a conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from eldr.engine.patching.mail import FilePatch, Hunk, Patch, decode, encode, split_lines

# Upstream lines shown beyond a conflicting hunk: room for what upstream inserted.
_MARGIN = 6

Tree = Mapping[str, bytes | None]  # content by path; None: the file does not exist


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one hunk went.

    Attributes:
        patch, path, number: which hunk (1-based within its file).
        line: 1-based line in the file as the hunk found it; for a conflict, of the closest place.
        offset: lines between the header's place and this one.
        problem: empty if it fits, else why it does not.
        expected, found: for a conflict, the hunk's old lines and the upstream lines now there.
    """

    patch: str
    path: str
    number: int
    line: int
    offset: int
    problem: str = ""
    expected: tuple[str, ...] = ()
    found: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """`ok`, `offset` or `conflict`."""
        return "conflict" if self.problem else "offset" if self.offset else "ok"


@dataclass(frozen=True, slots=True)
class Result:
    """What a series makes of a tree: the new contents and every hunk's placement."""

    contents: dict[str, bytes]
    placements: tuple[Placement, ...]

    @property
    def conflicts(self) -> tuple[Placement, ...]:
        """The hunks that found no place."""
        return tuple(p for p in self.placements if p.problem)


def place(patches: Iterable[Patch], tree: Tree) -> Result:
    """Applies the patches, each on the result of the ones before it.

    A hunk that conflicts is left out and the rest is still tried, so that one run reports all.
    """
    contents = dict(tree)
    placements = list[Placement]()
    for patch in patches:
        for file in patch.files:
            text, placed = _place_file(patch.name, file, contents.get(file.path))
            placements += placed
            if text is not None:
                contents[file.path] = text
    touched = {p.path for p in placements}
    made = {path: raw for path, raw in contents.items() if path in touched and raw is not None}
    return Result(made, tuple(placements))


def unplace(patches: Iterable[Patch], tree: Tree) -> dict[str, bytes | None] | None:
    """The tree before the patches, or None if it is not exactly what they make.

    Only the files that `tree` names are considered.
    """
    before = dict(tree)
    for patch in reversed(list(patches)):
        for file in (f for f in patch.files if f.path in tree):
            raw = before[file.path]
            if raw is None:
                return None
            back = tuple(_inverse(hunk) for hunk in file.hunks)
            change = FilePatch(file.path, False, back)
            text, placed = _place_file(patch.name, change, raw)
            if any(p.problem or p.offset for p in placed) or (file.adds_file and text):
                return None
            before[file.path] = None if file.adds_file else text
    return before


def _inverse(hunk: Hunk) -> Hunk:
    return replace(
        hunk,
        old_start=hunk.new_start,
        new_start=hunk.old_start,
        old=hunk.new,
        new=hunk.old,
        added=hunk.removed,
        removed=hunk.added,
    )


def _place_file(
    name: str, file: FilePatch, raw: bytes | None
) -> tuple[bytes | None, list[Placement]]:
    if file.adds_file == (raw is not None):
        problem = "the file exists already" if file.adds_file else "the file does not exist"
        return raw, [
            Placement(name, file.path, i, h.old_start, 0, problem, h.old)
            for i, h in enumerate(file.hunks, 1)
        ]
    lines = split_lines(decode(raw or b""))
    placements = list[Placement]()
    growth = floor = 0
    for number, hunk in enumerate(file.hunks, 1):
        # `-0,0` (a new file) counts from line 0.
        header = growth + (hunk.old_start - 1 if hunk.old else hunk.old_start)
        at, problem = _find(hunk, lines, header, floor)
        size = len(hunk.old)
        if problem:
            found = tuple(lines[at : at + size + _MARGIN])
            placed = Placement(name, file.path, number, at + 1, 0, problem, hunk.old, found)
        else:
            placed = Placement(name, file.path, number, at + 1, at - header)
            lines[at : at + size] = hunk.new
            floor = at + len(hunk.new)
            growth += len(hunk.new) - size
        placements.append(placed)
    return encode("".join(lines)), placements


def _find(hunk: Hunk, lines: list[str], header: int, floor: int) -> tuple[int, str]:
    """0-based line and an empty problem, or the closest line and the problem."""
    if _fits(hunk, lines, header, floor):
        return header, ""
    fits = [at for at in range(floor, len(lines)) if _fits(hunk, lines, at, floor)]
    if len(fits) == 1 and hunk.old:
        return fits[0], ""
    if fits and hunk.old:
        return fits[0], "fits in several places: lines " + ", ".join(str(at + 1) for at in fits)
    return _closest(hunk, lines, header), "upstream's lines differ"


def _fits(hunk: Hunk, lines: list[str], at: int, floor: int) -> bool:
    end = at + len(hunk.old)
    if not floor <= at <= end <= len(lines) or tuple(lines[at:end]) != hunk.old:
        return False
    # Like git: without context on one side, that side is the file's own end.
    return (hunk.old_start > 1 or at == 0) and (hunk.trailing > 0 or end == len(lines))


def _closest(hunk: Hunk, lines: list[str], header: int) -> int:
    """Start of the window that holds most of the hunk's old lines; the nearest if several do."""
    wanted = {line for line in hunk.old if line.strip()}
    span = len(hunk.old) + _MARGIN

    def rank(at: int) -> tuple[int, int]:
        return -len(wanted.intersection(lines[at : at + span])), abs(at - header)

    return min(range(max(1, len(lines) - len(hunk.old) + 1)), key=rank)
