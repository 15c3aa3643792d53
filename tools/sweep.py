"""Random runs of every model: each is sound and conserves, a share is written and verified.

The draws are seeded: the same runs every time. A run that is refused by a `UserError` counts for
nothing. `tests/slow/test_sweep.py` tries the first runs; for more, with another seed:

    python tools/sweep.py 100000 7
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import stagewright
from invariants import check
from stagewright.check.program import check_program
from stagewright.check.verify import verify
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.config import ModelConfig
from stagewright.model.presets import PRESETS
from stagewright.program.columns import TaskKind
from stagewright.run.settings import Run
from stagewright.schedule.schedules import SCHEDULES

RUNS = 25  # of one seed
WRITTEN = 4  # every so many runs are written and verified
MOST_RANKS = 32
VOCAB = 240  # which all these degrees of tp divide

Dice = random.Random


# ---- draws ---------------------------------------------------------------------------------------


def draw(dice: Dice) -> dict[str, Any]:
    """Settings of a toy run, most of them possible."""
    name = dice.choice(list(PRESETS))
    model = PRESETS[name]
    degrees = _degrees(dice, model)
    if dice.random() < 0.15:
        return _serving(dice, name, degrees)
    tp, cp, dp, pp = (degrees[axis] for axis in ("tp", "cp", "dp", "pp"))
    zero = dice.choice((0, 0, 1, 2, 3))
    size, step = dice.choice((1, 1, 2)), dice.choice((1, 1, 2, 3))
    found: dict[str, Any] = {
        "model": name,
        **degrees,
        **_stages(dice, model, pp, step),
        "vocab": VOCAB,
        "seq_length": cp * tp * dice.choice((2, 4, 6)),
        "decoder_seq_length": cp * tp * 4
        if model.encoder_num_layers and dice.random() < 0.5
        else None,
        "micro_batch_size": size,
        "zero": zero,
        "sequence_parallel": tp > 1 and dice.random() < 0.5,
        "cp_comm_type": dice.choice(("p2p", "all_gather", "a2a")),
        "precision": dice.choice(("bf16", "bf16", "fp32", "fp8")),
        "mtp_num_layers": dice.choice((None, None, None, 0, 1, 2)),
        "mtp_loss_scaling_factor": dice.choice((0.1, 0.3)),
        "optimizer": dice.choice(("adamw", "adamw", "sgd")),
        "grad_reduce": dice.choice(("step", "step", "microbatch")),
        "activation_gather": dice.choice(("again", "keep")),
        "bucket": dice.choice(("layer", "parameter")),
        "streams": dice.choice(("one", "one", "separate")),
        "order": "-".join(dice.sample(("tp", "cp", "ep", "dp", "pp"), 5))
        if dice.random() < 0.3
        else "tp-cp-ep-dp-pp",
        **{
            flag: dice.random() < 0.6
            for flag in ("flash_attention", "fuse", "dropout", "clip_grad")
        },
        **_recompute(dice),
        **_offload(dice),
        **(_habits(dice) if dice.random() < 0.4 else {}),
        **(_experts(dice, model) if model.num_experts else {}),
        **(_what_trains(dice) if dice.random() < 0.25 else {}),
    }
    found["global_batch_size"] = size * dp * found.pop("microbatches")
    if zero:
        found["dp_shard"] = dice.choice((None, *(d for d in (1, 2, 3, 4) if dp % d == 0)))
    if zero == 3:
        found["reshard_after_forward"] = dice.random() < 0.6
    return found | (_rare(dice, found) if dice.random() < 0.3 else {})


def _rare(dice: Dice, found: dict[str, Any]) -> dict[str, Any]:
    """Settings that few runs have, one of them."""
    choices: dict[str, tuple[Any, ...]] = {
        "document_length": (4,),
        "first_stage_less_layers": (1,),
        "last_stage_less_layers": (1,),
        "pipeline_split": ("compute",),
    }
    if found.get("schedule") == "interleaved":
        choices["microbatch_group_size_per_vp_stage"] = (2, 3)
    if found.get("optimizer") == "sgd":
        choices["sgd_momentum"] = (0.0, 0.5)
    if found.get("precision") == "fp8":
        choices["fp8_recipe"] = ("tensorwise", "rowwise", "blockwise", "mxfp8")
        choices["fp8_dot_product_attention"] = (True,)
    if found.get("reshard_after_forward") is False:
        choices["reshard_after_backward"] = (False, True)
    if "moe_token_dispatcher_type" in found:
        choices["moe_counts_exchange"] = ("all_gather", "all_to_all")
    if "lora_rank" in found:
        choices["lora_alpha"] = (8, 64)
    name = dice.choice(sorted(choices))
    return {name: dice.choice(choices[name])}


def _serving(dice: Dice, name: str, degrees: dict[str, int]) -> dict[str, Any]:
    """Settings of a step of inference."""
    model = PRESETS[name]
    decode = dice.random() < 0.5
    cp, tp = degrees["cp"], degrees["tp"]
    kept = 1 if model.kv_lora_rank else model.num_query_groups
    copies = tp // math.gcd(tp, kept)
    return {
        "mode": "decode" if decode else "prefill",
        "model": name,
        **degrees,
        "dcp": dice.choice((None, None, 1, 2 * cp, copies * cp, copies * cp)),
        "layers": max(degrees["pp"], _shared(model)) + dice.randint(1, 3),
        "vocab": VOCAB,
        "batch_size": dice.choice((1, degrees["dp"], 4 * degrees["dp"] * degrees["pp"])),
        "prompt_length": dice.choice((None, None if cp > 1 else 8))
        if decode
        else dice.choice((1, 8, 24)),
        "context_length": 0 if model.encoder_num_layers and not decode else dice.choice((0, 5, 32)),
        "num_speculative_tokens": dice.choice((0, 0, 2)) if decode else 0,
        "source_length": dice.choice((None, 9)) if model.encoder_num_layers else None,
        "kv_cache": dice.choice(("paged", "paged", "contiguous")),
        "kv_block_size": dice.choice((1, 16)),
        "kv_cache_dtype": dice.choice((None, "bf16", "fp8", "fp32")),
        "precision": dice.choice(("bf16", "fp32", "fp8")),
        "sequence_parallel": False,
        "fuse": dice.random() < 0.6,
        "streams": dice.choice(("one", "separate")),
        "device_memory": dice.choice((None, "80e9", "8GiB")),
        "weight_precision": dice.choice((None, None, "fp8", "int4", "mxfp4")),
        "mla": dice.choice((None, "naive", "absorb")) if model.kv_lora_rank else None,
        "num_redundant_experts": dice.choice((0, degrees["ep"])) if "ep" in degrees else 0,
        "prefill": f"tp={dice.choice((1, 2))}" if decode and dice.random() < 0.2 else None,
    }


def _degrees(dice: Dice, model: ModelConfig) -> dict[str, int]:
    heads = model.num_attention_heads
    while True:
        found = {
            "tp": dice.choice([d for d in (1, 1, 2, 4, 8, 3, 5) if not heads % d]),
            "cp": dice.choice((1, 1, 1, 2, 3)),
            "dp": dice.choice((1, 1, 2, 3, 4)),
            "pp": dice.choice((1, 1, 2, 3, 4)),
        }
        ranks = found["tp"] * found["cp"] * found["dp"]
        if ranks * found["pp"] > MOST_RANKS:
            continue
        if model.num_experts:
            etp = dice.choice((None, None, 1, 2))
            inside = etp or found["tp"]
            fit = [
                d for d in (1, 2, 3, 4, 8) if not (model.num_experts % d or ranks % (inside * d))
            ]
            found["ep"] = dice.choice(fit or [1])
            if etp:
                found["etp"] = etp
        return found


def _stages(dice: Dice, model: ModelConfig, pp: int, step: int) -> dict[str, Any]:
    """Layers, schedule, virtual stages, microbatches."""
    names = [n for n, s in SCHEDULES.items() if (pp > 1 or n in ("1f1b", "gpipe"))]
    name = dice.choice(names)
    vpp = SCHEDULES[name].chunks or (dice.choice((1, 2, 3)) if pp > 1 else 1)
    microbatches = step * dice.choice((1, pp))
    # A schedule that takes no such number gets the next that it takes, or is refused.
    takes = (m for m in range(microbatches, microbatches + 20) if SCHEDULES[name].takes(pp, m))
    least = max(pp * vpp, 2, min(model.first_dense_layers + 1, 4), _shared(model))
    layers = dice.randint(least, least + 3)
    found: dict[str, Any] = {
        "layers": layers,
        "vpp": vpp,
        "schedule": name,
        "microbatches": next(takes, microbatches),
    }
    stages = pp * vpp
    if dice.random() < 0.3 and stages > 1:
        cuts = sorted(dice.sample(range(1, layers), stages - 1)) if layers > stages else None
        if cuts:
            split = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
            if dice.random() < 0.3 and stages > 2:  # the ends hold embedding and head anyway
                split[1] += split[0]
                split[0] = 0
            found["layers_per_stage"] = tuple(split)
    return found


def _shared(model: ModelConfig) -> int:
    """Layers of which one has a shared block."""
    return model.shared_blocks.layers.index(1) + 1 if model.shared_blocks else 0


def _recompute(dice: Dice) -> dict[str, Any]:
    kind = dice.choice(("none", "none", "selective", "full"))
    if kind == "selective":
        modules = ("core_attn", "norm", "activation")
        some = tuple(dice.sample(modules, dice.randint(1, 3)))
        return {"recompute": kind, "recompute_modules": some}
    if kind == "full":
        if dice.random() < 0.2:
            kept = ("qkv_proj", "context", "out_proj", "mlpwi", "mlpwo")
            some = tuple(sorted(dice.sample(kept, dice.randint(1, 3))))
            return {
                "recompute": kind,
                "recompute_save": some,
                "recompute_save_on_host": dice.random() < 0.3,
            }
        return {"recompute": kind, "recompute_num_layers": dice.choice((None, 1))}
    return {"recompute": kind}


def _offload(dice: Dice) -> dict[str, Any]:
    if dice.random() < 0.8:
        return {"memory_allowance": dice.choice((None, "2GiB"))}
    return {
        "cpu_offloading_num_layers": dice.choice((None, 1)),
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": dice.choice((None, 0.5)),
    }


def _what_trains(dice: Dice) -> dict[str, Any]:
    """Adapters, or parameters that are frozen."""
    targets = dice.choice(
        (
            ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
            ("q_proj", "v_proj"),
            ("linear_fc2",),
            ("all-linear",),
            ("layer1.linear_fc1", "layer2.o_proj"),
        )
    )
    some = dice.choice(("embedding.*", "layer0.*", "layer[01].*", "head.*", "*norm*", "wo", "w_up"))
    if dice.random() < 0.4:
        return {dice.choice(("freeze", "trainable")): (some,)}
    return {
        "lora_rank": 12,
        "lora_target_modules": targets,
        "lora_dropout": dice.choice((0.0, 0.1)),
        "lora_all_to_all": dice.random() < 0.3,
        "trainable": dice.choice((None, None, (some,))),
        "quantize_base": dice.choice((None, None, "fp8", "nf4", "nf4-double")),
    }


def _habits(dice: Dice) -> dict[str, Any]:
    """A framework, or some of its habits."""
    found: dict[str, Any] = {"framework": dice.choice(("megatron", "torchtitan"))}
    choices: dict[str, tuple[Any, ...]] = {
        "params_dtype": ("bf16", "fp32"),
        "exp_avg_dtype": ("bf16", "fp8"),
        "exp_avg_sq_dtype": ("bf16", "fp32"),
        "grad_reduce_dtype": ("bf16", "fp32"),
        "compiled_loss": (False, True),
        "transposed_attention": (False, True),
        "defer_embedding_wgrad_compute": (False, True),
        "wgrad_deferral_limit": (0, 2),
        "optimizer_step_tensors": (False, True),
        "recompute_early_stop": (False, True),
        "fsdp_root_unit": (False, True),
        "fsdp_reduce": ("microbatch", "last"),
        "fsdp_shard_dim": ("best", "first", "few_experts_second"),
        "ddp_bucket_cap_mb": (None, 1, 25),
        "bucket": ("layer", "parameter", "rank"),
        "loss_parallel": (False, True),
        "input_grad_reduce": ("shared", "linear"),
        "whole_embedding_grad": (False, True),
        "sequence_parallel_grads": ("step", "dtensor"),
        "clip_grad_norm": ("total", "vector"),
        "cp_grad_comm_type": ("reduce_scatter", "ring"),
        "operators": ("fused", "eager"),
        "repeat_kv": (False, True),
        "joint_projections": (False, True),
        "pipeline_caches": (False, True),
        "scatter_gather_tensors_in_pipeline": (False, True),
        "set_grads_to_none": (False, True),
    }
    some = dice.sample(sorted(choices), dice.randint(0, 3))
    return found | {name: dice.choice(choices[name]) for name in some}


def _experts(dice: Dice, model: ModelConfig) -> dict[str, Any]:
    """Settings of mixtures of experts."""
    capacity = dice.choice((None, None, 1.0, 1.5))
    load = [dice.choice((1, 2, 7)) for _ in range(model.num_experts)]
    return {
        "moe_token_dispatcher_type": dice.choice(("alltoall", "alltoall", "allgather")),
        "moe_apply_probs": dice.choice((None, "experts", "input", "output")),
        "moe_expert_capacity_factor": capacity,
        "moe_pad_expert_input_to_capacity": capacity is not None and dice.random() < 0.5,
        "moe_router_dtype": dice.choice((None, "fp32")),
        "moe_router_load_balancing_type": dice.choice(
            ("aux_loss", "seq_aux_loss", "global_aux_loss")
        ),
        "moe_aux_loss_coeff": dice.choice((0.0, 0.01)),
        "moe_z_loss_coeff": dice.choice((0.0, 0.001)),
        "moe_router_enable_expert_bias": dice.choice((None, True, False)),
        "expert_load": (tuple(load),) if dice.random() < 0.2 else None,
    }


# ---- what must hold ------------------------------------------------------------------------------


def sound(compiled: CompiledRun, dice: Dice) -> None:
    """The program keeps every rule, by two checkers that share no code."""
    check_program(compiled.program)
    if compiled.run.prefill is not None:  # two meshes, where `check` knows one; `verify` both
        return
    check(
        compiled.program,
        streams=compiled.run.streams,
        seeds=(dice.randrange(1000),),
        rendezvous=(False,),
    )


PRODUCTS = ("einsum", "attention", "attention_bwd")  # as kernels are named that are not fused


def products(compiled: CompiledRun) -> list[int]:
    """FLOPs of matrix products and attention of all ranks: forward, recompute, backward."""
    found = [0, 0, 0]
    for c in compiled.program.classes:
        t = c.tasks
        wanted = [n for n, op in enumerate(t.ops) if op in PRODUCTS]
        some = (t.kind == TaskKind.COMPUTE) & [op in wanted for op in t.op.tolist()]
        for nth in range(3):
            found[nth] += int(t.flops[some & (t.phase == nth)].sum()) * len(c.ranks)
    return found


ALONE = (
    *("model", "layers", "seq_length", "decoder_seq_length", "flash_attention"),
    *("recompute_modules", "mtp_num_layers", "operators"),
    *("trainable", "freeze", "lora_rank", "lora_target_modules"),
    *("document_length", "recompute_save", "dropout"),
)
"""Settings that one rank's work depends on, besides how it recomputes."""


