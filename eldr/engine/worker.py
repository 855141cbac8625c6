"""The worker's side of the engine hook, in the process that owns the device."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

import torch

from eldr import tracing
from eldr.engine import capture, config, layout, vectors
from eldr.engine.cache import GatheredOnDevice, SignatureCache
from eldr.engine.decode import DecodeCounters
from eldr.engine.fault import contained, nothing
from eldr.engine.hoststore import HostRows, RowsOnDevice, StoreTotals
from eldr.engine.step import StepMetadata, StepResult
from eldr.geometry import Geometry

logger = logging.getLogger("vllm.eldr")


class WorkerHook:
    """Called by the model runner after each forward, and for what its output copy carries.

    All tensor-parallel ranks route alike, so rank 0 alone keeps histograms and reports; the
    others only take part in the capture, which may be a collective.
    """

    def __init__(
        self,
        settings: config.EngineConfig,
        capture: capture.ExpertCapture,
        blocks: layout.BlockLayout,
        reports: bool,
    ) -> None:
        self.failed = False
        self._settings = settings
        self._capture = capture
        self._layout = blocks
        self._reports = reports
        device, geometry, self._ids = capture.device, capture.geometry, capture.ids
        keeps, counts = settings.signatures and reports, settings.decode and reports
        self._cache = SignatureCache(blocks, geometry, device) if keeps else None
        window = settings.window_steps
        self._decode = DecodeCounters(geometry, device, self._ids, window) if counts else None
        kept = settings.host_store_blocks if self._cache is not None else 0
        self._rows = HostRows(kept, self._cache.histograms) if kept and self._cache else None
        self._store = StoreTotals()
        self._pending: PendingStep | None = None

    @classmethod
    def create(
        cls, vllm_config: Any, kv_cache_config: Any, model: torch.nn.Module, device: torch.device
    ) -> WorkerHook:
        """Built by the model runner once the KV cache exists, before CUDA graphs are captured."""
        from vllm.distributed.parallel_state import get_tp_group

        blocks = layout.find(kv_cache_config)
        bound = capture.bind(model, vllm_config, device)
        first = get_tp_group().rank_in_group == 0
        hook = cls(config.read(vllm_config.additional_config), bound, blocks, first)
        hook._announce(kv_cache_config)
        return hook

    @contained(nothing)
    def after_forward(self, slot_mappings: Any, num_tokens: int, output: Any) -> None:
        """Accounts for the step that was just enqueued; enqueues device work, never waits.

        Args:
            slot_mappings: int64 slots [at least num_tokens] per KV cache group.
            num_tokens: tokens of the step, padding excluded.
            output: vLLM's SchedulerOutput.
        """
        step: StepMetadata | None = output.eldr_metadata
        self._pending = None
        if step is None or not self._reports:
            return
        if step.failed or self._capture.failed:
            self.failed = True  # the log of the side that failed says why
            return
        gathered = rows = None
        counted = self._decode if step.decode else None
        if tracing.ON:
            tracing.push(tracing.ACCUMULATE, num_tokens)
        if self._cache is not None:
            self._store = step.store
            if self._rows is not None and step.restores:
                self._rows.restore(step.restores)
            slots = slot_mappings[self._layout.group][:num_tokens]
            self._cache.accumulate(self._ids.of_step(num_tokens), slots)
        if counted is not None:
            counted.count(num_tokens, step)
        if tracing.ON:
            tracing.pop()
            tracing.canary(self._ids.of_step(1))
        if self._cache is not None and step.ends:
            gathered = self._gather(self._cache, step)
        if self._rows is not None and step.saves:
            rows = self._rows.save(step.saves)
        if gathered is not None or counted is not None or rows is not None:
            self._pending = PendingStep(self, gathered, rows, counted, step.started)

    def _gather(self, cache: SignatureCache, step: StepMetadata) -> GatheredOnDevice:
        if tracing.ON:
            tracing.push(tracing.DECIDE, len(step.ends))
        gathered = cache.gather(step.ends)
        if tracing.ON:
            tracing.pop()
        return gathered

    def take_pending(self) -> PendingStep | None:
        """What the step's output copy must carry; None if nothing."""
        pending, self._pending = self._pending, None
        return pending

    @property
    def geometry(self) -> Geometry:
        """Of the model's routing."""
        return self._capture.geometry

    def info(self) -> dict[str, Any] | None:
        """What this worker is, as JSON values; None on ranks that do not report."""
        if not self._reports:
            return None
        geometry = self.geometry
        return {
            "role": self._settings.role,
            "geometry": {
                "layers": geometry.layers,
                "experts": geometry.experts,
                "top_k": geometry.top_k,
                "digest": geometry.digest,
            },
            "block_size": self._layout.block_size,
            "histogram_bytes": self._cache.bytes if self._cache is not None else 0,
            "host_store_bytes": self._rows.bytes if self._rows is not None else 0,
        }

    def decode(self, window: bool = False) -> dict[str, Any] | None:
        """Decode counters as JSON values; None if this rank does not count."""
        return self._decode.snapshot(window) if self._decode is not None else None

    def load_vectors(self, data: bytes) -> dict[str, Any] | None:
        """Replaces the vectors between two steps; an error is an answer, not an exception.

        Args:
            data: a file as `vectors.load` reads it; empty to score no more.
        """
        if self._cache is None:
            return {"error": "this worker keeps no signatures"} if self._reports else None
        try:
            device = self._cache.histograms.device
            loaded = vectors.load(data, self._capture.geometry, device) if data else None
        except vectors.VectorsError as error:
            return {"error": str(error)}
        self._cache.vectors = loaded
        return self.vectors()

    def vectors(self) -> dict[str, Any] | None:
        """Which vectors the worker scores against; None on ranks that do not report."""
        if not self._reports:
            return None
        found = self._cache.vectors if self._cache is not None else None
        if found is None:
            return {"digest": None}
        return {"digest": found.digest, "kind": found.kind, "workers": found.workers}

    def counters(self) -> dict[str, Any] | None:
        """What `metrics.render` takes; None on ranks that do not report."""
        if not self._reports:
            return None
        return {
            "signatures": self._cache.tally if self._cache is not None else None,
            "decode": self._decode.totals() if self._decode is not None else None,
            "store": self._store_counters(),
            "failed": int(self.failed),
        }

    def _store_counters(self) -> dict[str, int] | None:
        if self._rows is None:
            return None
        return {**asdict(self._store), "bytes": self._rows.bytes}

    def _announce(self, kv_cache_config: Any) -> None:
        if not self._reports:
            return
        used = self._cache.bytes if self._cache is not None else 0
        kv = sum(int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors)
        logger.info(
            "ELDR %s worker: %s; %d histograms of %d-token blocks, "
            "%.1f MiB, %.2f %% of the KV cache; host store %.1f MiB",
            self._settings.role,
            self._capture.geometry,
            self._layout.blocks if used else 0,
            self._layout.block_size,
            used / 2**20,
            100 * used / kv if kv else 0.0,
            (self._rows.bytes if self._rows is not None else 0) / 2**20,
        )


