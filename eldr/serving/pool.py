"""A pool of workers of one role: membership, conditions, and who may get the next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence, Set

from eldr.serving.condition import State
from eldr.serving.endpoints import Endpoint, Role
from eldr.serving.http1 import UpstreamError

log = logging.getLogger(__name__)

Names = Set[str]
_NONE: frozenset[str] = frozenset()
# A worker that says it is full without saying for how long is spared this many seconds.
_BUSY_SECONDS = 0.5
_LONGEST_BUSY = 30.0
# Failures so shortly after a restart was noticed are the old process's.
_OLD_SECONDS = 0.5


class Pool:
    """The workers of one role.

    Attributes:
        role: "prefill" or "decode".
        on_event: called with (endpoint, event) for ejected, down, returned, joined, left.
    """

    def __init__(self, role: Role, endpoints: Iterable[Endpoint] = ()) -> None:
        self.role = role
        self.on_event: Callable[[Endpoint, str], None] = lambda endpoint, event: None
        self._members: dict[str, Endpoint] = {}
        # Members in any state but plainly up; empty in good times, and then nothing is computed.
        self._special: set[Endpoint] = set()
        self._now = asyncio.get_running_loop().time
        for endpoint in endpoints:
            self.join(endpoint)

    # Membership

    @property
    def endpoints(self) -> list[Endpoint]:
        """All members, leaving ones included."""
        return list(self._members.values())

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self._members)

    def get(self, name: str) -> Endpoint | None:
        """The member of that name."""
        return self._members.get(name)

    def join(self, endpoint: Endpoint) -> None:
        """Adds a member.

        Raises:
            ValueError: the name is a member already.
        """
        if endpoint.name in self._members:
            raise ValueError(f"{self.role} worker {endpoint.name} is in the pool already")
        self._members[endpoint.name] = endpoint
        if endpoint.awaited:
            endpoint.condition.down = True
            self._special.add(endpoint)

    def arrived(self, endpoint: Endpoint) -> None:
        """A member that never answered before does now: it gets requests."""
        endpoint.awaited = False
        endpoint.condition.checked(self._now(), True, since=self._now())

    def drain(self, name: str, draining: bool = True) -> None:
        """Stops, or resumes, giving a member new requests.

        Raises:
            KeyError: no such member.
        """
        endpoint = self._members[name]
        endpoint.condition.draining = draining
        endpoint.leaving = False
        self._special.add(endpoint)

    def leave(self, name: str) -> None:
        """Removes a member as soon as its last request has ended.

        Raises:
            KeyError: no such member.
        """
        self.drain(name)
        endpoint = self._members[name]
        endpoint.leaving = True
        self.settle(endpoint)

    def settle(self, endpoint: Endpoint) -> bool:
        """Lets a leaving member go once it is idle; True if it went now."""
        if not endpoint.leaving or endpoint.running or endpoint.name not in self._members:
            return False
        del self._members[endpoint.name]
        self._special.discard(endpoint)
        self.on_event(endpoint, "left")
        return True

    # Conditions

    def succeeded(self, endpoint: Endpoint) -> None:
        """A member answered a request as a healthy worker does."""
        if endpoint.condition.succeeded(self._now()):
            self._returned(endpoint)

    def failed(self, endpoint: Endpoint, error: UpstreamError) -> None:
        """A member gave no usable answer.

        What the router cut off itself, or an old process lost, says nothing of it.
        """
        now = self._now()
        if error.kind == "cut" or now < endpoint.restarted_at + _OLD_SECONDS:
            return
        # Nobody listens, or nothing came for the whole time limit: one such failure is enough.
        certain, unreachable = error.kind in ("connect", "timeout"), error.kind == "connect"
        if endpoint.condition.failed(now, certain=certain, unreachable=unreachable):
            log.warning("%s worker %s ejected: %s", self.role, endpoint.name, error)
            self._special.add(endpoint)
            self.on_event(endpoint, "ejected")

    def full(self, endpoint: Endpoint, retry_after: float | None) -> None:
        """A member said that it is full (429, 503): it is spared for a moment, and not blamed."""
        now = self._now()
        endpoint.condition.heard = now
        pause = _BUSY_SECONDS if retry_after is None else min(retry_after, _LONGEST_BUSY)
        endpoint.condition.busy_until = now + pause
        self._special.add(endpoint)

    def weigh(self, endpoint: Endpoint, others: float) -> None:
        """A member was seen to run so many requests of others."""
        endpoint.others = others

    def restarted(self, endpoint: Endpoint, since: float) -> None:
        """A member's process is another one than at a time: what was sent to the old one is lost.

        Its cache is cold, so it gets its share back slowly, like one that was away.
        """
        log.info("%s worker %s was restarted", self.role, endpoint.name)
        endpoint.engine = (b"", endpoint.origin.lost)
        endpoint.others, endpoint.restarted_at = 0.0, self._now()
        endpoint.origin.fail_silent(since, "reset", "the worker was restarted")
        endpoint.origin.drop_idle()
        endpoint.condition.restarted(self._now())
        self._special.add(endpoint)
        self.on_event(endpoint, "restarted")

    def checked(self, endpoint: Endpoint, ok: bool, since: float, why: str) -> None:
        """The result of an active health check; `since` is when the one before it started."""
        # A busy worker may be slow to answer checks while it serves requests well.
        ok = ok or endpoint.origin.heard_since(since)
        changed = endpoint.condition.checked(self._now(), ok, since=since)
        if endpoint.condition.down and not ok:
            # At every check, since a request may have been sent shortly before the last one.
            endpoint.origin.fail_silent(since)
        if changed and endpoint.condition.down:
            log.warning("%s worker %s is down: %s", self.role, endpoint.name, why)
            self._special.add(endpoint)
            self.on_event(endpoint, "down")
        elif changed:
            self._returned(endpoint)

    def _returned(self, endpoint: Endpoint) -> None:
        log.info("%s worker %s is back", self.role, endpoint.name)
        self._special.add(endpoint)
        self.on_event(endpoint, "returned")

    # Choice

    def able(self) -> bool:
        """Whether any member may get requests."""
        return any(
            e.condition.state(self._now()) not in (State.DOWN, State.DRAINING)
            for e in self._members.values()
        )

    def sound(self, failed: Names) -> bool:
        """Whether a member that has not failed a request is sound."""
        now = self._now()
        return any(
            name not in failed and e.condition.sound(now) for name, e in self._members.items()
        )

    def exclusions(self, failed: Names = _NONE) -> Sequence[Names]:
        """Sets of names to leave out, from the most careful choice to the last resort.

        First all but plainly usable members are left out, for a request that failed somewhere those
        of doubt too; then those that should merely be spared are let in; then ejected and at last
        even down ones, for when everything seems broken a try is better than a no: they may be back
        already. Draining members and those that never answered get no request at all.
        """
        doubtful = {n for n, e in self._members.items() if e.condition.doubtful} if failed else None
        if not self._special and not doubtful:
            return (failed,)
        draining, *kinds = self._sort()
        if doubtful:
            kinds.append(doubtful)
        tiers = [failed | draining]
        for names in kinds:
            if names:
                tiers.append(tiers[-1] | names)
        tiers.reverse()
        return tiers

    def _sort(self) -> tuple[set[str], set[str], set[str], set[str]]:
        """Names of the draining (or awaited), down, ejected and spared members."""
        now = self._now()
        draining: set[str] = set()
        down: set[str] = set()
        ejected: set[str] = set()
        spared: set[str] = set()
        by_state = {State.DRAINING: draining, State.DOWN: down, State.EJECTED: ejected}
        for endpoint in list(self._special):
            # Nobody has looked yet at what serves at an awaited member's address.
            state = State.DRAINING if endpoint.awaited else endpoint.condition.state(now)
            busy = endpoint.condition.busy_until > now
            if state in by_state:
                by_state[state].add(endpoint.name)
            elif state is State.UP and not busy:
                self._special.discard(endpoint)
            elif busy or self._over_share(endpoint, state, now):
                spared.add(endpoint.name)
        return draining, down, ejected, spared

    def _over_share(self, endpoint: Endpoint, state: State, now: float) -> bool:
        """Whether a returning member already has all that it should get for now."""
        if state is State.TRIAL:
            return endpoint.running > 0
        if state is not State.RAMPING:
            return False
        fair = sum(e.running for e in self._members.values()) / len(self._members) + 1.0
        return endpoint.running >= max(1.0, fair * endpoint.condition.share(now))
