"""One refit in a process of its own: `python -m eldr.routing.refit_job < job > proposal`.

Clustering takes seconds of every core that BLAS finds; a router that serves meanwhile lets a
process of the lowest priority do it. Both are `.npy` arrays one after another (and the raw
counts of a job), in files that need no name, so that whoever dies leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np

from eldr.geometry import Geometry
from eldr.routing.fit import FitError, fit_partition
from eldr.routing.partition import Partition
from eldr.routing.recorded import Recorded
from eldr.routing.refit import Drift, Window, align, measure_drift, refit
from eldr.signature import Signature

ADOPTED, UNCHANGED, REJECTED = "adopted", "unchanged", "rejected"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What a refit works on.

    Attributes:
        signatures: recent ones, at least one per name.
        names: workers of a first fit.
        partition: in use, None before the first fit.
        batch: mean running requests per worker.
        forced: refit without drift; workers that joined share a centroid until then.
        seed: of a first fit.
    """

    geometry: Geometry
    signatures: Sequence[Signature]
    names: tuple[str, ...]
    partition: Partition | None
    batch: float
    forced: bool = False
    seed: int = 0

    def write(self, file: IO[bytes]) -> None:
        """Writes all of it; the counts one by one, so that other threads never wait for long."""
        held = self.signatures
        about = {"batch": self.batch, "forced": self.forced, "seed": self.seed}
        _put(file, {**about, "names": self.names, "geometry": _shape(self.geometry)})
        _put_partition(file, self.partition)
        np.save(file, np.array([s.tokens for s in held], np.int32))
        np.save(file, np.array([s.coverage for s in held], np.float64))
        np.save(file, np.array([-1 if s.sampled is None else s.sampled for s in held], np.int64))
        for signature in held:
            file.write(np.ascontiguousarray(signature.counts, "<u4").data)


def read_job(file: IO[bytes]) -> Job:
    """The job that `Job.write` wrote."""
    about, partition = _take(file), _take_partition(file)
    tokens, coverage, sampled = (np.load(file) for _ in range(3))
    geometry = Geometry(*about["geometry"])
    counts = np.frombuffer(file.read(), "<u4")
    counts = counts.reshape(len(tokens), geometry.layers, geometry.experts)
    signatures = [
        Signature(c, int(t), float(share), None if n < 0 else int(n))
        for c, t, share, n in zip(counts, tokens, coverage, sampled, strict=True)
    ]
    return Job(
        geometry,
        signatures,
        tuple(about["names"]),
        partition,
        about["batch"],
        about["forced"],
        about["seed"],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """What a refit found.

    Attributes:
        verdict: ADOPTED (use `partition`), UNCHANGED (no drift), REJECTED (the estimated gain of
            every new partition is negative).
        drift: of the partition to use from now on, if there is one.
        pause: whether that partition's estimated gain is negative as well: decide on load.
    """

    verdict: str
    partition: Partition | None
    drift: Drift
    pause: bool = False

    def write(self, file: IO[bytes]) -> None:
        """Writes all of it."""
        about = {"verdict": self.verdict, "drift": asdict(self.drift), "pause": self.pause}
        _put(file, about)
        _put_partition(file, self.partition)


def read_proposal(file: IO[bytes]) -> Proposal:
    """The proposal that `Proposal.write` wrote."""
    about, partition = _take(file), _take_partition(file)
    return Proposal(about["verdict"], partition, Drift(**about["drift"]), about["pause"])


def propose(job: Job) -> Proposal:
    """Measures, and fits if need be.

    Raises:
        FitError: signatures that nothing can be fitted to.
    """
    window = _window(job.geometry, job.signatures)
    old = job.partition
    before = None if old is None else measure_drift(old, window, batch=job.batch)
    if before is not None and not (before.drifted or job.forced):
        return Proposal(UNCHANGED, None, before)
    after = None
    for new in _candidates(job):
        after = measure_drift(new, window, batch=job.batch)
        if after.gain >= 0:
            return Proposal(ADOPTED, new, after)
    drift = before or after
    assert drift is not None  # there is a candidate
    return Proposal(REJECTED, None, drift, pause=before is not None and before.gain < 0)


def _candidates(job: Job) -> Iterator[Partition]:
    """New partitions, the one that moves least first."""
    old = job.partition
    if old is not None:
        weights = old.weights
        held = [s for s in job.signatures if (s.counts * weights).any()]
        # With fewer, the old weights no longer see this traffic.
        if len(held) >= max(old.workers, len(job.signatures) / 2):
            yield refit(old, _window(job.geometry, held))
    names = job.names if old is None else old.names
    held = [s for s in job.signatures if s.counts.any()]
    if not held:
        raise FitError(f"fit: none of {len(job.signatures)} signatures has hits")
    recorded = Recorded(
        np.stack([s.counts for s in held]),
        np.array([s.tokens for s in held], np.int32),
        np.array([s.coverage for s in held], np.float32),
        job.geometry,
        "" if old is None else old.model,
    )
    fresh = fit_partition(recorded, names, seed=job.seed)
    yield fresh if old is None else align(fresh, old)


def _window(geometry: Geometry, signatures: Sequence[Signature]) -> Window:
    window = Window(geometry, max(2, len(signatures)))
    for signature in signatures:
        window.add(signature)
    return window


def _shape(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.layers, geometry.experts, geometry.top_k


def _put(file: IO[bytes], values: dict[str, Any] | None) -> None:
    np.save(file, np.array(json.dumps(values)))


def _take(file: IO[bytes]) -> Any:
    return json.loads(str(np.load(file)))


def _put_partition(file: IO[bytes], partition: Partition | None) -> None:
    if partition is None:
        _put(file, None)
        return
    about = {"names": partition.names, "model": partition.model, "metrics": partition.metrics}
    _put(file, {**about, "geometry": _shape(partition.geometry)})
    for array in (partition.centroids, partition.idf, partition.mask):
        np.save(file, array)


def _take_partition(file: IO[bytes]) -> Partition | None:
    about = _take(file)
    if about is None:
        return None
    centroids, idf, mask = (np.load(file) for _ in range(3))
    return Partition(
        Geometry(*about["geometry"]),
        tuple(about["names"]),
        centroids,
        idf,
        mask,
        about["model"],
        about["metrics"],
    )


def main() -> int:
    """Reads the job from stdin, writes the proposal to stdout; both must be files."""
    os.nice(19)
    try:
        propose(read_job(sys.stdin.buffer)).write(sys.stdout.buffer)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
