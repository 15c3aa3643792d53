"""What PyTorch did and what Stagewright says, as figures by name.

`cases/` holds what programs of PyTorch 2.13 did on one rank under a fake process group and fake
tensors: collectives (phase, kind, mesh dim, its size, dtype: count, bytes in, bytes out), FLOPs by
phase and op, bytes held. The mesh is outermost first; bytes in and out are those of a rank's own
tensors; two steps came before. `tools/pytorch/record_programs.py` makes more.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import CompiledRun
from stagewright.model.config import ModelConfig
from stagewright.program.columns import CATEGORIES, COLLECTIVES, PHASES, RankClass, TaskKind
from stagewright.run.settings import Run
from stagewright.schedule.actions import flat

CASES = Path(__file__).parent / "cases"
NAMES = sorted(path.stem for path in CASES.glob("*.json"))

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "int64": "int64"}
SCHEDULES = {
    "GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "zb-h1", "ZBVZeroBubble": "zbv", "DualPipeV": "dualpipev",
}  # fmt: skip
AXES = {
    "dp_shard": "dp",
    "dp_replicate": "dp_rep",
    "dp/ep": "ep",
    "cp+dp": "dp_cp",
}  # ours -> the mesh dim of a case

Case = Mapping[str, Any]


class Traffic(NamedTuple):
    """Collectives of one phase, kind, group and dtype on one rank."""

    count: int
    in_bytes: int
    out_bytes: int


def read(name: str) -> Case:
    """A recorded case."""
    return json.loads((CASES / f"{name}.json").read_text())


def model_of(case: Case) -> ModelConfig:
    m = case["model"]
    experts = {"num_experts": m["experts"], "top_k": m["topk"], "moe_ffn_hidden_size": m["ffn"],
               "apply_probs": "output"} if "experts" in m else {}  # fmt: skip
    return ModelConfig(
        name=case["name"], num_layers=m["layers"], hidden_size=m["hidden"],
        ffn_hidden_size=m["ffn"], num_attention_heads=m["heads"], num_query_groups=m["kv_heads"],
        kv_channels=m["head_dim"], vocab_size=m["vocab"],
        max_position_embeddings=case["options"]["seq"],
        tied_embeddings=case["options"].get("tied", False), **experts,
    )  # fmt: skip


def run_of(case: Case, **more: Any) -> Run:
    """The same run in our words: `framework=torchtitan`, and what the case says it does."""
    o, mesh = case["options"], dict(case["mesh"])
    params, mixed = o.get("params", "fp32"), o.get("mp")
    dp = math.prod(mesh.get(axis, 1) for axis in ("dp", "dp_rep", "ep", "efsdp"))
    sharded = not o.get("ddp") and not mesh.keys().isdisjoint(("dp", "dp_rep", "efsdp"))
    settings: dict[str, Any] = {
        "model": case["name"], "framework": "torchtitan", "dp": dp, "params_dtype": params,
        **{a: mesh.get(a, 1) for a in ("tp", "cp", "pp", "ep")},
        "precision": "bf16" if mixed or params == "bf16" else "fp32",
        "grad_reduce_dtype": mixed[1] if mixed else None,
        "seq_length": o["seq"], "micro_batch_size": o["batch"],
        "global_batch_size": o["batch"] * dp * o.get("n_mb", 1) * o.get("accum", 1),
        "clip_grad": o.get("clip", False), "sequence_parallel": o.get("sp", False),
        "loss_parallel": o.get("loss_parallel", False),
        "input_grad_reduce": "shared" if o.get("shared_input", True) or o.get("sp") else "linear",
        "recompute": "full" if o.get("ac") else "none", "flash_attention": o.get("attn") != "math",
        "vpp": o.get("vpp", 1), "dropout": False,
        "repeat_kv": o.get("attn") != "flash_gqa", "optimizer": o.get("optimizer", "adamw"),
        "first_stage_less_layers": 0, "last_stage_less_layers": 0,  # as the recorder splits them
    }  # fmt: skip
    if not o.get("ddp"):
        settings["ddp_bucket_cap_mb"] = None
    if sharded:
        settings |= {"zero": 3, "reshard_after_forward": o.get("reshard", True)}
        settings["dp_shard"] = mesh["dp"] if "dp_rep" in mesh else None
    if o.get("schedule"):
        settings["schedule"] = SCHEDULES[o["schedule"]]
    if o.get("cp_rotate"):
        settings["cp_comm_type"] = {"allgather": "all_gather", "alltoall": "p2p"}[o["cp_rotate"]]
    return Run(**(settings | more))


def compiled_of(case: Case, **more: Any) -> CompiledRun:
    return compile(run_of(case, **more), model_of(case))


def rank_of(case: Case, compiled: CompiledRun) -> RankClass:
    """The program of the rank that was recorded; ours are in the same order."""
    return next(of for of in compiled.program.classes if case["rank"] in of.ranks)


# ---- what is compared ----------------------------------------------------------------------------


def recorded_collectives(case: Case) -> dict[tuple[Any, ...], Traffic]:
    found: dict[tuple[Any, ...], Traffic] = {}
    for phase, *group, count, in_bytes, out_bytes in case["collectives"]:
        key = phase.removesuffix("_input").removesuffix("_weight"), *group  # halves of a backward
        before = found.get(key, Traffic(0, 0, 0))
        more = Traffic(count, in_bytes, out_bytes)
        found[key] = Traffic(*map(sum, zip(before, more, strict=True)))
    return found


def collectives(case: Case, compiled: CompiledRun) -> dict[tuple[Any, ...], Traffic]:
    """By phase, kind, mesh dim, group size and dtype, as a case has them."""
    t, program = rank_of(case, compiled).tasks, compiled.program
    mesh = dict(case["mesh"])
    named = axes_of(mesh)
    found: Counter[tuple[Any, ...]] = Counter()
    size: Counter[tuple[Any, ...]] = Counter()
    for i in np.flatnonzero(t.kind != TaskKind.COMPUTE):
        phase = PHASES[t.phase[i]].replace("recompute", "backward")
        if t.kind[i] == TaskKind.COLLECTIVE:
            axes = program.communicators[t.slot[i]].axes
            kind = COLLECTIVES[t.collective[i]]
        else:
            axes, kind = (program.peers[t.slot[i]].axis,), t.ops[t.op[i]]
            phase = "step" if axes == ("pp",) else phase
            if axes == ("cp",):  # torch's ring steps are an all_to_all with one peer
                if kind == "recv":
                    continue
                kind = "all_to_all"
        label = program.mesh.label(axes)
        if t.microbatch[i] < 0 and axes != ("pp",) and "pp" in mesh:
            # Schedules reduce after the last backward, and those of several stages gather before.
            unshards = compiled.run.vpp > 1 and phase == "forward"
            phase = "step" if unshards or phase == "backward" else phase
        phase = "clip" if t.names[t.name[i]] == "grad_norm.all_reduce" else phase
        key = (
            phase,
            kind,
            named.get(label, label),
            program.mesh.size(*axes),
            DTYPES[t.dtypes[t.dtype[i]]],
        )
        found[key] += 1
        size[key] += int(t.comm_bytes[i])
    return {key: Traffic(n, *in_out(key, size[key])) for key, n in found.items()}


def axes_of(mesh: Mapping[str, int]) -> dict[str, str]:
    """Our names of mesh dims -> those of a case; experts that ep does not split are its data's."""
    if "efsdp" in mesh:
        return AXES | {"edp": "efsdp", "dp": "efsdp_ep"}
    data = "dp_cp" if "cp" in mesh else "dp"
    return AXES | ({} if "ep" in mesh else dict.fromkeys(("edp", "dp/edp", "cp+dp"), data))


