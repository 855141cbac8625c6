"""Recomputes `UPSTREAM.toml` from a tree of unmodified upstream files and the patches."""

from __future__ import annotations

from dataclasses import replace

from eldr.engine.patching import manifest
from eldr.engine.patching import record as records
from eldr.engine.patching.errors import PatchError
from eldr.engine.patching.manifest import Pin, Upstream
from eldr.engine.patching.place import Tree, place, unplace
from eldr.engine.patching.record import Record
from eldr.engine.patching.series import Series
from eldr.engine.patching.target import Target, digest


def pristine(series: Series, target: Target) -> dict[str, bytes | None]:
    """Upstream's own content of every touched file, whether the tree is patched or not.

    An installed wheel proves it by its RECORD. In a source tree the files count as they stand, or
    as an earlier apply recorded them; were they not upstream's, the patches would not fit.

    Raises:
        PatchError: a file is neither what the wheel installed nor patched by this tool.
    """
    record = records.load(records.path_in(target.root, series.upstream.name))
    tree = {path: _recorded_original(path, target, record) for path in series.paths}
    if not target.recorded:
        return tree
    wrong = {path: raw for path, raw in tree.items() if not _as_installed(path, raw, target)}
    undone = unplace(series.patches, wrong)
    for path in wrong:
        if undone is None or not _as_installed(path, undone[path], target):
            raise PatchError(f"{path} in {target} is not what the wheel installed")
    return tree | (undone or {})


def _recorded_original(path: str, target: Target, record: Record | None) -> bytes | None:
    now = target.read(path)
    entry = record.files.get(path) if record else None
    return entry.original if entry and entry.explains(digest(now)) else now


def _as_installed(path: str, raw: bytes | None, target: Target) -> bool:
    return digest(raw) == target.recorded.get(path, manifest.ABSENT)


def pinned(series: Series, tree: Tree) -> Upstream:
    """The manifest with the hashes of `tree` before and after the series.

    Raises:
        PatchError: a hunk conflicts, or does not sit exactly where its header says.
    """
    result = place(series.patches, tree)
    for p in result.placements:
        if p.verdict != "ok":
            raise PatchError(
                f"{p.patch}, {p.path} hunk {p.number}: {p.problem or f'off by {p.offset} lines'}; "
                "pins need patches made for exactly this tree (see `eldr patch rebase`)"
            )
    files = {path: Pin(digest(tree[path]), digest(result.contents[path])) for path in series.paths}
    return replace(series.upstream, files=files)


def pin(series: Series, target: Target) -> bool:
    """Writes the manifest's hashes anew; whether they changed.

    Raises:
        PatchError: another release than the manifest names, or see `pristine` and `pinned`.
    """
    if target.version and not series.upstream.matches(target.version):
        raise PatchError(f"{target}: the manifest is for version {series.upstream.version}")
    text = manifest.render(pinned(series, pristine(series, target)))
    file = series.directory / manifest.FILE
    changed = file.read_text("utf-8") != text
    if changed:
        file.write_text(text, "utf-8")
    return changed