@cache
def alone(recompute: str, *values: Any) -> list[int]:
    """The same of one sequence on one rank."""
    settings = dict(zip(ALONE, values, strict=True))
    return products(compile(Run(**settings, vocab=VOCAB, fuse=False, recompute=recompute)))


def pairs_lost(run: Run) -> float:
    """The share of pairs of query and key that ranks of cp leave out, each rounding its own down.

    Pairs of whole sequences divide by all degrees of cp; those of documents do so where
    documents fill their sequence.
    """
    shared = 1 if run.cp_comm_type == "a2a" else run.cp
    lost = 0.0
    for keys in (run.seq_length, run.decoder_seq_length):
        if keys and run.document_length and run.document_length < keys:
            whole, rest = divmod(keys, run.document_length)
            pairs = (whole * run.document_length**2 + rest**2) // 2
            lost = max(lost, pairs % shared / pairs)
    return lost


def conserves(compiled: CompiledRun) -> None:
    """All ranks together do the work of one: more only where ranks share what cannot be split."""
    run, model = compiled.run, compiled.model
    if run.mode != "train":
        return
    forward, again, backward = products(compiled) if not run.fuse else (0, 0, 0)
    assert again <= forward
    assert (again > 0) <= (run.recompute != "none")
    if run.fuse or model.num_experts:  # experts round their tokens up, on every rank
        return
    assert run.layers
    assert run.seq_length
    assert run.global_batch_size
    some = run.recompute_num_layers is not None  # of each stage, so of no use alone
    kind = "none" if some else run.recompute
    whole = alone(kind, *(getattr(run, name) for name in ALONE))
    if some and model.state_space:  # time steps, made again in any case, count as recompute
        return
    found = [forward, backward, again]
    if some or run.recompute_early_stop:
        found.pop()
    wanted = [run.global_batch_size * whole[nth] for nth in (0, 2, 1)[: len(found)]]
    ends = SCHEDULES[run.schedule].ends if run.schedule in SCHEDULES else None
    if ends and "output_with_gradient" in ends.after:  # forward does a product of backward
        found[:2], wanted[:2] = [sum(found[:2])], [sum(wanted[:2])]
    heads = run.tp * (run.cp if run.cp_comm_type == "a2a" else 1)  # ranks that split them
    copied = model.kv_lora_rank or model.mlm_transform or model.pooler or model.embedding_size
    copied = copied or model.state_space  # keys and queries that heads share
    if model.num_query_groups % heads == 0 and not (copied and run.tp > 1):
        lost = pairs_lost(run)
        assert all(0 <= w - f <= lost * w for f, w in zip(found, wanted, strict=True)), (
            found,
            wanted,
            lost,
        )
    else:
        assert all(w <= f <= heads * w for f, w in zip(found, wanted, strict=True)), (found, wanted)