def in_out(key: tuple[Any, ...], size: int) -> tuple[int, int]:
    kind, ranks = key[1], key[3]
    if kind in ("send", "recv"):
        return (size, 0) if kind == "send" else (0, size)
    return size, {"all_gather": size * ranks, "reduce_scatter": size // ranks}.get(kind, size)


def recorded_flops(case: Case) -> dict[tuple[str, str], int]:
    """By phase and what: matrix products, attention kernels."""
    found: Counter[tuple[str, str]] = Counter()
    for phase, ops in case["flops"].items():
        for op, flops in ops.items():
            what = "attention" if "attention" in op else "matmul"
            found[phase.removesuffix("_input").removesuffix("_weight"), what] += flops
    return dict(found)


def flops(case: Case, compiled: CompiledRun) -> dict[tuple[str, str], int]:
    """The same of ours, attention as torch's formulas count it: masked pairs too.

    A rank's causal attention is one block of its own queries and keys, of which half is masked,
    and with cp others that are whole (`cp_balance`).
    """
    t = rank_of(case, compiled).tasks
    kernel = np.array([s.kernel for s in t.shapes] or [""])[t.shape]
    cp = compiled.run.cp
    all_pairs = (cp + 1) / cp if compiled.run.flash_attention else 1
    found: Counter[tuple[str, str]] = Counter()
    for phase in range(len(PHASES)):
        name = PHASES[phase].replace("recompute", "backward")
        mine = (t.phase == phase) & (t.kind == TaskKind.COMPUTE)
        found[name, "matmul"] += int(t.flops[mine & (kernel == "gemm")].sum())
        attends = np.isin(kernel, ("attention", "attention_bwd")) & mine
        found[name, "attention"] += int(t.flops[attends].sum() * all_pairs)
    return {key: n for key, n in found.items() if n}


def padding(case: Case) -> int:
    """Bytes that FSDP2 stores beside a rank's parameters, so that all ranks store as many."""
    return case["live"]["by"]["param"] - _positions(case) - case["params"]["rank_param_bytes"]


def _positions(case: Case) -> int:
    """Bytes of tables of rotary positions: one for every stage of the rank."""
    m, o, mesh = case["model"], case["options"], dict(case["mesh"])
    return o.get("vpp", 1) * o["seq"] // mesh.get("cp", 1) * m["head_dim"] * 4


def recorded_state(case: Case) -> dict[str, int]:
    """As `state`: PyTorch's bytes, with the padding of parameters and of their gradients."""
    more = padding(case)
    stored = ("rank_param_bytes", "rank_grad_bytes")
    return {name: n + more * (name in stored) for name, n in case["params"].items()}


def state(case: Case, compiled: CompiledRun) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states when the step is over."""
    held = {"rank_param_bytes": "parameters", "rank_grad_bytes": "gradients",
            "rank_opt_state_bytes": "optimizer"}  # fmt: skip
    of = rank_of(case, compiled)
    v, rows = of.values, len(of.tasks)
    there = v.value[v.last >= rows - 1]  # gradients go with the last row
    category, size = v.category[there], v.size[there]
    return {
        name: int(size[category == CATEGORIES.index(what)].sum()) for name, what in held.items()
    }


def live_after_forward(case: Case, compiled: CompiledRun) -> int:
    """Bytes held when the last forward pass is done, but for inputs."""
    of = rank_of(case, compiled)
    last = int(np.flatnonzero(of.tasks.phase == PHASES.index("forward"))[-1])
    v = of.values
    there = v.value[(v.first <= last) & (v.last > last)]
    inputs = [v.names.index(n) for n in ("embedding.tokens", "head.labels") if n in v.names]
    return int(v.size[there[~np.isin(v.name[there], inputs)]].sum())


def peak(case: Case, compiled: CompiledRun) -> int:
    """The most bytes held."""
    return rank_of(case, compiled).memory["peak"]


def recorded_live(case: Case, what: str) -> int:
    """What a case held after forward, or at its peak, that is ours to count.

    Not ours: tables of rotary positions, and copies that FSDP makes of them for each block
    (`cast_forward_inputs`); the loss and its total weight, 8 bytes; after forward, inputs.
    """
    m, o = case["model"], case["options"]
    by, mesh, outside = case["live"]["by"], dict(case["mesh"]), _positions(case)
    if o.get("mp") and "pp" not in mesh:
        outside += m["layers"] * o["seq"] // mesh.get("cp", 1) * m["head_dim"] * 2
    if what == "peak":
        return case["live"]["peak"] - outside
    return case["live"]["after"][what] - by["input"] - outside - 8


def order(case: Case, compiled: CompiledRun) -> str:
    """What a pipeline rank does, action by action."""
    return " ".join(map(str, flat(compiled.order[rank_of(case, compiled).pipeline_rank])))


def differences(theirs: Mapping[Any, Any], ours: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """What differs, by name: (PyTorch, Stagewright)."""
    keys = [*theirs, *(k for k in ours if k not in theirs)]
    return {k: (theirs.get(k), ours.get(k)) for k in keys if theirs.get(k) != ours.get(k)}


# ---- known differences with their figures --------------------------------------------------------

NOT_SUMMED = (
    "the recorded program wraps the model in no data parallelism, so that ranks of cp or ep do not "
    "reduce their gradients"
)
COUNTS = "the recorded program assumes balanced routing and exchanges no token counts"
BUCKETS = (
    "DDP holds its buckets all the time; the recorder sees each at its first write, in backward"
)
RING = "PyTorch's ring saves 24 bytes of random state per call"
LAST = (
    "the last rank of cp, which was recorded, joins no halves of results: without the copies that "
    "ours has, as all other ranks"
)
MOE = "the recorded experts consist of other operators than ours"
MASK = "the recorded attention makes a boolean mask in every layer"


class Difference(NamedTuple):
    """Why a case differs, and the figures by name: (PyTorch, Stagewright)."""

    why: str
    figures: dict[Any, tuple[Any, Any]]


def _live(why: str, theirs: int, ours: int) -> Difference:
    return Difference(why, {"bytes": (theirs, ours)})


DIFFERENT: dict[tuple[str, str], Difference] = {
    ("15_8b_cp8_allgather", "collectives"): Difference(NOT_SUMMED, {
        ("backward", "all_reduce", "cp", 8, "bfloat16"): (None, Traffic(6, 3846250496, 3846250496)),
    }),
    ("24_mixtral_ep8", "collectives"): Difference(f"{NOT_SUMMED}; and {COUNTS}", {
        ("forward", "all_to_all", "ep", 8, "int64"): (None, Traffic(4, 256, 256)),
        ("backward", "all_reduce", "ep", 8, "bfloat16"): (None, Traffic(6, 860168192, 860168192)),
    }),
    ("03_8b_ddp8", "live"): _live(BUCKETS, 31824871580, 39517372572),
    ("15_8b_cp8_allgather", "live"): _live(RING, 22859473148, 22859473052),
    ("16_8b_fsdp8_cp8_alltoall", "live"): _live(RING, 13782662140, 13782662044),
    ("24_mixtral_ep8", "live"): _live(MOE, 13443178764, 13173891244),
    ("25_mixtral_ep8_efsdp8", "live"): _live(MOE, 9789930508, 9789078444),
    ("26_8b_single_mathattn", "live"): _live(MASK, 12530647124, 12522258516),
    ("37_tiny_ddp4_accum", "live"): _live(BUCKETS, 44868692, 52869204),
    ("39_tiny_fsdp4_cp2_ring", "live"): _live(LAST, 7730180, 7861204),
    ("54_tiny_fsdp2_cp2_allgather_repeat", "live"): _live(LAST, 10861444, 10992468),
    ("55_tiny_fsdp2_cp2_ring_repeat", "live"): _live(LAST, 10861444, 10992468),
    ("64_fsdp2_cp4_ring_tied_accum2", "live"): _live(RING, 10502684, 10502612),
    ("70_fsdp3_moe_noreshard", "live"): _live(MOE, 27861548, 27808300),
    ("75_fsdp8_moe_padded_accum3", "live"): _live(MOE, 17878652, 17852028),
    ("03_8b_ddp8", "peak"): _live(BUCKETS, 42665279644, 43720097948),
    ("23_70b_pp4_fsdp8_cp4_tp8_1024", "peak"): _live(LAST, 6828855536, 6973558856),
    ("37_tiny_ddp4_accum", "peak"): _live(BUCKETS, 52745308, 54968404),
}  # fmt: skip
"""(case, what) -> how it differs; "peak" is listed where it is more than `TOLERANCE` off."""

TOLERANCE = 0.02
"""Of peaks: operators that fuse two kernels or one, and temporaries in them, are not all alike."""


# ---- as a table ----------------------------------------------------------------------------------


def table() -> str:
    """A row for every case, as in docs/reference/conformance/pytorch.md."""
    lines = [
        "| case | mesh | collectives | FLOPs | state | live after forward | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    notes: dict[str, int] = {}

    def cell(name: str, what: str, equal: str = "=") -> str:
        found = DIFFERENT.get((name, what))
        if found is None:
            return equal
        mark = notes.setdefault(found.why, len(notes) + 1)
        percent = [100 * (b / a - 1) for key, (a, b) in found.figures.items() if key == "bytes"]
        return f"{percent[0]:+.2f}% ({mark})" if percent else f"({mark})"

    for name in NAMES:
        case = read(name)
        compiled = compiled_of(case)
        off = 100 * (peak(case, compiled) / recorded_live(case, "peak") - 1)
        cells = [
            cell(name, "collectives"), cell(name, "flops"), cell(name, "state"),
            cell(name, "live") if "after" in case["live"] else "",
            cell(name, "peak", f"{off:+.2f}%"),
        ]  # fmt: skip
        mesh = " ".join(f"{axis}{size}" for axis, size in case["mesh"] if size > 1) or "-"
        lines.append(f"| {name} | {mesh} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{n}. {why}." for why, n in notes.items())])
