"""Reads one patch: a `git format-patch` mail with its subject, trailers, files and hunks.

Only what a hook series needs is accepted: changed and added text files. Renames, deletions, mode
changes and binary patches are refused, because a tree patched that way could not be restored by
content alone.
"""

from __future__ import annotations

import email.header
import re
from collections.abc import Iterator
from dataclasses import dataclass

from eldr.engine.patching.errors import PatchError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")
_DIFF = re.compile(r"diff --git a/(\S+) b/(\S+)\n")
_TRAILER = re.compile(r"([A-Z][A-Za-z-]*): (.+)")
_UNSUPPORTED = (
    "rename ",
    "copy ",
    "similarity ",
    "deleted file",
    "old mode",
    "GIT binary",
    "Binary ",
)
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True, slots=True)
class Hunk:
    """One change: `old` lines (with endings) at 1-based `old_start` become `new` at `new_start`.

    `trailing` counts the context lines at the end; none means that the hunk ends the file.
    """

    old_start: int
    new_start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    trailing: int
    added: int
    removed: int
    heading: str


@dataclass(frozen=True, slots=True)
class FilePatch:
    """All hunks of one file; `adds_file` when the file does not exist before."""

    path: str
    adds_file: bool
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """One mail of the series."""

    name: str
    subject: str
    trailers: dict[str, str]
    files: tuple[FilePatch, ...]
    raw: bytes

    @property
    def added(self) -> int:
        """Lines added over all files."""
        return sum(hunk.added for file in self.files for hunk in file.hunks)

    @property
    def removed(self) -> int:
        """Lines removed over all files."""
        return sum(hunk.removed for file in self.files for hunk in file.hunks)


@dataclass(slots=True)
class _Lines:
    """A cursor over the patch's lines that can say where it stands."""

    name: str
    lines: list[str]
    at: int = 0

    def peek(self) -> str:
        return self.lines[self.at] if self.at < len(self.lines) else ""

    def take(self) -> str:
        line = self.peek()
        if not line:
            raise self.error("ends in the middle of a hunk")
        self.at += 1
        return line

    def error(self, what: str) -> PatchError:
        return PatchError(f"{self.name}, line {self.at + 1}: {what}")


def split_lines(text: str) -> list[str]:
    """Lines with their endings, split at newline only, as git does."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def decode(raw: bytes) -> str:
    """Text of a file such that `encode` gives the same bytes back, whatever they are."""
    return raw.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    """Inverse of `decode`."""
    return text.encode("utf-8", "surrogateescape")


def parse(name: str, raw: bytes) -> Patch:
    """Reads a patch mail.

    Raises:
        PatchError: with file name and line number, if it is not a mail of text changes.
    """
    if b"\r\n" in raw.split(b"\ndiff --git ", 1)[0]:
        raise PatchError(
            f"{name}: has CRLF line endings, so a checkout or a mailer has rewritten it; "
            "restore the original bytes (git: mark patches/* as -text)"
        )
    cursor = _Lines(name, split_lines(decode(raw)))
    subject, trailers = _header(cursor)
    files = tuple(_files(cursor))
    paths = [file.path for file in files]
    if len(set(paths)) != len(paths):
        raise PatchError(f"{name}: names a file twice")
    return Patch(name, subject, trailers, files, raw)


def _header(cursor: _Lines) -> tuple[str, dict[str, str]]:
    subject, body, in_body = "", list[str](), False
    while not cursor.peek().startswith("diff --git "):
        if not cursor.peek():
            raise cursor.error("holds no `diff --git` line")
        line = cursor.take().rstrip("\n")
        if in_body:
            body.append(line)
        elif line.startswith("Subject: "):
            subject = line.removeprefix("Subject: ")
            while cursor.peek().startswith(" "):
                subject += cursor.take().rstrip("\n")
        elif not line:
            in_body = True
    if not subject:
        raise PatchError(f"{cursor.name}: has no Subject line: write it with `git format-patch`")
    return str(email.header.make_header(email.header.decode_header(subject))), _trailers(body)


def _trailers(body: list[str]) -> dict[str, str]:
    """The last paragraph before `---`, when it is made of `Key: value` lines."""
    if "---" in body:
        body = body[: body.index("---")]
    text = "\n".join(body).strip()
    last = text.rsplit("\n\n", 1)[-1].splitlines()
    found = [_TRAILER.fullmatch(line) for line in last]
    return {m[1]: m[2] for m in found if m} if all(found) else {}


def _files(cursor: _Lines) -> Iterator[FilePatch]:
    while cursor.peek().startswith("diff --git "):
        yield _file(cursor)
    while (line := cursor.peek()).strip():
        if line.startswith("-- "):
            return
        raise cursor.error(f"unexpected text after a hunk: {line.strip()!r}")


def _file(cursor: _Lines) -> FilePatch:
    match = _DIFF.fullmatch(cursor.take())
    if match is None or match[1] != match[2]:
        raise cursor.error("a `diff --git` line must name one file twice, without spaces")
    path, adds = match[1], False
    if path.startswith("/") or ".." in path.split("/"):
        raise cursor.error(f"refuses to leave the tree: {path}")
    while not cursor.peek().startswith("@@ "):
        line = cursor.take()
        adds = adds or line.startswith("new file mode")
        if line.startswith(_UNSUPPORTED) or line.startswith("diff --git "):
            raise cursor.error(f"only added and changed text files are supported: {path}")
    hunks = []
    while cursor.peek().startswith("@@ "):
        hunks.append(_hunk(cursor))
    return FilePatch(path, adds, tuple(hunks))


def _hunk(cursor: _Lines) -> Hunk:
    match = _HUNK.fullmatch(cursor.take().rstrip("\n"))
    if match is None:
        raise cursor.error("malformed hunk header")
    want_old, want_new = (int(match[i]) if match[i] is not None else 1 for i in (2, 4))
    old, new, signs = list[str](), list[str](), ""
    while len(old) < want_old or len(new) < want_new:
        line = cursor.take()
        sign, rest = line[0], line[1:]
        if sign not in " -+":
            raise cursor.error(f"expected a context, `-` or `+` line, found {line.rstrip()!r}")
        if cursor.peek().startswith(_NO_NEWLINE):
            cursor.take()
            rest = rest.removesuffix("\n")
        signs += sign
        if sign in " -":
            old.append(rest)
        if sign in " +":
            new.append(rest)
    if len(old) != want_old or len(new) != want_new:
        raise cursor.error("hunk is longer than its header says")
    trailing = len(signs) - len(signs.rstrip(" "))
    starts, sizes = (int(match[1]), int(match[3])), (signs.count("+"), signs.count("-"))
    return Hunk(*starts, tuple(old), tuple(new), trailing, *sizes, match[5].strip())