class PendingStep:
    """One step's results, between the device and the scheduler."""

    __slots__ = ("_copied", "_counted", "_gathered", "_hook", "_rows", "_started")

    def __init__(
        self,
        hook: WorkerHook,
        gathered: GatheredOnDevice | None,
        rows: RowsOnDevice | None,
        counted: DecodeCounters | None,
        started: float,
    ) -> None:
        self._hook = hook
        self._gathered = gathered
        self._rows = rows
        self._counted = counted
        self._started = started
        self._copied: torch.Event | None = None

    @property
    def failed(self) -> bool:
        """Whether the hook is off; a fault here switches it off."""
        return self._hook.failed

    @failed.setter
    def failed(self, failed: bool) -> None:
        self._hook.failed = failed

    @contained(nothing)
    def enqueue_copy(self) -> None:
        """Called on the stream of the output copy; on a device, marks its end."""
        if tracing.ON:
            tracing.push(tracing.COPY)
        if self._gathered is not None:
            self._gathered.enqueue_copy()
        if self._rows is not None:
            self._rows.enqueue_copy()
        if tracing.ON:
            tracing.pop()
        if self._gathered is None and self._rows is None:
            return  # nothing to wait for
        if torch.accelerator.is_available():
            self._copied = torch.Event(blocking=True)
            self._copied.record()

    @contained(nothing)
    def result(self) -> StepResult | None:
        """Called once the copy was waited for, where the sampled tokens are read."""
        if tracing.ON:
            tracing.push(tracing.MERGE)
        result = self._result()
        if tracing.ON:
            tracing.pop()
        return result

    def _result(self) -> StepResult | None:
        # With asynchronous scheduling the engine has waited for a later event of the same stream.
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        if self._rows is not None:
            self._rows.finish()
        if self._counted is not None:
            self._counted.ended(self._started, time.monotonic())
        if self._gathered is None:
            return None
        return StepResult(self._hook.geometry, self._gathered.result())
