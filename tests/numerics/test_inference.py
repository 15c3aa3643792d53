"""Inference steps against closed forms: FLOPs, bytes of caches, what fits, who does what."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import EXAMPLES, cases, evaluated, table_of, times
from stagewright.check.program import check_program
from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.lower.compiled_run import Capacity, CompiledRun
from stagewright.model.layers import Reach
from stagewright.model.presets import PRESETS
from stagewright.program.columns import COLLECTIVES, TaskKind
from stagewright.run import lengths
from stagewright.run.lengths import Cache, Group
from stagewright.run.requests import groups
from stagewright.run.settings import Run
from stagewright.time.durations import kernel_seconds
from stagewright.time.hardware import resolve
from stagewright.views.summary import summary

DECODE: dict[str, Any] = {"mode": "decode", "context_length": 4096}


DENSE_V3 = replace(
    PRESETS["deepseek-v3"], quantization=None, num_experts=0, top_k=0, moe_ffn_hidden_size=0,
    shared_ffn_hidden_size=0,
    first_dense_layers=0, router="softmax", num_expert_groups=1, topk_groups=1, expert_bias=False,
)  # fmt: skip


def run(model: str = "llama3.1-70b", **fields: Any) -> CompiledRun:
    return compile(Run(model=model, **fields), DENSE_V3 if model == "deepseek-v3-dense" else None)


def work(compiled: CompiledRun, column: str = "flops") -> Counter[str]:
    """Of all ranks, by op; fused kernels by the first."""
    found: Counter[str] = Counter()
    for c in compiled.program.classes:
        t = c.tasks
        for row in np.flatnonzero(t.kind == TaskKind.COMPUTE):
            op = t.ops[t.op[row]].split("+")[0]
            found[op] += int(getattr(t, column)[row]) * len(c.ranks)
    return found


def cached(model: str = "llama3.1-70b", **fields: Any) -> list[int]:
    """Bytes of the cache on a rank of each class."""
    return [c.memory["kv_cache"] for c in run(model, **fields).program.classes]


def collectives(compiled: CompiledRun) -> Counter[str]:
    """How many there are on the first rank, by kind and bytes."""
    c, *_ = compiled.program.classes
    t = c.tasks
    return Counter(
        f"{COLLECTIVES[t.collective[i]]} {t.comm_bytes[i]}"
        for i in np.flatnonzero(t.kind == TaskKind.COLLECTIVE)
    )


@cases
def test_closed_form(
    what: str, fields: dict[str, Any], equals: dict[str, str | dict[str, str]]
) -> None:
    """FLOPs of an op on all ranks, bytes of caches of rank classes, collectives by their bytes.

    The formulas are in the sizes of the model.
    """
    compiled = run(**fields)
    sizes = {f.name: getattr(compiled.model, f.name) for f in dataclass_fields(compiled.model)}

    def value(formula: str) -> Any:
        return evaluated(formula, **sizes)

    for name, formula in equals.items():
        if isinstance(formula, dict):
            split = [(key.split(" ", 1), value(count)) for key, count in formula.items()]
            wanted = {f"{op} {value(size)}": count for (op, size), count in split}
            assert collectives(compiled) == wanted, what
        elif name == "kv_cache":
            held = sorted({c.memory["kv_cache"] for c in compiled.program.classes})
            assert held == [value(each) for each in str(formula).split(";")], what
        else:
            assert work(compiled)[name] == value(formula), (what, name)


# ---- FLOPs ---------------------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(Group, st.integers(1, 5), st.integers(0, 20), st.integers(1, 6)), min_size=1
    ),
    st.integers(1, 5),
    st.sampled_from([(0, 0), (1, 0), (4, 0), (9, 0), (0, 1), (0, 5), (0, 8)]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 3),
    st.sampled_from([(0, 1), (0, 2), (1, 2), (3, 5)]),
)
@settings(max_examples=times(30))
def test_sums_over_requests(
    groups: list[Group], places: int, reach: tuple[int, int], block: int, logits: int,
    stripes: tuple[int, int],
) -> None:  # fmt: skip
    """Counted one by one: pairs, keys, blocks, of requests dealt in turn and of one stripe."""
    stripe, many = stripes
    reach = reach if many == 1 else (0, 0)
    window, chunk = reach
    want = np.zeros((places, len(lengths.COLUMNS)), np.int64)
    turn = 0
    for g in groups:
        for _ in range(g.count):
            context, new = g.context_length or 0, g.new_tokens or 0
            seen = [
                [
                    k
                    for k in range(p // chunk * chunk if chunk else 0, p + 1)
                    if not window or k > p - window
                ]
                for p in range(context, context + new)
            ]
            keys = {k for some in seen for k in some}
            blocks = (context + new - 1) // (block * many) - min(keys) // (block * many) + 1
            here = [k for some in seen for k in some if k % many == stripe]
            stored = [p for p in range(context, context + new) if p % many == stripe]
            want[turn % places] += [
                1, new, len(here), len({*here}), blocks * block, blocks,
                new if new <= logits else 1, len(stored), math.ceil((len(keys) - new) / many),
            ]  # fmt: skip
            turn += 1
    cache = Cache(block, stripes=many)
    each = lengths.attention_sums(groups, cache, Reach(*reach), logits, stripe=stripe)
    found = lengths.deal(groups, each, places)
    assert found.tolist() == want.tolist()


# ---- the cache -----------------------------------------------------------------------------------


@cases
def test_bytes_of_a_token(model: str, formula: str) -> None:
    per_token = evaluated(formula)
    fields: dict[str, Any] = {"mode": "decode", "batch_size": 4, "context_length": 999}
    assert cached(model, kv_block_size=1, **fields) == [4 * 1000 * per_token]
    assert cached(model, kv_cache_dtype="fp8", kv_block_size=1, **fields) == [2000 * per_token]
    assert cached(model, **fields) == [4 * 1008 * per_token]  # 63 blocks of 16
    assert cached(model, kv_cache="contiguous", **fields) == [4 * 1000 * per_token]
    assert cached(model, kv_cache="contiguous", max_model_len=1500, **fields) == [
        4 * 1500 * per_token
    ]
    assert cached(model, max_model_len=1500, **fields) == [4 * 1008 * per_token]


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_no_default_is_longer_than_a_request_may_be(cache: str) -> None:
    """Lengths that nobody gave end at max_model_len, of which given ones leave a part."""
    steps: tuple[dict[str, Any], ...] = (
        {"mode": "decode"},
        {"mode": "decode", "num_speculative_tokens": 3},
        {"mode": "prefill"},
        {"mode": "prefill", "context_length": 100},
    )
    for step in steps:
        found = run("gpt2", kv_cache=cache, max_model_len=512, **step)
        (request,) = groups(found.run)
        assert (request.context_length or 0) + (request.new_tokens or 0) == 512


@pytest.mark.parametrize(
    ("model", "tp", "kept", "per_token"),
    [
        # The cases of vLLM's docs/serving/context_parallel_deployment.md: copies of each head.
        ("deepseek-r1", 8, 1, 61 * 576 * 2),
        ("kimi-k2", 16, 1, 61 * 576 * 2),
        ("qwen3-235b-a22b", 8, 4, 94 * 2 * 128 * 2),
    ],
)
def test_ranks_share_the_tokens_of_a_cache(model: str, tp: int, kept: int, per_token: int) -> None:
    """A block of `dcp` ranks has the next 16 x dcp tokens: as many blocks on each of them."""
    fields: dict[str, Any] = {"mode": "decode", "tp": tp, "context_length": 9999, "batch_size": 2}
    copies = tp // kept
    for dcp in (n for n in (1, 2, 4, 8, 16) if n <= copies):
        slots = math.ceil(10_000 / 16 / dcp) * 16
        assert {*cached(model, dcp=dcp, **fields)} == {2 * slots * per_token}
    with pytest.raises(UserError, match=f"copies of .* of {model}; use 1"):
        run(model, dcp=2 * copies, **fields)


@pytest.mark.parametrize(
    "shared", [{"dcp": 8}, {"cp": 4}, {"cp": 2, "dcp": 8}, {"dcp": 4, "dp": 2}]
)
def test_stripes_do_all_the_work(shared: dict[str, int]) -> None:
    """Of all ranks that share a cache, each does its own part, whatever the lengths."""
    rows = tuple(Group(n, 100 * n + n, 1 + n % 3) for n in range(1, 7))
    fields: dict[str, Any] = {"tp": 8, "layers": 3, "mode": "decode", "requests": rows}
    whole = work(run("deepseek-v3-dense", **fields))["cached_attention"]
    found = work(run("deepseek-v3-dense", **fields, **shared))["striped_attention"]
    assert found == whole


def test_a_rank_reads_its_stripe() -> None:
    """Tokens 0 to 1000 of a request over 8 ranks: rank 0 has 126 of them, and not the last one."""
    program = run("deepseek-v3-dense", layers=1, tp=8, dcp=8, mode="decode",
                  context_length=1001).program  # fmt: skip
    keys: dict[int, int] = {}
    written: dict[int, int] = {}
    for c in program.classes:
        t = c.tasks
        of = {op: [i for i in range(len(t)) if t.ops[t.op[i]].endswith(op)]
              for op in ("striped_attention", "cache")}  # fmt: skip
        queries = 128 * (576 + 512) * 2 + 128 * 4  # all heads', their results and sums
        blocks, slots = 8 * 4, 8
        for r in c.ranks.tolist():
            (core,), (kept,) = of["striped_attention"], of["cache"]
            keys[r] = int(t.traffic[core]) - queries - blocks - slots
            written[r] = int(t.traffic[kept])
    assert keys == {r: (126 if r < 2 else 125) * 576 * 2 for r in range(8)}
    assert {r for r, n in written.items() if n == max(written.values())} == {1001 % 8}


# ---- mixtures of experts -------------------------------------------------------------------------

V3: dict[str, Any] = {
    "model": "deepseek-v3", "dp": 32, "ep": 32, "weight_precision": "bf16",
}  # fmt: skip


@pytest.mark.parametrize(("requests", "redundant"), [(32, 0), (64, 32), (4096, 0)])
def test_weights_of_experts_that_get_tokens_are_read(requests: int, redundant: int) -> None:
    """Of E experts, T tokens with k each go to E (1 - (1 - k/E)^T) on average, if evenly spread."""
    even = {"num_redundant_experts": redundant} if redundant else {"expert_load": "1"}
    compiled = run(**V3, batch_size=requests, **even, **DECODE)
    (c,) = compiled.program.classes
    t = c.tasks
    held = 256 + redundant
    rows = requests * 8 / 32  # of a rank
    touched = held * (1 - (1 - 8 / held) ** requests) / 32
    for op, wide in (("up", 2048), ("mlp_out", 7168)):
        (name,) = [i for i, n in enumerate(t.names) if n == f"layer9.{op}"]
        row, _shared = np.flatnonzero(t.name == name)
        assert t.flops[row] == rows * 2 * 7168 * 2048
        weights = touched * 7168 * 2048 * 2
        assert t.traffic[row] == pytest.approx(weights + rows * (7168 + 2048) * 2, abs=2)
        # The product is timed of as many experts as some token goes to.
        assert t.shapes[t.shape[row]].extents[0] == ("batch", math.ceil(touched)), wide


def test_redundant_experts_take_memory() -> None:
    plain, more = (
        run(**V3, num_redundant_experts=n, **DECODE).program.classes[0].memory["parameters"]
        for n in (0, 32)
    )
    assert more - plain == 58 * 3 * 7168 * 2048 * 2


R1 = sorted((EXAMPLES / "deepseek-r1").glob("*.yaml"))


@pytest.mark.parametrize("path", R1, ids=lambda p: p.stem)
def test_the_paper_s_deepseek_r1_cases(path: Path) -> None:
    """Tokens per second and GPU, times the step, both of the paper: the tokens of a GPU's batch."""
    compiled = compile(Run.load(path))
    assert check_program(compiled.program)["run"] == "rank by rank"
    gpus = path.stem.split("-")[1]
    rate, milliseconds = {
        "decode-36": (62.5, 227.483), "decode-72": (75.9, 187.483), "decode-144": (86.9, 163.681),
        "prefill-36": (7097, 2051.994), "prefill-72": (5081, 2866.145),
        "prefill-144": (3911, 3723.360),
    }[path.stem]  # fmt: skip
    tokens = summary(compiled)["batch"]["tokens"]
    assert tokens / int(gpus) == pytest.approx(rate * milliseconds / 1000, rel=1e-3)
    # Two all-to-alls in each of 58 layers; rows of 8 of 288 experts.
    program = compiled.program
    assert {len(c.ranks) for c in program.classes} == {int(gpus) * 7 // 9, int(gpus) * 2 // 9}
    for c in program.classes:
        sizes = c.tasks.comm_bytes[c.tasks.kind == TaskKind.COLLECTIVE]
        assert sizes.tolist() == [math.ceil(tokens * 8 / int(gpus) * 7168) * 2] * 58 * 2
    assert compiled.capacity is not None
    assert compiled.capacity.fits


# ---- the precision of weights --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "bits"),
    # Values, and the scale of a group: fp32 of 128 x 128, fp16 of 128, fp8 of 16, 8 bit of 32.
    [("fp8", 8 + 32 / 128**2), ("int4", 4 + 16 / 128), ("fp4", 4 + 8 / 16), ("mxfp4", 4 + 8 / 32)],
)
def test_weights_in_few_bits(precision: str, bits: float) -> None:
    """Matrices of layers; norms, the embedding and the output projection stay as they are."""
    plain = run(tp=8, batch_size=16, **DECODE)
    few = run(tp=8, batch_size=16, weight_precision=precision, **DECODE)
    matrices = (70_553_706_496 - 2 * 128256 * 8192 - (2 * 80 + 1) * 8192) // 8
    saved = matrices * (16 - bits) / 8
    (a,), (b,) = plain.program.classes, few.program.classes
    assert a.memory["parameters"] - b.memory["parameters"] == pytest.approx(saved, abs=1000)
    assert work(plain)["einsum"] == work(few)["einsum"]
    # They are read in as many bits.
    read = [int(c.tasks.traffic[c.tasks.op == c.tasks.ops.index("einsum")].sum()) for c in (a, b)]
    low = precision == "fp8"  # products of fp8: operands are cast before, in kernels of others
    inputs = 80 * 16 * (3 * 8192 + 8192 // 8 + 2 * 8192 + 28672 // 8) if low else 0
    assert read[0] - read[1] == pytest.approx(saved + inputs, rel=1e-5)
    kinds = Counter(
        b.tasks.dtypes[i] for i in b.tasks.dtype[b.tasks.op == b.tasks.ops.index("einsum")]
    )
    assert kinds == ({"fp8": 80 * 7, "bf16": 1} if low else {"bf16": 80 * 7 + 1})


def test_deepseek_v3_in_fp8() -> None:
    """All matrices but the embedding, the output projection and routers, as its checkpoint has."""
    stored = run("deepseek-v3", mode="prefill", prompt_length=8)
    held = stored.program.classes[0].memory["parameters"]
    norms_and_routers = 61 * (2 * 7168 + 1536 + 512) + 7168 + 58 * 7168 * 256
    plain = 2 * 129280 * 7168 + norms_and_routers
    assert held == pytest.approx((671_026_404_352 - plain) * (1 + 4 / 128**2) + 2 * plain, abs=1e5)


def test_attention_reads_the_keys_it_sees() -> None:
    """Not the empty ends of blocks: each request's keys and values once, and new queries."""
    fields: dict[str, Any] = {"mode": "decode", "batch_size": 2, "context_length": 1000}
    found = run(layers=1, **fields)
    (c,) = found.program.classes
    rows = [i for i in range(len(c.tasks)) if c.tasks.ops[c.tasks.op[i]] == "cached_attention"]
    keys = 2 * 1001 * 2 * 8 * 128 * 2
    queries = 2 * 2 * 64 * 128 * 2  # read, and results written
    blocks = 2 * 63 * 4
    assert c.tasks.traffic[rows].tolist() == [keys + queries + blocks + 2 * 8]
    written = [i for i in range(len(c.tasks)) if c.tasks.ops[c.tasks.op[i]] == "cache"]
    assert c.tasks.traffic[written].tolist() == [2 * 2 * 8 * 128 * 2 + 2 * 8]  # values, and slots
    assert Counter(c.tasks.ops[i] for i in c.tasks.op)["rope+cache"] == 1  # keys


# ---- communication -------------------------------------------------------------------------------


def test_a_pipeline_passes_on_microbatches() -> None:
    program = run(pp=4, batch_size=10, **DECODE).program  # 3, 3, 2 and 2 requests
    for c, (receives, sends) in zip(program.classes, ((0, 1), (1, 1), (1, 1), (1, 0)), strict=True):
        t = c.tasks
        for kind, there in ((TaskKind.RECV, receives), (TaskKind.SEND, sends)):
            sizes = t.comm_bytes[t.kind == kind].tolist()
            assert sizes == [n * 8192 * 2 for n in (3, 3, 2, 2)] * there
    assert program.peers == ((("pp", 1)), (("pp", -1)))


# ---- what fits -----------------------------------------------------------------------------------


def capacity(**fields: Any) -> Capacity:
    found = run(**fields).capacity
    assert found is not None
    return found


def peak(**fields: Any) -> int:
    return max(c.memory["peak"] for c in run(**fields).program.classes)


@cases
def test_one_more_does_not_fit(fields: dict[str, Any]) -> None:
    found = capacity(device_memory="80e9", **fields)
    dp = fields.get("dp", 1)
    assert found.device_memory == 80 * 10**9
    assert found.fits
    assert found.requests % dp == 0
    for requests, fits in ((found.requests, True), (found.requests + dp, False)):
        assert (peak(**{**fields, "batch_size": requests}) <= 80e9) == fits
    name = "context_length" if fields["mode"] == "decode" else "prompt_length"
    new = 1 + fields.get("num_speculative_tokens", 0) if name == "context_length" else 0
    assert found.tokens is not None
    for tokens, fits in ((found.tokens, True), (found.tokens + 1, False)):
        assert (peak(**{**fields, name: tokens - new}) <= 80e9) == fits


def test_requests_that_fit_by_hand() -> None:
    """80 GB less weights, by 4112 tokens of 40,960 bytes each, and what a token is made of."""
    found = capacity(tp=8, device_memory="80e9", **DECODE)
    (c,) = run(tp=8, **DECODE).program.classes
    logits = 128256 * 2 * 9 // 8  # of a rank, and of all
    assert c.memory["activations"] == logits
    each = 4112 * 40_960 + logits
    assert found.requests == (80 * 10**9 - c.memory["parameters"]) // each


def test_nothing_fits() -> None:
    found = capacity(device_memory="80e9", **DECODE)
    assert found == Capacity(80_000_000_000, False, 0, 0)


def test_of_requests_that_differ_none_is_the_longest() -> None:
    rows = (Group(3, 1000), Group(1, 9000))
    found = capacity(tp=8, device_memory="80e9", mode="decode", requests=rows)
    assert found.tokens is None
    assert found.requests > 100


# ---- requests ------------------------------------------------------------------------------------


def test_a_file_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("count,context_length\n3,100\n2,200\n\n1,300\n")
    asked = run(mode="decode", requests=str(path), layers=2)
    assert asked.run.requests == (Group(3, 100), Group(2, 200), Group(1, 300))
    pairs = 3 * 101 + 2 * 201 + 301
    assert work(asked)["cached_attention"] == 2 * 4 * 8192 * pairs
    # As many as are asked for, in the file's proportions.
    more = run(mode="decode", requests=str(path), layers=2, batch_size=12)
    assert work(more)["cached_attention"] == 2 * 2 * 4 * 8192 * pairs


def test_rows_say_all_of_a_mixed_step() -> None:
    rows = [
        {"count": 2, "context_length": 512, "new_tokens": 256},
        {"count": 30, "context_length": 2048},
    ]
    asked = run(mode="decode", requests=rows, layers=2)
    pairs = 2 * (256 * 512 + 256 * 257 // 2) + 30 * 2049
    assert work(asked)["cached_attention"] == 2 * 4 * 8192 * pairs
    told = summary(asked)
    assert told["batch"] == {
        "requests": 32, "tokens": 542, "cached_tokens": 2 * 512 + 30 * 2048,
    }  # fmt: skip
    (gather,) = [c for c in summary(run(mode="decode", requests=rows, layers=2, tp=2))
                 ["rank_classes"][0]["collectives"] if c["kind"] == "all_gather"]  # fmt: skip
    assert gather["bytes"] == 32 * 128256 // 2 * 2  # a row for each request


def test_apportioned_exactly() -> None:
    groups = [Group(1, 1), Group(1, 2), Group(1, 3)]
    assert [g.count for g in lengths.apportion(groups, 7)] == [3, 2, 2]
    assert lengths.apportion(groups, 2) == (Group(1, 1), Group(1, 2))


@cases
def test_hostile_files(text: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(text)
    with pytest.raises(UserError) as info:
        run(mode="decode", requests=str(path))
    assert str(info.value).startswith(f"{path}")
    assert wanted in str(info.value)


@pytest.mark.parametrize("raw", [b"\xff\xfe\x00", b"count\n\x00\n", None])
def test_what_is_no_file(raw: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(UserError, match=r"requests\.csv"):
        run(mode="decode", requests=str(path))


@cases
def test_hostile_rows(rows: list[Any], wanted: str) -> None:
    with pytest.raises(UserError) as info:
        run(mode="decode", requests=rows)
    assert str(info.value) == wanted


# ---- refused -------------------------------------------------------------------------------------


# ---- time ----------------------------------------------------------------------------------------


def attention_time(op: str, **fields: Any) -> float:
    """Seconds of the first layer's attention on an H100."""
    c = run("llama3.1-8b", layers=1, **fields).program.classes[0]
    t = c.tasks
    row = next(i for i in range(len(t)) if t.ops[t.op[i]] == op)
    return float(kernel_seconds(t, np.array([row]), resolve("h100-sxm"))[0])


def test_attention_over_a_cache_takes_as_long_as_its_products_or_its_bytes() -> None:
    """A prompt's as in training, whose diagonal counts half; one token's as its keys are read."""
    served = attention_time("cached_attention", mode="prefill", prompt_length=8192)
    assert served == pytest.approx(attention_time("attention", seq_length=8192), rel=0.1)
    fields: dict[str, Any] = {"mode": "decode", "context_length": 8191}
    one, two = (attention_time("cached_attention", batch_size=n, **fields) for n in (64, 128))
    read = 64 * 8192 * 2 * 8 * 128 * 2 / 3.35e12
    assert 1 < (two - one) / read < 1.5
    shared = attention_time("striped_attention", batch_size=64, cp=4, **fields)
    assert shared == pytest.approx(one / 4, rel=0.05)


# ---- whole programs ------------------------------------------------------------------------------

PROGRAMS: dict[str, dict[str, Any]] = table_of("test_inference", "programs")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_rank_can_run(name: str) -> None:
    compiled = run(**{"model": "llama3.1-8b", "layers": 6, **PROGRAMS[name]})
    assert check_program(compiled.program)["run"] == "rank by rank"
    total = Counter[str]()
    for c in compiled.program.classes:
        assert set(c.tasks.phase.tolist()) == {0}
        assert c.memory["peak"] == sum(n for k, n in c.memory.items() if k != "peak")
        total["flops"] += int(c.tasks.flops.sum()) * len(c.ranks)
    ranks = np.concatenate([c.ranks for c in compiled.program.classes])
    assert sorted(ranks.tolist()) == list(range(compiled.run.world_size))
    # What requests need in all does not depend on who serves them.
    alone = {k: v for k, v in PROGRAMS[name].items() if k not in ("tp", "pp", "sequence_parallel")}
    if "dp" not in alone:
        alone.setdefault("batch_size", compiled.run.batch_size)
        one = work(run("llama3.1-8b", layers=6, **alone))
        assert work(compiled)["einsum"] == one["einsum"]
        assert work(compiled)["cached_attention"] == one["cached_attention"]


# ---- an encoder and a decoder --------------------------------------------------------------------

T5 = PRESETS["t5-3b"]
HEADS = T5.num_attention_heads * T5.kv_channels
MATRIX, MLP = T5.hidden_size * HEADS, 2 * T5.hidden_size * T5.ffn_hidden_size


def test_all_weights_are_held() -> None:
    """The encoder's too while tokens are decoded; the table that both look up is one."""
    compiled = run("t5-3b", mode="decode")
    held = {run("t5-3b", mode=mode).program.classes[0].memory["parameters"]
            for mode in ("prefill", "decode")}  # fmt: skip
    assert held == {2 * compiled.parameters}


# ---- layers that carry a state -------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mamba-2.8b", "mamba-codestral-7b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_states_of_a_request(model: str, tp: int) -> None:
    """vLLM's `MambaStateShapeCalculator`: the last inputs of the convolutions and the states, in
    the precision of the model. They do not grow with the context."""
    c = PRESETS[model]
    s = c.state_space
    assert s is not None
    held = [
        run(model, mode="decode", tp=tp, batch_size=6, context_length=n, layers=4)
        .program.classes[0]
        .memory["kv_cache"]
        for n in (0, 1000)
    ]
    convolved = s.inner + (0 if model == "mamba-2.8b" else 2 * s.groups * s.state)
    layers = 3 if model.startswith("qwen") else 4
    states = layers * 6 * 2 * (convolved * (s.conv - 1) + s.inner * s.state) // tp
    attention = 2 * c.num_query_groups * c.kv_channels * 2 // tp if layers == 3 else 0
    slots = [6 * 16, 6 * 1008]  # blocks of 16
    assert held == [states + n * attention for n in slots]


def test_a_state_is_decoded_in_its_memory() -> None:
    """A token reads and writes its request's state, and does five operations on each number."""
    s = PRESETS["mamba-codestral-7b"].state_space
    assert s is not None
    one, two = (run("mamba-codestral-7b", mode="decode", batch_size=n, layers=1) for n in (8, 16))
    flops, traffic = (work(two, x)["linear_attention_served"] - work(one, x)[
        "linear_attention_served"] for x in ("flops", "traffic"))  # fmt: skip
    state = s.inner * s.state
    assert flops == 8 * 5 * state
    # And reads x, B, C, dt and the decay, and writes y.
    own = 2 * (2 * s.inner + 2 * s.groups * s.state) + 4 * 2 * s.heads
    assert traffic == 8 * (2 * 2 * state + own + 8)  # whose the token is: 8 bytes


def test_chunks_of_a_prompt_cost_what_they_do_in_training() -> None:
    c = "mamba-codestral-7b"
    served = work(run(c, mode="prefill", prompt_length=2048, layers=1))["linear_attention_served"]
    trained = work(run(c, seq_length=2048, layers=1))["linear_attention"]
    assert served == trained
