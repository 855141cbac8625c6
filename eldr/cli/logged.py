"""Signatures of served traffic: what a router's decision log holds of them, as a recorded file.

`eldr serve --decision-log FILE --decision-log-signatures` writes the signatures as they came from
the engine. A signature names its geometry by a digest; together with its number of cells that is
enough to find it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eldr.geometry import Geometry, find
from eldr.signature import Signature, SignatureError, cells_of, decode

if TYPE_CHECKING:
    from eldr.routing.recorded import Recorded


class LogError(ValueError):
    """A decision log without usable signatures; the message says which file and why."""


def is_log(path: str) -> bool:
    """Whether a file looks like JSON lines."""
    try:
        with open(path, "rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def load_signatures(path: str) -> Recorded:
    """Recorded signatures from a `.npz` or from a decision log.

    Raises:
        RecordedError, LogError: the file cannot be used.
    """
    from eldr.routing.recorded import load_recorded

    return from_logs([path])[0] if is_log(path) else load_recorded(path)


def from_logs(
    paths: Sequence[str], *, model: str = "", form: str = "exact", limit: int = 0
) -> tuple[Recorded, int]:
    """The signatures of decision logs, oldest first, and how many decisions had none to use.

    Args:
        paths: files, in the order of time.
        model: the model's name, which a log does not hold.
        form: what to make of the signatures, as in `gather`.
        limit: stop after this many signatures, 0 = never.

    Raises:
        LogError: unreadable, malformed, signatures of two geometries, or none at all.
    """
    from eldr.cli.record import gather

    geometry: Geometry | None = None
    found: list[Signature] = []
    left_out = 0
    for path, row in _rows(paths):
        payload = row.get("signature")
        if not isinstance(payload, Mapping):
            left_out += 1
            continue
        try:
            geometry = geometry or _geometry(payload)
            signature = decode(payload, geometry)
        except SignatureError as error:
            who = f"{path}: request {row.get('request_id')!r}"
            if error.reason == "geometry" and geometry is not None:
                raise LogError(f"{who}: {error}; one log, one model") from error
            left_out += 1
            continue
        if signature.covered >= 1 and signature.counts.any():
            found.append(signature)
            if len(found) == limit:
                break
        else:
            left_out += 1
    if geometry is None or not found:
        raise LogError(
            f"{', '.join(paths)}: {left_out} decisions, none with a usable signature; "
            "run `eldr serve` with --decision-log-signatures"
        )
    return gather(geometry, model, found, form=form), left_out


def _rows(paths: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    from eldr.serving.decision_log import read_decisions

    for path in paths:
        try:
            for row in read_decisions(path):
                yield path, row
        except (OSError, ValueError) as error:
            text = str(error)
            raise LogError(text if path in text else f"{path}: {text}") from error


def _geometry(payload: Mapping[str, Any]) -> Geometry:
    digest, cells = payload.get("geometry"), cells_of(payload)
    geometry = find(digest, cells) if isinstance(digest, str) else None
    if geometry is None:
        raise SignatureError(
            "geometry", f"signature: no geometry of {cells} cells has the digest {digest!r}"
        )
    return geometry
