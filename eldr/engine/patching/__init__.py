"""The vLLM patch series: check, apply, verify and revert it on an installed wheel or a checkout.

Standard library only (and git for the maintainers' commands); never imports vLLM or torch.
"""

from __future__ import annotations

from eldr.engine.patching import record as _records
from eldr.engine.patching.errors import CannotTell, PatchError, UsageError
from eldr.engine.patching.series import load
from eldr.engine.patching.state import PATCHED, survey
from eldr.engine.patching.target import digest, locate

__all__ = ["CannotTell", "PatchError", "UsageError", "installed_series", "shipped_series"]


def shipped_series() -> str:
    """Digest of the series that this eldr brings along."""
    return load().digest


def installed_series() -> str | None:
    """Digest of the series that the installed vLLM really holds, verified by hash.

    None if there is no vLLM, it is unpatched, or a patched file was edited since. A few
    milliseconds: it hashes the touched files only.
    """
    series = load()
    try:
        target = locate(series.upstream)
        found = survey(series, target)
    except PatchError:
        return None
    if found.state == PATCHED:
        return series.digest
    record = _records.load(_records.path_in(target.root, series.upstream.name))
    if record is None:
        return None
    intact = all(digest(target.read(path)) == e.after for path, e in record.files.items())
    return record.series if intact else None
