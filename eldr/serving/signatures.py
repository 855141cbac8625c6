"""Reading a signature for a decision: what is wrong with it becomes a reason to go by load."""

from __future__ import annotations

import orjson

from eldr.geometry import Geometry
from eldr.routing import Reason
from eldr.signature import Signature, SignatureError, decode


def read_signature(
    raw: bytes | None, geometry: Geometry | None
) -> tuple[Signature | None, Reason | None]:
    """The signature in a prefill answer, or why there is none; both None if nobody sent one.

    Args:
        raw: JSON bytes of `kv_transfer_params.eldr`.
        geometry: of the served model, None if it is not known: nothing is read.
    """
    if raw is None or geometry is None:
        return None, None
    try:
        return decode(orjson.loads(raw), geometry), None
    except SignatureError as error:
        return None, Reason(error.reason)
    except orjson.JSONDecodeError:
        return None, Reason.MALFORMED
