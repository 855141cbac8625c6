"""The engine's own top-k ids of every MoE layer, captured inside the forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    RoutedExpertsCaptureSource,
    RoutedExpertsSink,
)
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from eldr import tracing
from eldr.engine.config import EngineConfigError
from eldr.engine.fault import contained, nothing
from eldr.engine.ids import CopiedIds, LayerIds, ReferredIds, StepIds
from eldr.geometry import Geometry

CaptureFn = Callable[[torch.Tensor], None]


class ExpertCapture(RoutedExpertsCapturer):  # type: ignore[misc]  # vLLM is not typed
    """Ids of the current step, of the MoE layers in their order, row = token of the step.

    With data parallelism a router's rows may be others than this rank's tokens: vLLM's capturer
    sorts that out and writes to `device_buffer`. Copies are recorded in CUDA graphs; rows past
    the step's tokens are stale.
    """

    def __init__(self, vllm_config: Any, layers: int, device: torch.device) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self.failed = False
        self.device = device
        self.geometry = Geometry(
            layers, int(model.get_num_experts()), int(model.get_num_experts_per_tok())
        )
        self._alone = parallel.data_parallel_size == 1
        self.ids: StepIds
        if self._alone and refers(device):
            self.ids = ReferredIds(layers)
        else:
            top_k, experts = self.geometry.top_k, self.geometry.experts
            self.ids = CopiedIds(_rows(vllm_config), layers, top_k, experts, device)
            self.device_buffer = self.ids.buffer
        self.dp_rank = parallel.data_parallel_rank
        self.tp_size = parallel.tensor_parallel_size

    def callback(self, place: int) -> CaptureFn:
        """What the router of the MoE layer with this place calls with its ids [tokens, K]."""
        if isinstance(self.ids, ReferredIds) and not tracing.ON:
            return partial(self.ids.step.__setitem__, place)  # no Python, nothing that can fail
        return partial(self.capture, place)

    @contained(nothing)
    def capture(self, place: int, topk_ids: torch.Tensor) -> None:
        """Takes one layer's ids, of any integer dtype."""
        if tracing.ON:
            tracing.push(tracing.CAPTURE, place)
        if self._alone:
            self.ids.store(place, topk_ids)
        else:
            super().capture(place, topk_ids)
        if tracing.ON:
            tracing.pop()


def refers(device: torch.device) -> bool:
    """Whether the routers' tensors themselves may be kept."""
    return device.type == "cpu"


def _rows(vllm_config: Any) -> int:
    """Tokens of the largest step, with the padding of CUDA graphs and sequence parallelism."""
    batched = int(vllm_config.scheduler_config.max_num_batched_tokens)
    graph = int(vllm_config.compilation_config.max_cudagraph_capture_size or 0)
    return max(batched, graph) + int(vllm_config.parallel_config.tensor_parallel_size)


@dataclass(frozen=True, slots=True)
class _Source:
    layer: int
    bind: Callable[[CaptureFn], None]


def bind(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> ExpertCapture:
    """Attaches a capture to every MoE layer of `model`, beside any callback already there.

    Raises:
        EngineConfigError: no MoE layer, or a kernel that routes out of sight.
    """
    sources = [source for module in model.modules() if (source := _source(module)) is not None]
    if not sources:
        raise EngineConfigError(
            f"ELDR found no MoE layer in {type(model).__name__}: this model has no routed "
            'experts that vLLM shows; remove "eldr" from additional_config'
        )
    layers = sorted({source.layer for source in sources})
    capture = ExpertCapture(vllm_config, len(layers), device)
    for source in sources:
        source.bind(capture.callback(layers.index(source.layer)))
    return capture


def _source(module: torch.nn.Module) -> _Source | None:
    if isinstance(module, RoutedExpertsCaptureSource):
        return _Source(module.layer_id, partial(_chain_attribute, module))
    if not isinstance(module, MoERunner):
        return None
    if module._quant_method.is_monolithic:
        return _Source(module.layer_id, partial(_chain_sink, module, _replaying(module)))
    if not isinstance(module.router, BaseRouter):
        raise EngineConfigError(
            f"ELDR cannot see the routing of layer {module.layer_id}: its router "
            f"{type(module.router).__name__} has no capture point in vLLM"
        )
    return _Source(module.layer_id, partial(_chain_attribute, module.router))


def _replaying(module: Any) -> Any:
    """The layer's fused experts, if their kernel reports the ids that it routed to."""
    kernel = getattr(module._quant_method, "moe_kernel", None)
    experts = getattr(getattr(kernel, "impl", None), "fused_experts", None)
    if isinstance(experts, FusedMoEExpertsMonolithic) and experts.supports_routing_replay_capture():
        return experts
    raise EngineConfigError(
        f"ELDR cannot see the routing of layer {module.layer_id}: the MoE kernel "
        f"{type(experts).__name__} routes inside itself and does not report the ids; choose "
        "one that does, for example --moe-backend marlin (MXFP4 models such as GPT-OSS on "
        "Hopper) or --moe-backend triton"
    )


class _Chain:
    """Calls another user's callback and then ours."""

    __slots__ = ("ours", "theirs")

    def __init__(self, theirs: CaptureFn, ours: CaptureFn) -> None:
        self.theirs, self.ours = theirs, ours

    def __call__(self, topk_ids: torch.Tensor) -> None:
        self.theirs(topk_ids)
        self.ours(topk_ids)


def _chain_attribute(owner: Any, ours: CaptureFn) -> None:
    owner.capture_fn = _beside(owner.capture_fn, ours)


def _chain_sink(module: Any, experts: Any, ours: CaptureFn) -> None:
    sink = module.routed_experts.routing_sink
    if sink is None:
        module.routed_experts.routing_sink = RoutedExpertsSink(experts.moe_config, ours)
    else:
        sink.capture_fn = _beside(sink.capture_fn, ours)


def _beside(bound: CaptureFn | None, ours: CaptureFn) -> CaptureFn:
    """`ours` after the callback that another user bound; one of ours bound earlier goes."""
    theirs = bound.theirs if isinstance(bound, _Chain) else bound
    owner = getattr(getattr(theirs, "func", None), "__self__", None)
    if theirs is None or isinstance(owner, ExpertCapture | LayerIds):
        return ours
    return _Chain(theirs, ours)
