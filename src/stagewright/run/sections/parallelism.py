"""Degrees of parallelism, what they shard, and how ranks are numbered: settings and their help.

`parallel.degrees` makes axes of them.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from stagewright.run.sections.declare import (
    WHOLE_WEIGHTS,
    Count,
    Switch,
    Text,
    idle_axes,
    of_inference,
    of_training,
    setting,
    whole,
)


@dataclass(frozen=True, kw_only=True)
class ParallelismSection:
    """Degrees that split the model, the batch and the sequence.

    World size: tp * cp * dp * pp, plus the ranks of `prefill`.
    """

    tp: Count = setting(1, "Tensor parallelism: ranks that split every layer.")
    cp: Count = setting(1, "Context parallelism: ranks that split the sequence.")
    dp: Count = setting(1, "Data parallelism: ranks that split the batch.")
    pp: Count = setting(1, "Pipeline parallelism: ranks that split the layers.")
    dcp: Count | None = of_inference(
        None,
        "Inference: ranks of cp and tp that shard the KV cache of a request by token.",
        unset="cp",
    )
    """Those of cp first, then ranks of tp that would hold copies. dcp does not add to the world
    size."""
    ep: Count = setting(
        1, "Expert parallelism over ranks of tp, cp and dp; not a factor of the world size."
    )
    etp: Count | None = setting(
        None, "Tensor parallelism inside an expert.", unset="tp; in inference with ep, 1"
    )
    vpp: Count = of_training(
        1,
        "Virtual pipeline stages of each pipeline rank.",
        elsewhere="a pipeline rank holds one stage",
    )
    dp_shard: Count | None = of_training(
        None,
        "Ranks of dp that share one copy of the sharded state (HSDP).",
        unset="all of dp",
        elsewhere=WHOLE_WEIGHTS,
    )
    zero: Annotated[int, whole(0, 3)] = of_training(
        0,
        "Sharded over dp: 1 optimizer states, 2 also gradients, 3 also parameters (FSDP).",
        idle=(idle_axes("dp", "cp"),),
        elsewhere=WHOLE_WEIGHTS,
    )
    reshard_after_forward: Switch = of_training(
        True,
        "With zero=3: free gathered parameters after forward, gather them again in backward.",
        elsewhere=WHOLE_WEIGHTS,
    )
    sequence_parallel: Switch = setting(
        False, "Split norms and dropout over tp, along the sequence.", idle=(idle_axes("tp"),)
    )
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = of_training(
        "p2p",
        "Attention over other ranks' tokens: a ring (p2p), all-gathered K and V, or Ulysses (a2a).",
        idle=(idle_axes("cp"),),
        elsewhere="keys and values of new tokens are gathered",
        habits={"torchtitan": "all_gather"},
    )
    strategy: Text | None = setting(
        None,
        "File of layouts of values and parameters, such as wq [M, A/tp, D].",
        metavar="FILE",
        of_requests=True,
    )
    """Rows of the file go before what the degrees imply."""
    order: Text = setting(
        "tp-cp-ep-dp-pp",
        "Numbering of ranks: degrees, the fastest first.",
        metavar="DEGREES",
        of_requests=True,
    )
