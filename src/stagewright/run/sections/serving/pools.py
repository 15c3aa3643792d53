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
        "Instances that compute prompts only (disaggregated serving); --instances then decode.",
        unset="none",
        names=("prefill-workers",),
    )
    prefill: Text | None = setting(
        None,
        "The layout of these, such as tp=4,pp=2.",
        unset="as those that decode",
        metavar="SETTINGS",
    )
    prefill_hardware: Text | None = setting(
        None, "Hardware of these.", unset="as those that decode", metavar="NAME"
    )
    prefill_router: Text = setting(
        "round_robin", "Which of these a request goes to; --router chooses who decodes."
    )
    kv_transfer: KvPush = setting(
        "prompt",
        "Prefill instances' caches are sent when the prompt, a chunk or a layer is computed.",
    )
    stages: Text | None = setting(
        None,
        "A .yaml of what requests pass before their prompts: rows of stage (embed, search, rerank, "
        "tool: stations; store: a tier of caches beside the GPUs) and its figures.",
        metavar="FILE",
    )
    pools: Text | None = setting(
        None,
        "A .yaml of instances of several kinds: rows of serves (prefill, decode, both), instances, "
        "hardware, and settings of a layout and of an engine.",
        metavar="FILE",
    )
