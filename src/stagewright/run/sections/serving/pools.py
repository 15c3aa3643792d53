"""Instances of several kinds: those that compute prompts beside those that decode, and others."""

from dataclasses import dataclass
from typing import Literal

from stagewright.run.sections.declare import Count, Text, setting

KvPush = Literal["prompt", "chunk", "layer"]
"""Part of a prompt's cache that leaves a prefill instance as soon as it is computed."""


@dataclass(frozen=True, kw_only=True)
class PoolSection:
    """Settings of instances besides those of the layout, and of their roles."""

    prefill_instances: Count | None = setting(
        None,
        "Number of prefill instances (disaggregated serving); --instances then decode.",
        unset="none",
    )
    prefill: Text | None = setting(
        None,
        "Layout of the prefill instances, such as tp=4,pp=2.",
        unset="same as decode",
        metavar="SETTINGS",
    )
    prefill_hardware: Text | None = setting(
        None, "GPU of the prefill instances.", unset="same as decode", metavar="NAME"
    )
    prefill_router: Text = setting(
        "round_robin", "Router of prefill instances; --router chooses the decode instance."
    )
    kv_transfer: KvPush = setting(
        "prompt",
        "Send a prefill instance's cache after the prompt, after each chunk, or after each layer.",
    )
    stages: Text | None = setting(
        None,
        "A .yaml of stages before prompts: rows of stage (embed, search, rerank, tool: "
        "stations; store: a KV cache store) and its figures.",
        metavar="FILE",
    )
    pools: Text | None = setting(
        None,
        "A .yaml of groups of instances: rows of serves (prefill, decode, both), "
        "instances, hardware, and settings of a layout and of an engine.",
        metavar="FILE",
    )
