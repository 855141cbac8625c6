"""One request on its way to a decode worker: what is decided on, and the reservation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from eldr.routing.decision import Decision

Headers = list[tuple[str, str]]
REPLICA_HEADER = "x-eldr-replica"  # by which a prefill worker names itself


@dataclass(frozen=True, slots=True)
class Leg:
    """One HTTP request for an engine, as plain values.

    Attributes:
        method, path: of the request.
        headers: names in lower case.
        body: raw.
    """

    method: str
    path: str
    headers: Headers = field(default_factory=list)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers (names in lower case) of an answer."""

    status: int
    headers: Headers

    def header(self, name: str) -> str:
        """A header's value, "" if it is not there."""
        return next((value for key, value in self.headers if key == name), "")


class Route:
    """A request on its way to a decode worker: what the router decides on, and its reservation.

    Under Ray Serve it is the first argument of the handle call, where the request router reads it
    in the proxy's own process. Pickled, only the request's id is left: neither the signature nor
    the reservation reaches the replica.

    Attributes:
        request_id: the client's, or ours.
        prefill: replica that did the prefill.
        signature: raw JSON of the prefill answer's kv_transfer_params.eldr, or None.
        prompt_tokens: length of the prompt, 0 = unknown.
        session: key for session affinity, or None.
        failed: replicas that failed this request; the proxy adds to it.
        skipped: replicas that were chosen but that Serve could not send to.
        decision: the last one, None before it.
    """

    def __init__(
        self,
        request_id: str,
        *,
        prefill: str = "",
        signature: bytes | None = None,
        prompt_tokens: int = 0,
        session: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prefill = prefill
        self.signature = signature
        self.prompt_tokens = prompt_tokens
        self.session = session
        self.failed: set[str] = set()
        self.skipped: set[str] = set()
        self.decision: Decision | None = None
        self._lock = threading.Lock()
        self._release: Callable[[], None] | None = None
        self._closed = False

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.request_id,)

    @property
    def worker(self) -> str:
        """Name of the replica that was chosen, "" before that."""
        return "" if self.decision is None else self.decision.worker.name

    @property
    def band(self) -> frozenset[str]:
        """Replicas that were as good a choice; empty if the policy knows no band."""
        decision = self.decision
        if decision is None or decision.choice.band is None:
            return frozenset()
        return frozenset(decision.names[slot] for slot in decision.choice.band)

    def hold(self, decision: Decision, release: Callable[[], None]) -> None:
        """Takes over a reservation; a route that was closed meanwhile gives it back at once.

        The router runs in another thread than the proxy, which may give up at any moment.
        """
        with self._lock:
            if not self._closed:
                self.decision, self._release = decision, release
                return
        release()

    def release(self) -> None:
        """Gives the reservation back; once, however often it is called."""
        with self._lock:
            release, self._release = self._release, None
        if release is not None:
            release()

    def close(self) -> None:
        """The request has ended: nothing may be reserved for it any more."""
        with self._lock:
            self._closed = True
        self.release()
