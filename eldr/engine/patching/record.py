"""What `apply` leaves in a patched tree: which series it holds, and the originals to restore.

With the originals at hand a tree can be reverted, or moved to a newer series, even when the series
that patched it is long gone.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from eldr.engine.patching.errors import PatchError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A patched file; hashes are sha256 in hex, or `absent`.

    Attributes:
        before, original: upstream's own content.
        after: as the series makes it; equal to `before` if only an earlier series touched it.
        was: what this apply found, so that a killed one leaves no file unknown.
    """

    before: str
    after: str
    was: str
    original: bytes | None

    def explains(self, sha256: str) -> bool:
        """Whether a content can only come from this tool."""
        return sha256 in (self.after, self.was)


@dataclass(frozen=True, slots=True)
class Record:
    """The series applied to a tree: its digest, the release it was for, and the files."""

    series: str
    version: str
    files: dict[str, Entry]


def path_in(root: Path, package: str) -> Path:
    """Where a tree's record is kept: inside the package, so that it moves and dies with it."""
    return root / package / "_eldr_patches.json"


def dump(record: Record) -> bytes:
    """The record as JSON; originals deflated, base64."""
    files = {
        path: {
            "before": e.before,
            "after": e.after,
            "was": e.was,
            "original": _pack(e.original),
        }
        for path, e in sorted(record.files.items())
    }
    data = {"v": FORMAT, "series": record.series, "version": record.version, "files": files}
    return (json.dumps(data, indent=1) + "\n").encode()


def load(path: Path) -> Record | None:
    """Reads a tree's record; None if the tree has none.

    Raises:
        PatchError: the file is not a record this version understands.
    """
    try:
        data = json.loads(path.read_bytes())
        if data["v"] != FORMAT:
            raise PatchError(f"{path}: format {data['v']}, expected {FORMAT}: use the eldr of then")
        files = {
            name: Entry(e["before"], e["after"], e["was"], _unpack(e["original"]))
            for name, e in data["files"].items()
        }
        return Record(data["series"], data["version"], files)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise PatchError(f"{path}: damaged ({error}); reinstall vLLM and apply again") from error


def _pack(raw: bytes | None) -> str | None:
    return None if raw is None else base64.b64encode(zlib.compress(raw, 9)).decode("ascii")


def _unpack(text: str | None) -> bytes | None:
    return None if text is None else zlib.decompress(base64.b64decode(text, validate=True))
