"""A worker's condition, the retry budget and the pool's tiers, with a clock of the tests."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from eldr.serving.condition import Condition, Rules, State
from eldr.serving.endpoints import Endpoint
from eldr.serving.http1 import UpstreamError
from eldr.serving.origins import Client
from eldr.serving.pool import Pool
from eldr.serving.prefill_pool import PrefillPool
from eldr.serving.retry import RetryBudget, RetryRules, Tries
from tests.serving.mocks.worker import MockWorker, workers
from tests.serving.rig import rig, until

RULES = Rules(failures=3, pause=2.0, ramp=10.0, check_failures=2)


def test_breaker_opens_tries_and_closes() -> None:
    c = Condition(RULES)
    assert [c.failed(0.0), c.failed(0.0), c.failed(0.0)] == [False, False, True]
    assert c.state(1.9) is State.EJECTED
    assert c.state(2.0) is State.TRIAL
    assert c.succeeded(2.5) is True
    assert c.state(2.5) is State.RAMPING
    assert c.share(7.5) == pytest.approx(0.5)
    assert c.state(12.5) is State.UP


def test_a_success_forgives_failures() -> None:
    c = Condition(RULES)
    for _ in range(10):
        assert c.failed(0.0) is False
        assert c.failed(0.0) is False
        assert c.succeeded(0.0) is False


def test_failed_trials_double_the_pause_up_to_a_bound() -> None:
    c = Condition(RULES)
    c.failed(0.0, certain=True)
    now, pauses = 0.0, []
    for _ in range(6):
        until = next(t / 2 for t in range(1000) if c.state(now + t / 2) is State.TRIAL)
        pauses.append(until)
        now += until
        c.failed(now)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 16.0, 16.0]


def test_late_failures_of_old_requests_do_not_prolong_an_ejection() -> None:
    c = Condition(RULES)
    c.failed(0.0, certain=True)
    for _ in range(5):
        assert c.failed(1.0) is False
    assert c.state(2.0) is State.TRIAL


def test_checks_take_down_and_bring_back() -> None:
    c = Condition(RULES)
    assert c.checked(1.0, False, since=0.0) is False
    assert c.checked(2.0, False, since=1.0) is True
    assert c.state(2.0) is State.DOWN
    assert c.checked(3.0, True, since=2.0) is True
    assert c.state(3.0) is State.RAMPING


def test_a_worker_that_answers_requests_is_not_taken_down() -> None:
    c = Condition(RULES)
    for now in range(1, 20):
        c.succeeded(now - 0.5)
        assert c.checked(float(now), False, since=now - 1.0) is False


def test_good_check_ends_the_pause_of_an_unreachable_worker_only() -> None:
    hung, gone = Condition(RULES), Condition(RULES)
    hung.failed(0.0, certain=True)
    gone.failed(0.0, certain=True, unreachable=True)
    for c in (hung, gone):
        c.checked(0.5, True, since=0.0)
    assert hung.state(0.5) is State.EJECTED
    assert gone.state(0.5) is State.TRIAL


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("sfcuo"), st.floats(0, 5)), max_size=60))
def test_any_history_heals(history: list[tuple[str, float]]) -> None:
    c, now = Condition(RULES), 0.0
    for what, pause in history:
        before, now = now, now + pause
        if what == "s":
            c.succeeded(now)
        elif what == "f":
            c.failed(now)
        elif what == "c":
            c.failed(now, certain=True, unreachable=True)
        else:
            c.checked(now, what == "o", since=before)
        assert 0.0 <= c.share(now) <= 1.0
    now += 2.0 * 8  # the longest pause
    assert c.state(now) is not State.EJECTED
    c.checked(now, True, since=now)
    c.succeeded(now)
    assert c.state(now + RULES.ramp) is State.UP


def test_budget_bounds_retries_by_requests() -> None:
    budget = RetryBudget(RetryRules(budget=0.5, reserve=4.0))
    assert [budget.spend() for _ in range(5)] == [True] * 4 + [False]
    for _ in range(4):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_pauses_double_and_are_bounded() -> None:
    budget = RetryBudget(RetryRules(base=0.1, longest=0.4), seed=1)
    for retry, most in ((0, 0.1), (1, 0.2), (2, 0.4), (50, 0.4)):
        drawn = [budget.pause(retry) for _ in range(200)]
        assert 0 <= min(drawn) < most / 4
        assert most / 2 < max(drawn) <= most


def test_refused_tries_are_free_until_every_worker_was_tried() -> None:
    tries = Tries(attempts=2, workers=3)
    assert [tries.next(free=True) for _ in range(6)] == [True] * 4 + [False] * 2
    assert tries.retries == 6  # three for free, one more that counts
    assert not Tries(attempts=1, workers=3).next(free=False)


async def test_tiers_go_from_careful_to_desperate() -> None:
    client = Client(1.0)
    a, b, c, d, e = (
        Endpoint("decode", URL(f"http://h:{port}"), client, rules=RULES) for port in range(1, 6)
    )
    pool = Pool("decode", (a, b, c, d, e))
    assert list(pool.exclusions()) == [frozenset()]
    pool.full(b, None)
    pool.failed(c, UpstreamError("connect", False, "refused"))
    now = asyncio.get_running_loop().time()
    for _ in range(2):
        pool.checked(d, False, now + 1, "no")
    pool.drain(e.name)
    out = {"b": b.name, "c": c.name, "d": d.name, "e": e.name}
    tiers = [set(t) for t in pool.exclusions()]
    assert tiers == [
        {out["b"], out["c"], out["d"], out["e"]},
        {out["c"], out["d"], out["e"]},
        {out["d"], out["e"]},
        {out["e"]},
    ]
    assert [set(t) for t in pool.exclusions({a.name})][-1] == {a.name, out["e"]}


async def test_returning_worker_is_spared_until_its_share_has_grown() -> None:
    client, now = Client(1.0), asyncio.get_running_loop().time()
    back, other = (
        Endpoint("decode", URL(f"http://h:{port}"), client, rules=RULES) for port in (1, 2)
    )
    pool = Pool("decode", (back, other))
    pool._now = lambda: now
    spared = lambda: back.name in next(iter(pool.exclusions()))  # noqa: E731
    pool.failed(back, UpstreamError("reset", True, "x"))
    assert not spared()
    pool.failed(back, UpstreamError("timeout", True, "x"))
    now += RULES.pause
    assert not spared()  # one request may try it
    back.running = 1
    assert spared()
    pool.succeeded(back)
    other.running, shares = 19, []
    for _ in range(4):
        while not spared() and back.running < 99:
            back.running += 1
        shares.append(back.running)
        now += RULES.ramp / 4
    assert shares == sorted(set(shares))
    assert shares[0] == 1
    assert shares[-1] < (back.running + other.running) / 2
    assert not spared()  # its share is a whole one


@pytest.mark.parametrize(
    ("policy", "hosts"), [("round_robin", "aabbcc"), ("least_requests", "bcc")]
)
async def test_prefill_goes_in_turn_or_by_load(policy: str, hosts: str) -> None:
    client = Client(1.0)
    a, b, c = (Endpoint("prefill", URL(f"http://{host}:1"), client) for host in "abc")
    pool = PrefillPool((a, b, c), policy)
    a.running, b.others, c.running = 5, 2.0, 1
    chosen = ""
    for _ in hosts:
        endpoint = pool.choose(b"same prompt")
        assert endpoint is not None
        chosen += str(endpoint.base.host)
        if policy == "least_requests":
            endpoint.running += 1
    assert sorted(chosen) == list(hosts)


async def test_prefix_affinity_counts_requests_of_others() -> None:
    client = Client(1.0)
    members = [Endpoint("prefill", URL(f"http://h:{port}"), client) for port in range(1, 5)]
    pool = PrefillPool(members, "prefix_hash")
    home = pool.choose(b"hot")
    assert home is not None
    home.others = 3.0
    assert pool.choose(b"hot") is not home


async def test_prefix_affinity_is_stable_and_bounded() -> None:
    client = Client(1.0)
    members = [Endpoint("prefill", URL(f"http://h:{port}"), client) for port in range(1, 5)]
    pool = PrefillPool(members, "prefix_hash")
    homes = {p: pool.choose(b"prompt %d" % p) for p in range(200)}
    shares = [sum(home is m for home in homes.values()) for m in members]
    assert min(shares) > 25
    assert all(pool.choose(b"prompt %d" % p) is home for p, home in homes.items())
    pool.leave(members[0].name)
    moved = [p for p, home in homes.items() if pool.choose(b"prompt %d" % p) is not home]
    assert all(homes[p] is members[0] for p in moved)
    for _ in range(30):
        endpoint = pool.choose(b"hot")
        assert endpoint is not None
        endpoint.running += 1
    assert max(m.running for m in members[1:]) <= 13  # 1.25 x 10, rounded up


class _Redirecting(MockWorker):
    """A worker behind a proxy that at some time sends everybody to its login page."""

    away = ""

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> bool:
        if not self.away:
            return await super()._get(path, writer)
        writer.write(f"HTTP/1.1 302 X\r\nLocation: {self.away}{path}\r\n".encode())
        writer.write(b"Content-Length: 0\r\n\r\n")
        await writer.drain()
        return True


async def test_redirects_are_not_followed() -> None:
    elsewhere, prefill, decode = (
        MockWorker("decode"),
        _Redirecting("prefill"),
        _Redirecting("decode"),
    )
    options = {"health_interval": 0.02, "health_failures": 1}
    async with workers(elsewhere), rig([prefill], [decode], **options) as r:
        prefill.away = decode.away = elsewhere.url
        await until(lambda: not r.router.decode.able() and not r.router.prefill.able())
        async with r.client.get(r.url + "/v1/models") as response:
            assert response.status == 503
    assert not elsewhere.gets
