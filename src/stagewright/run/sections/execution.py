"""Settings of the execution: what a framework overlaps, and what that costs."""

from dataclasses import dataclass
from typing import Literal

from stagewright.errors import UserError, did_you_mean
from stagewright.run.sections.declare import (
    DEGREES,
    Number,
    Seconds,
    Switch,
    idle_axes,
    of_inference,
    setting,
)

MOST_METADATA_S = 10.0
"""More seconds for a message are milliseconds where seconds were wanted."""

GRAPH_MODULES = ("attn", "mlp", "mamba", "moe_router", "moe_preprocess", "moe")
"""Modules of a layer that may be captured as CUDA graphs, in Megatron-LM's words."""

ServingEngine = Literal["vllm", "sglang", "trtllm"]

_NOT_SHARDED = idle_axes("dp", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution of a program by a framework; the defaults overlap all that the program allows."""

    streams: Literal["separate", "one"] = "separate"
    """`one`: kernels on one stream, all else on another, as written in traces for ASTRA-sim.

    Orders the communication of the simulation; `Run.streams` orders that of traces."""
    no_overlap: frozenset[str] = setting(
        frozenset(),
        "Axes whose communication does not overlap with kernels: tp,cp,ep,dp,pp.",
        metavar="LIST",
    )
    prefetch: Number = setting(
        1,
        "Number of blocks for which sharded weights are gathered ahead.",
        idle=(*({"zero": stage} for stage in (0, 1, 2)), _NOT_SHARDED),
    )
    overlap_param_gather: Switch = setting(
        False,
        "Sharded optimizer: gather updated parameters in the next forward pass.",
        idle=({"zero": 0}, _NOT_SHARDED),
    )
    """Block by block (Megatron-LM's name); here: at the start of this step."""
    tp_comm_overlap: Switch = setting(
        False,
        "Split tp's collectives into chunks that overlap with the adjacent matrix products.",
        idle=({"tp": 1}, {"sequence_parallel": False}),
    )
    """Megatron-LM's name; PyTorch's async TP. Durations follow it (`durations.task_seconds`)."""
    overlap_moe_expert_parallel_comm: Switch = setting(
        False, "Compute one microbatch while another one's tokens are exchanged between experts."
    )
    """The backward pass of a microbatch and the forward pass of a later one run together
    (Megatron-LM's name); see `time.simulate.ep_overlap`."""
    moe_flex_dispatcher: Switch = setting(
        False, "Send a token once to each rank that has experts for it (DeepEP, HybridEP)."
    )
    """Not once for each expert: Megatron-LM's `--moe-token-dispatcher-type flex`. Durations follow
    it; traces have a copy for each expert."""
    serving_engine: ServingEngine | None = of_inference(
        None,
        "Serving engine whose kernels run: vLLM, SGLang or TensorRT-LLM.",
        unset="the scheduler's in serving; in steps alone, constants for all three",
    )
    """Constants of an engine's own kernels, where the hardware has any, and what it does within one
    kernel; see `time.engines`."""
    launch_mode: Literal["eager", "blocking", "compile", "cuda_graph", "ahead"] | None = setting(
        None,
        "Kernel launches by the host: eager, blocking, compiled, CUDA graphs, or free (ahead).",
        unset="eager; compile with torchtitan and in prefill; cuda_graph in decode",
    )
    """vLLM's `--enforce-eager`, torchtitan's `compile`, Megatron-LM's `--cuda-graph-impl`; see
    `time.simulate.launches`."""
    cuda_graph_modules: frozenset[str] = setting(
        frozenset(),
        "Modules of each layer that are CUDA graphs; other kernels are launched one by one.",
        unset="the whole step is one graph",
        metavar="LIST",
    )
    """Megatron-LM's words: attn, mlp, mamba, moe_router, moe_preprocess, moe. attn, mlp and mamba
    each stand for all of a layer but its router and experts. Needs launch mode `cuda_graph`."""
    collective_checks: Switch = setting(
        False, "Compare every collective across hosts first (TORCH_DISTRIBUTED_DEBUG=DETAIL)."
    )
    """PyTorch's `ProcessGroupWrapper`: a barrier and an exchange of descriptions over TCP, for a
    time that grows with the ranks of the group; see `time.simulate.launches`."""
    p2p_metadata_s: Seconds = setting(
        0.0, "Time in which hosts exchange the shape of a pipeline message.", metavar="TIME"
    )
    """Frameworks that know all shapes send none; some versions of nanotron slept for 0.1 s between
    looks at whether the metadata of a tensor had come."""
    pipeline_drain: Switch = setting(
        False, "Decode with pp: time one step on an empty pipeline, not one of many."
    )
    """By default pp batches are in flight, as in vLLM; see `time.simulate.steady`."""

    def __post_init__(self) -> None:
        for axis in sorted(self.no_overlap - set(DEGREES)):
            hint = did_you_mean(axis, DEGREES)
            raise UserError(
                f"no_overlap: there is no axis {axis!r}; use {', '.join(DEGREES)}{hint}"
            )
        for module in sorted(self.cuda_graph_modules - set(GRAPH_MODULES)):
            hint = did_you_mean(module, GRAPH_MODULES)
            raise UserError(
                f"cuda_graph_modules: there is no module {module!r}; use "
                f"{', '.join(GRAPH_MODULES)}{hint}"
            )
        if self.cuda_graph_modules and self.launch_mode != "cuda_graph":
            raise UserError("cuda_graph_modules needs launch_mode=cuda_graph")
        if not 0 <= self.p2p_metadata_s <= MOST_METADATA_S:
            raise UserError(
                f"p2p_metadata_s is {self.p2p_metadata_s}, wanted seconds from 0 to "
                f"{MOST_METADATA_S:g}, such as 0.001"
            )
        if self.prefetch < 0:
            raise UserError(f"prefetch is {self.prefetch}, wanted 0 or more")
