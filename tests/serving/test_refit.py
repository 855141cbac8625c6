"""A router whose partition follows traffic and workers; the fits are real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eldr.geometry import Geometry
from eldr.routing import refit_job
from eldr.serving.config import ConfigError, RouterConfig
from eldr.serving.errors import StartError
from eldr.serving.refit import OUTCOMES, Refits
from eldr.serving.refit_process import COMMAND
from eldr.signature import Signature
from tests.routing.helpers import SMALL, axis_partition, only, signatures
from tests.serving.mocks.worker import MockWorker
from tests.serving.partitions import save_partition
from tests.serving.rig import Rig, rig, until

GEOMETRY = Geometry(2, 16, 2)
OPTIONS = {"policy": "locality_band", "refit_window": 64}
NEVER = 3600.0  # between attempts: only what a test asks for happens
FIT_SECONDS = 180.0


def prefill() -> MockWorker:
    return MockWorker("prefill", geometry=GEOMETRY)


async def send(r: Rig, *experts: int, count: int = 64) -> None:
    """That many requests, their signatures in turn on these experts."""
    for i in range(count):
        r.prefill[0].expert = experts[i % len(experts)]
        assert (await r.complete())[0] == 200


async def home(r: Rig, expert: int) -> tuple[str, str]:
    """Worker and branch of one request with this signature."""
    await send(r, expert, count=1)
    decision = next(r.router.decisions.newest(1)).decision
    return decision.worker.name, decision.branch


def refits(r: Rig) -> Refits:
    assert r.router.refits is not None
    return r.router.refits


def attempt(r: Rig) -> None:
    """What the passing of the interval does."""
    refits(r)._enough.set()


async def count_of(r: Rig, outcome: str, count: int = 1) -> None:
    await until(lambda: refits(r).outcomes[outcome] == count, FIT_SECONDS)


async def partition(r: Rig) -> dict:
    async with r.client.get(r.url + "/eldr/partition") as response:
        return await response.json()


async def metrics(r: Rig) -> str:
    async with r.client.get(r.url + "/metrics") as response:
        return await response.text()


def command(r: Rig, code: str) -> None:
    """Fits by another program from now on."""
    refits(r)._rules = replace(refits(r)._rules, command=(sys.executable, "-c", code))


async def test_decisions_follow_traffic_that_drifts() -> None:
    path = save_partition(GEOMETRY, [[0, 1], [8, 9]])
    async with rig([prefill()], 2, partition=path, refit_every=0.05, **OPTIONS) as r:
        before = await partition(r)
        assert before["partition"]["source"] == "file"
        await send(r, 4, 12, count=64)
        assert refits(r).rows == 64
        await count_of(r, "adopted")
        first, second = await home(r, 4), await home(r, 12)
        assert {first[1], second[1]} == {"nearest"}
        assert first[0] != second[0]
        after = await partition(r)
        assert after["partition"]["source"] == "refit"
        assert after["partition"]["digest"] != before["partition"]["digest"]
        assert after["partition"]["time"] > before["partition"]["time"]
        assert after["refit"]["window"]["bytes"] == 64 * 32 * 4
        await until(lambda: refits(r).outcomes["unchanged"] > 0, FIT_SECONDS)  # it fits now
        text = await metrics(r)
        assert 'eldr_router_refits_total{outcome="adopted"} 1.0' in text
        assert "eldr_router_refit_window_rows 64.0" in text
        assert "eldr_router_partition_drift 0" in text


async def test_without_a_partition_load_decides_until_the_window_suffices() -> None:
    async with rig([prefill()], 2, refit_every=NEVER, **OPTIONS) as r:
        assert (await partition(r))["partition"] is None
        await send(r, 4, 12, count=63)
        assert refits(r).outcomes == dict.fromkeys(OUTCOMES, 0)
        assert 'eldr_router_fallback_total{reason="no_partition"} 63.0' in await metrics(r)
        await send(r, 12, count=1)  # nobody waits for an interval to pass
        await count_of(r, "adopted")
        assert (await home(r, 4))[0] != (await home(r, 12))[0]
        assert (await partition(r))["partition"]["source"] == "first_fit"


async def test_negative_gain_pauses_until_the_traffic_is_worth_it() -> None:
    path = save_partition(GEOMETRY, [[4, 5], [12, 13]])
    async with rig([prefill()], 2, partition=path, refit_every=NEVER, **OPTIONS) as r:
        digest = (await partition(r))["partition"]["digest"]
        await send(r, 4)  # all alike: every partition would crowd them on one worker
        attempt(r)
        await count_of(r, "rejected")
        assert (await partition(r))["refit"]["paused"]
        assert (await partition(r))["partition"]["digest"] == digest
        await home(r, 4)
        text = await metrics(r)
        assert 'eldr_router_fallback_total{reason="partition_paused"} 1.0' in text
        assert "eldr_router_partition_paused 1.0" in text
        await send(r, 4, 12)
        attempt(r)
        await count_of(r, "unchanged")
        assert (await home(r, 4))[1] == "nearest"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import sys; sys.exit('no memory')",
        "print('not a proposal')",
        "",
    ],
)
async def test_a_failing_fit_is_counted_and_harms_nobody(code: str) -> None:
    path = save_partition(GEOMETRY, [[0, 1], [8, 9]])
    async with rig([prefill()], 2, partition=path, refit_every=NEVER, **OPTIONS) as r:
        command(r, code)
        await send(r, 4, 12)
        attempt(r)
        await count_of(r, "failed")
        assert (await partition(r))["partition"]["source"] == "file"
        assert (await home(r, 0))[1] == "nearest"
        refits(r)._rules = replace(refits(r)._rules, command=COMMAND)
        attempt(r)
        await count_of(r, "adopted")  # the next one does better


async def test_a_fit_that_hangs_is_ended_and_requests_go_on_meanwhile(tmp_path: Path) -> None:
    path = save_partition(GEOMETRY, [[0, 1], [8, 9]])
    pid = tmp_path / "pid"
    hang = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    async with rig([prefill()], 2, partition=path, refit_every=NEVER, **OPTIONS) as r:
        command(r, hang)
        await send(r, 4, 12)
        attempt(r)
        await until(lambda: pid.exists() and pid.read_text() != "", FIT_SECONDS)
        await send(r, 0, count=4)
        assert refits(r).outcomes == dict.fromkeys(OUTCOMES, 0)
    await until(lambda: not alive(pid))  # it ends with the router

    async with rig([prefill()], 2, partition=path, refit_every=NEVER, **OPTIONS) as r:
        command(r, hang)
        refits(r)._rules = replace(refits(r)._rules, limit=0.5)
        await send(r, 4, 12)
        attempt(r)
        await count_of(r, "timed_out")
        await until(lambda: not alive(pid))
        assert (await home(r, 0))[1] == "nearest"


def alive(pid: Path) -> bool:
    return Path(f"/proc/{pid.read_text()}").exists()


async def test_workers_that_join_or_leave_take_or_leave_centroids() -> None:
    path = save_partition(GEOMETRY, [[4, 5], [12, 13]])
    spare = MockWorker("decode")
    await spare.start()
    async with rig([prefill()], 2, partition=path, refit_every=NEVER, **OPTIONS) as r:
        a, b = (worker.url for worker in r.decode)
        await send(r, 4, 4, 12, 8)
        wanted = {"role": "decode", "url": spare.url}
        async with r.client.post(r.url + "/workers", json=wanted) as response:
            assert response.status == 201
        await count_of(r, "remapped")
        assert (await partition(r))["partition"]["workers"] == [a, b, spare.url]
        assert (await partition(r))["partition"]["source"] == "remap"
        assert await home(r, 12) == (b, "nearest")  # nobody who stays moved
        attempt(r)  # and the next fit tells the two apart that share a centroid, drift or not
        await count_of(r, "adopted")
        homes = {(await home(r, expert))[0] for expert in (4, 8, 12)}
        assert len(homes) == 3
        async with r.client.delete(r.url + "/workers", params={"name": a}) as response:
            assert response.status == 200
        await count_of(r, "remapped", 2)
        assert (await partition(r))["partition"]["workers"] == [b, spare.url]
        assert (await home(r, 12))[1] in ("nearest", "band")
    await spare.kill()


async def test_a_worker_that_joined_gets_a_centroid_of_its_own_without_any_drift() -> None:
    path = save_partition(GEOMETRY, [[0, 1], [4, 5], [8, 9], [12, 13]])
    spare = MockWorker("decode")
    await spare.start()
    async with rig([prefill()], 4, partition=path, refit_every=NEVER, **OPTIONS) as r:
        await send(r, 0, 4, 8, 12)
        attempt(r)
        await count_of(r, "unchanged")
        await r.router.add_worker("decode", spare.url)
        await count_of(r, "remapped")
        attempt(r)
        await count_of(r, "adopted")  # asked for by the join alone
        attempt(r)
        await count_of(r, "unchanged", 2)
    await spare.kill()


async def test_without_refits_too_the_partition_follows_the_workers() -> None:
    path = save_partition(GEOMETRY, [[4, 5], [12, 13]])
    spare = MockWorker("decode")
    await spare.start()
    async with rig([prefill()], 2, partition=path, policy="locality_band") as r:
        a, b = (worker.url for worker in r.decode)
        await send(r, 4, 12, count=8)
        await r.router.add_worker("decode", spare.url)
        await count_of(r, "remapped")
        assert (await partition(r))["partition"]["workers"] == [a, b, spare.url]
        assert {(await home(r, expert))[0] for expert in (4, 4, 12, 12)} >= {a, b}
        async with r.client.delete(r.url + "/workers", params={"name": a}) as response:
            assert response.status == 200
        await count_of(r, "remapped", 2)
        assert (await partition(r))["partition"]["workers"] == [b, spare.url]
        assert refits(r).outcomes == {**dict.fromkeys(OUTCOMES, 0), "remapped": 2}
    await spare.kill()


@pytest.mark.parametrize("experts", [(4, 12), (4,)], ids=["adopts", "pauses"])
async def test_an_operators_partition_wins_over_a_fit_that_runs(
    tmp_path: Path, experts: tuple[int, ...]
) -> None:
    path = save_partition(GEOMETRY, [[0, 1], [8, 9]])
    gate, asked = tmp_path / "gate", tmp_path / "asked"
    waits = (
        "import pathlib, time\n"
        f"pathlib.Path({str(asked)!r}).touch()\n"
        f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
        "from eldr.routing.refit_job import main; main()"
    )
    async with rig([prefill()], 2, partition=path, refit_every=NEVER, **OPTIONS) as r:
        command(r, waits)
        await send(r, *experts)
        attempt(r)
        await until(asked.exists, FIT_SECONDS)
        raw = Path(save_partition(GEOMETRY, [[2, 3], [6, 7]])).read_bytes()
        async with r.client.post(r.url + "/eldr/partition", data=raw) as response:
            mine = (await response.json())["partition"]
        gate.touch()
        await count_of(r, "superseded")
        assert mine["source"] == "operator"
        assert (await partition(r))["partition"] == mine
        assert not refits(r).paused


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "least_requests", "shadow": ("locality_band", "nearest")},
        {"ab": ("least_requests", "locality_band", "nearest"), "ab_period": NEVER},
    ],
)
async def test_shadows_and_arms_get_the_same_partition(options: dict) -> None:
    async with rig([prefill()], 2, refit_every=NEVER, refit_window=64, **options) as r:
        await send(r, 4, 12)
        await count_of(r, "adopted")
        digest = (await partition(r))["partition"]["digest"]
        policies = refits(r)._policies
        assert [policy.name for policy in policies] == ["locality_band", "nearest"]
        assert [policy.partition.digest for policy in policies] == [digest] * 2
        raw = Path(save_partition(GEOMETRY, [[2, 3], [6, 7]])).read_bytes()
        async with r.client.post(r.url + "/eldr/partition", data=raw) as response:
            assert response.status == 200
        assert policies[0].partition is policies[1].partition


async def test_only_a_sample_is_kept_and_only_of_signatures_that_cover_enough() -> None:
    async with rig([prefill()], 2, refit_every=NEVER, refit_sample=0.25, **OPTIONS) as r:
        await send(r, 4, count=64)
        kept = refits(r).rows
        assert 4 <= kept <= 32
        r.prefill[0].mutate_signature = {"coverage": 0.25}
        await send(r, 4, count=16)
        assert refits(r).rows == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "least_requests", "refit_every": 1.0}, "leave --refit-every out"),
        ({"policy": "locality_band"}, "--refit-every"),
        ({"policy": "locality_band", "refit_every": 1.0, "refit_window": 1}, "refit_window"),
    ],
)
async def test_options_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(StartError, match=message):
        async with rig([prefill()], 2, **options):
            pass


@pytest.mark.parametrize("options", [{"refit_sample": 0.0}, {"refit_every": -1.0}])
def test_values_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RouterConfig(prefill=("http://p:1",), decode=("http://d:1",), **options)


def test_the_router_loads_no_clustering_library() -> None:
    code = "import eldr.serving.refit, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"sklearn", "scipy", "torch", "safetensors"} & set(json.loads(done.stdout))


# The job itself


def through_a_file(write: Callable, read: Callable) -> object:
    with tempfile.TemporaryFile() as file:
        write(file)
        file.seek(0)
        return read(file)


def test_job_and_proposal_survive_the_way() -> None:
    made = [*signatures(3)[0], Signature(only(1).counts, 500, 0.5, 50)]
    old = axis_partition(["a", "b"])
    job = refit_job.Job(SMALL, made, ("a", "b"), old, 3.5, True, 7)
    again = through_a_file(job.write, refit_job.read_job)
    assert [s.covered for s in again.signatures] == [s.covered for s in made]
    assert (again.signatures[3].counts == made[3].counts).all()
    assert again.partition.digest == old.digest
    assert (again.geometry, again.names, again.batch) == (SMALL, ("a", "b"), 3.5)
    assert (again.forced, again.seed) == (True, 7)
    found = refit_job.propose(job)
    back = through_a_file(found.write, refit_job.read_proposal)
    assert (back.verdict, str(back.drift), back.pause) == (
        found.verdict,
        str(found.drift),
        found.pause,
    )


def test_traffic_that_the_old_weights_do_not_see_is_fitted_afresh() -> None:
    old = axis_partition(["a", "b"])
    idf = old.idf.copy()
    idf[:, 8:] = 0.0
    made = [only(9 + 4 * (i % 2)) for i in range(40)]
    job = refit_job.Job(SMALL, made, ("a", "b"), replace(old, idf=idf), 8.0)
    found = refit_job.propose(job)
    assert found.verdict == refit_job.ADOPTED
    assert (found.partition.weights[:, [9, 13]] > 0).all()


def test_signatures_without_hits_do_not_stop_a_fit() -> None:
    made = [only(4 * (i % 2)) for i in range(40)]
    made.append(Signature(only(0).counts * 0, 50))
    for partition in (None, axis_partition(["a", "b"])):
        found = refit_job.propose(refit_job.Job(SMALL, made, ("a", "b"), partition, 8.0))
        assert found.verdict == refit_job.ADOPTED


def test_nothing_to_fit_is_an_error() -> None:
    made = [Signature(only(0).counts * 0, 50)] * 4
    with pytest.raises(ValueError, match="none of 4 signatures"):
        refit_job.propose(refit_job.Job(SMALL, made, ("a", "b"), None, 8.0))
