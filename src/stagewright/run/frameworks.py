"""Habits of training frameworks: a profile is a set of defaults, each of an option of its own.

`Run.framework` names one. What a run gives goes before its profile; what neither gives is the
default of `Run`, which is Megatron-LM's habit. docs/frameworks.md shows both, with sources.

>>> from stagewright.run.settings import Run
>>> run = Run(model="llama3-8b", framework="torchtitan", recompute_early_stop=False)
>>> run.operators, run.recompute_early_stop
('eager', False)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "megatron": {},
    # PyTorch 2.13: FSDP2, DistributedDataParallel, DTensor, torch.utils.checkpoint, AdamW.
    "torchtitan": {
        "activation_gather": "keep",
        "clip_grad_norm": "vector",
        "cp_comm_type": "all_gather",
        "cp_grad_comm_type": "ring",
        "ddp_bucket_cap_mb": 25,
        "fsdp_reduce": "last",
        "fsdp_root_unit": True,
        "fsdp_shard_dim": "first",
        "fuse": False,
        "joint_projections": False,
        "operators": "eager",
        "optimizer_step_tensors": True,
        "params_dtype": "fp32",
        "recompute_early_stop": True,
        "pipeline_caches": True,
        "repeat_kv": True,
        "sequence_parallel_grads": "dtensor",
        "set_grads_to_none": True,
        "whole_embedding_grad": True,
    },
}
"""What each framework does where `Run` has another default."""


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are given, with those that their framework is known for."""
    profile = PROFILES.get(str(values.get("framework", "megatron")), {})
    return {**profile, **values}


def default(framework: str, setting: str, otherwise: Any) -> Any:
    """What a setting is where it is not given."""
    return PROFILES[framework].get(setting, otherwise)


def without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that its framework does not imply: another one may be named instead."""
    profile = PROFILES.get(str(values.get("framework", "megatron")), {})
    return {k: v for k, v in values.items() if k not in profile or profile[k] != v}