def written(compiled: CompiledRun, folder: Path, *, whole: bool) -> None:
    """What is written is sound to `verify`, which reads it like a stranger's."""
    stagewright.generate(compiled, folder)
    if not whole:
        (folder / "manifest.json").unlink()
    report = verify(folder, workers=1)
    expected = {"short-first"}  # these are toys
    if compiled.run.streams == "separate":
        expected |= {"order-left-to-timing", "loose-group"}
    run = compiled.run
    if run.cpu_offloading_num_layers or run.optimizer_cpu_offload or run.recompute_save_on_host:
        expected |= {"memory-node"}
    if run.schedule in SCHEDULES and SCHEDULES[run.schedule].ends:
        expected |= {"broadcast"}
    assert {found.code for found in report.findings} <= expected, report.findings
    assert report.ok
    assert report.ranks == compiled.run.world_size
    assert whole or compiled.run.world_size == 1 or "run" in report.checks


def sweep(seed: str, runs: int, folder: Path) -> int:
    """So many runs that are possible; returns how many were refused."""
    dice = random.Random(seed)
    done = refused = 0
    while done < runs:
        settings = draw(dice)
        try:
            try:
                compiled = compile(Run(**settings))
            except UserError:
                refused += 1
                continue
            sound(compiled, dice)
            conserves(compiled)
            if done % WRITTEN == 0 or compiled.run.prefill is not None:
                written(compiled, folder / str(done), whole=done % (4 * WRITTEN) == 0)
        except Exception as error:
            error.add_note(f"stagewright show {' '.join(_options(settings))}")
            raise
        done += 1
    return refused


def _options(settings: dict[str, Any]) -> list[str]:
    """The settings as one would type them."""
    found = [settings["model"]]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None and name != "model":
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            found += [f"--{flag}", text]
    return found


if __name__ == "__main__":
    for chunk in range(int(sys.argv[1]) // RUNS):
        with tempfile.TemporaryDirectory() as place:
            name = f"{sys.argv[2]} {chunk}"
            try:
                print(name, sweep(name, RUNS, Path(place)), "refused", flush=True)
            except Exception:
                traceback.print_exc()
