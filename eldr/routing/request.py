"""What a policy may know about one request, and the closed set of reasons to fall back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from eldr.signature import Signature


class Reason(StrEnum):
    """Why a decision was made on load alone. A closed set, so that it can label a counter."""

    NO_SIGNATURE = "no_signature"
    VERSION = "version"
    GEOMETRY = "geometry"
    MALFORMED = "malformed"
    EMPTY = "empty"
    LOW_COVERAGE = "low_coverage"
    NO_PARTITION = "no_partition"
    NO_CENTROID = "no_centroid"
    PARTITION_PAUSED = "partition_paused"
    NO_SESSION = "no_session"
    NO_DOMAIN = "no_domain"
    POLICY_ERROR = "policy_error"


@dataclass(slots=True)
class RouteRequest:
    """One request at the moment its decode worker is picked.

    Attributes:
        id: unique among running requests.
        signature: decoded signature, or None.
        problem: why there is no signature, when the caller knows (`Reason(error.reason)` of a
            SignatureError); None means that none was sent.
        prompt_tokens: KV tokens that decoding starts with; 0 takes the signature's.
        new_tokens: predicted tokens to decode, None = unknown.
        session: key for session affinity, None = none.
        domain: label for the domain oracle of studies, None = none.
    """

    id: str
    signature: Signature | None = None
    problem: Reason | None = None
    prompt_tokens: int = 0
    new_tokens: int | None = None
    session: str | None = None
    domain: str | None = None

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the decode worker holds for this request at the start."""
        if self.prompt_tokens > 0 or self.signature is None:
            return max(self.prompt_tokens, 0)
        return self.signature.tokens
