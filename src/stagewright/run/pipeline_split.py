"""Layers of each virtual pipeline stage, as frameworks split a model where nobody names them."""

from __future__ import annotations

import re
from itertools import accumulate

from stagewright.errors import UserError
from stagewright.model.architecture import LIMITS
from stagewright.model.config import ModelConfig


def even_split(
    layers: int, stages: int, first_less: int = 0, last_less: int = 0
) -> tuple[int, ...]:
    """Layers per virtual stage, as even as possible; the first stages take what is left over.

    The embedding counts as `first_less` layers and the output as `last_less`, as with torchtitan's
    `generate_llm_fqn_per_model_part` and Megatron-LM's `account_for_embedding_in_pipeline_split`
    and `account_for_loss_in_pipeline_split`.

    >>> even_split(10, 4), even_split(16, 4, first_less=1, last_less=1)
    ((3, 3, 2, 2), (4, 5, 4, 3))
    """
    if stages == 1:
        return (layers,)
    least, more = divmod(layers + first_less + last_less, stages)
    split = [least + (stage < more) for stage in range(stages)]
    split[0] -= first_less
    split[-1] -= last_less
    return tuple(split)


def compute_split(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """nanotron's split: a stage takes blocks until it has more than its share of the products.

    A layer counts for the parameters of its products as those of Llama's layer are counted there,
    with as many key-value heads as query heads; the output for its table, all other blocks for
    nothing (`build_model`, `get_block_compute_costs`; nanotron 2411b02).

    >>> from stagewright.model.catalog import resolve
    >>> compute_split(resolve("llama3.2-1b"), 4), compute_split(resolve("llama3.1-8b"), 4)
    ((5, 5, 5, 1), (9, 9, 8, 6))
    """
    width = model.num_attention_heads * model.kv_channels
    inner = (3 if model.gated else 2) * model.ffn_hidden_size
    layer = (4 * width + inner) * model.hidden_size
    costs = [layer] * model.depth + [model.vocab_size * model.hidden_size]
    split, stage = [0] * stages, 0
    for i, spent in enumerate(accumulate(costs)):
        split[stage] += i < model.depth
        stage += spent * stages > sum(costs) * (stage + 1)
    return tuple(split)


def split_with_ends(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Layers per virtual stage if the first and the last rank have a number of their own.

    Megatron-LM's `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers`:
    a rank's layers are its chunks', and the other ranks share what is left.

    >>> split_with_ends(30, 4, 1, first=7, last=5), split_with_ends(60, 4, 2, None, last=12)
    ((7, 9, 9, 5), (8, 8, 8, 6, 8, 8, 8, 6))
    """
    ends = {0: first, pp - 1: last} if pp > 1 else {0: first}
    given = {rank: count for rank, count in ends.items() if count is not None}
    others = pp - len(given)
    left = layers - sum(given.values())
    ranks = [given.get(rank, left // others if others else 0) for rank in range(pp)]
    if left < 0 or sum(ranks) != layers or any(count % vpp for count in ranks):
        of_ends = " and ".join(str(count) for count in given.values())
        raise UserError(
            f"--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers: {of_ends} "
            f"of {layers} layers leave {left} for {others} ranks, which pp={pp} and vpp={vpp} do "
            "not divide; use others, or --layers-per-stage"
        )
    return tuple(ranks[rank] // vpp for _ in range(vpp) for rank in range(pp))


def layout_split(layout: str, pp: int) -> tuple[int, tuple[int, ...]]:
    """vpp, and layers per virtual stage, of Megatron-LM's `--pipeline-model-parallel-layout`.

    Stages between bars, of `E` (embedding), `t` (a layer), `m` (multi-token prediction) and `L`
    (loss), with multiples as in `t*3` and `(tt|)*29`. The embedding must be on the first stage, and
    multi-token prediction and loss on the last.

    >>> layout_split("Et*3|(tt|)*2,ttL", pp=2)
    (2, (3, 2, 2, 2))
    """
    where = f"--pipeline-model-parallel-layout {layout}"
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        if sum(int(n) * len(of) for of, n in re.findall(pattern, text)) > 4 * LIMITS["num_layers"]:
            raise UserError(f"{where}: has more layers than any model; correct it")
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    stages = text.split("|")
    if not re.fullmatch(r"Et*(\|t*)*m*L", text):
        raise UserError(
            f"{where}: wanted E in the first of the stages between bars, then t for each layer, "
            "and m and L in the last, such as Et*3|(tt|)*29,t*3L; use --layers-per-stage for others"
        )
    if len(stages) % pp:
        raise UserError(f"{where}: has {len(stages)} stages, which pp={pp} does not divide; set pp")
    return len(stages) // pp, tuple(stage.count("t") for stage in stages)
