"""Reading a signature for a decision: what is wrong with it becomes a reason to go by load."""

from __future__ import annotations

import logging

import orjson

from eldr.geometry import Geometry
from eldr.routing import Reason
from eldr.signature import Signature, SignatureError, decode

log = logging.getLogger(__name__)


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
    except Exception:
        # A fault of ours must not cost a request: load alone decides, and the reason counts it.
        log.exception("a signature could not be read")
        return None, Reason.POLICY_ERROR
