"""The engine's own top-k ids of every MoE layer, captured on the device inside the forward."""

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
from eldr.geometry import Geometry

CaptureFn = Callable[[torch.Tensor], None]


class ExpertCapture(RoutedExpertsCapturer):  # type: ignore[misc]  # vLLM is not typed
    """Ids of the current step, int32 [max tokens, L, K], row = token of the step.

    Only MoE layers have a place: `capture` maps vLLM's layer number to it. vLLM's capturer
    sorts out which rows are this rank's under data, expert and sequence parallelism. The copy
    into `device_buffer` is recorded in CUDA graphs; rows past the step's tokens are stale.
    """

    def __init__(self, vllm_config: Any, layer_ids: list[int], device: torch.device) -> None:
        model = vllm_config.model_config
        self.geometry = Geometry(
            len(layer_ids), int(model.get_num_experts()), int(model.get_num_experts_per_tok())
        )
        self._place = {layer: place for place, layer in enumerate(layer_ids)}
        tokens = _rows(vllm_config)
        self.shape_per_token = (self.geometry.layers, self.geometry.top_k)
        self.device_buffer = torch.zeros(
            (tokens, *self.shape_per_token), dtype=torch.int32, device=device
        )
        self.dp_rank = vllm_config.parallel_config.data_parallel_rank
        self.tp_size = vllm_config.parallel_config.tensor_parallel_size

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Stores one layer's ids [tokens, K]; called by the layer's router."""
        if tracing.ON:
            tracing.push(tracing.CAPTURE, layer_id)
        super().capture(self._place[layer_id], topk_ids)
        if tracing.ON:
            tracing.pop()


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
    capture = ExpertCapture(vllm_config, layers, device)
    for source in sources:
        source.bind(partial(capture.capture, source.layer))
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
    if theirs is None or isinstance(owner, ExpertCapture):
        return ours
    return _Chain(theirs, ours)
