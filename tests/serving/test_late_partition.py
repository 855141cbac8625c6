"""Centroids of workers that are dead when the router starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eldr.serving.errors import StartError
from tests.serving.late import (
    CENTROIDS,
    GEOMETRY,
    SOURCES,
    Fleet,
    decode,
    fleet,
    home,
    in_use,
    prefill,
    router,
)
from tests.serving.mocks.worker import MockWorker
from tests.serving.partitions import save_partition
from tests.serving.rig import until


@pytest.mark.parametrize("source", SOURCES)
async def test_partition_keeps_the_centroid_of_a_worker_that_is_dead_at_the_start(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    async with fleet(tmp_path, [prefill()], decode(3), dead=[]) as f:
        first, late, last = f.decode
        await late.kill()
        async with router(f, **options, **f.options(source, monkeypatch)) as r:
            refits = r.router.refits
            assert refits is not None
            digest = refits.partition.digest
            assert refits.partition.names == (first.url, late.url, last.url)
            assert [await home(r, e) for e in (0, 8)] == [first.url, last.url]
            assert await home(r, 4) != late.url
            await in_use(r, late)
            assert [await home(r, e) for e in (0, 4, 8)] == [first.url, late.url, last.url]
            assert refits.partition.digest == digest
            assert refits.outcomes["remapped"] == 0


async def test_other_members_come_and_go_before_the_dead_worker_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    extra = MockWorker("decode")
    async with fleet(tmp_path, [prefill()], [*decode(3), extra], dead=[]) as f:
        f.decode.remove(extra)
        first, late, last = f.decode
        await late.kill()
        async with router(f, **options, **f.options("flags", monkeypatch)) as r:
            refits = r.router.refits
            assert refits is not None
            await r.router.add_worker("decode", extra.url)
            await until(lambda: refits.outcomes["remapped"] == 1)
            assert set(refits.partition.names) == {w.url for w in (first, late, last, extra)}
            r.router.decode.leave(extra.url)
            await until(lambda: refits.outcomes["remapped"] == 2)
            await in_use(r, late)
            assert [await home(r, e) for e in (0, 4, 8)] == [first.url, late.url, last.url]
            assert {e.name for e in r.router.decode.endpoints} == set(refits.partition.names)


@pytest.mark.parametrize("dead", ["unready", "ready"])
async def test_pod_of_another_name_takes_the_centroid_that_no_worker_had(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods come back under new addresses: the place of one that never served is theirs."""
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    new = MockWorker("decode")
    async with fleet(tmp_path, [prefill()], [*decode(3), new], dead=[]) as f:
        f.decode.remove(new)
        f.pods.ready.remove(new)
        gone = f.decode[1]
        others = [w for w in f.decode if w is not gone]
        await gone.kill()
        if dead == "unready":
            f.pods.ready.remove(gone)
        async with router(f, **options, **f.options("kubernetes", monkeypatch)) as r:
            refits, before = r.router.refits, {}
            assert refits is not None
            for expert in (0, 4, 8):
                before[expert] = await home(r, expert)
            f.pods.ready = [*f.prefill, *others]
            await until(lambda: r.router.decode.get(gone.url) is None)
            assert {await home(r, e) for e in (0, 4, 8)} == {w.url for w in others}
            f.pods.ready.append(new)
            await until(lambda: r.router.decode.get(new.url) is not None)
            await until(lambda: new.url in refits.partition.names)
            homes = {expert: await home(r, expert) for expert in (0, 4, 8)}
            (theirs,) = (expert for expert, name in homes.items() if name == new.url)
            assert {e: n for e, n in homes.items() if e != theirs} == {
                e: n for e, n in before.items() if e != theirs
            }
            assert set(refits.partition.names) == {w.url for w in (*others, new)}
            assert len({c.tobytes() for c in refits.partition.centroids}) == 3


async def _refused(
    f: Fleet, options: dict[str, Any], message: str, patch: pytest.MonkeyPatch
) -> None:
    """Flags and files that name another number of workers than the partition's do not start."""
    for source in ("flags", "file"):
        with pytest.raises(StartError, match=message):
            async with router(f, **options, **f.options(source, patch)):
                pass


async def test_more_pods_than_centroids_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that restarts after a scale-up comes back."""
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    async with fleet(tmp_path, [prefill()], decode(5), dead=[]) as f:
        await _refused(f, options, "fitted for 3 workers, but the fleet has 5", monkeypatch)
        async with router(f, **options, **f.options("kubernetes", monkeypatch)) as r:
            refits = r.router.refits
            assert refits is not None
            assert set(refits.partition.names) == {w.url for w in f.decode}
            assert len({c.tobytes() for c in refits.partition.centroids}) == 3
            assert {await home(r, e) for e in (0, 4, 8)} <= {w.url for w in f.decode}


async def test_fewer_workers_than_centroids_by_name_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags and files say how many workers there are; that a cluster has fewer now, says less."""
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    async with fleet(tmp_path, [prefill()], decode(2), dead=[]) as f:
        await _refused(f, options, "fitted for 3 workers, but the fleet has 2", monkeypatch)
        async with router(f, **options, **f.options("kubernetes", monkeypatch)) as r:
            raw = Path(options["partition"]).read_bytes()
            async with r.client.post(r.url + "/eldr/partition", data=raw) as response:
                assert response.status == 200
                names = (await response.json())["partition"]["workers"]
            assert {w.url for w in f.decode} < set(names)
