"""Kernels that only inference runs: attention over a cache, products of few rows, all_reduce."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.evidence.kernels import ExpertMLP, experts_seconds
from stagewright.lower.compile import compile
from stagewright.lower.weight_storage import in_blocks
from stagewright.model.presets import PRESETS
from stagewright.run.settings import Run
from stagewright.time.collectives import collective_seconds
from stagewright.time.durations import task_seconds
from stagewright.time.engines import without_fused_launches
from stagewright.time.hardware import BLOCKS, InferenceGemmFit, resolve
from stagewright.time.network import Machine, placements
from stagewright.time.roofline import (
    DecodeInPromptKernel,
    Kernels,
    bytes_per_second,
    cached_attention_seconds,
    kernels_seconds,
    masked_points,
)
from timed import algorithm_of

H100 = resolve("h100-sxm")


def decode_seconds(requests: int, context: int) -> float:
    """Seconds of decode attention, 32 heads of 128 with 8 key-value heads, in bf16."""
    keys = float(requests * 8 * context)
    sizes = (requests * 32.0, 4.0, keys * 4, keys, 4 * 128.0, keys * 4 * 128)
    work = [np.array([x]) for x in sizes]
    return float(cached_attention_seconds(*work, dtype="bf16", hardware=H100)[0])


def test_a_long_context_takes_the_time_of_its_bytes() -> None:
    """64 requests of 8192 tokens: 715 us TensorRT-LLM, 688 us vLLM and 694 us SGLang measured
    (NVIDIA aiconfigurator, generation_attention_perf of h100_sxm)."""
    found = decode_seconds(64, 8192)
    read = 64 * 8192 * 2 * 8 * 128 * 2 / bytes_per_second(H100)
    assert 0.9 * read < found
    assert found == pytest.approx(700e-6, rel=0.1)


def test_a_short_context_takes_a_launch() -> None:
    """One request of 128 tokens: 11.1, 11.7 and 9.3 us."""
    assert decode_seconds(1, 128) == pytest.approx(11e-6, rel=0.15)


def test_a_step_takes_these_kernels() -> None:
    """What a program says of its attention is what the constants were fitted to."""
    run = Run(model="llama3.1-8b", layers=1, mode="decode", batch_size=64, context_length=8191)
    program = compile(run).program
    t = program.classes[0].tasks
    row = next(i for i in range(len(t)) if t.shapes[t.shape[i]].kernel == "cached_attention")
    found = task_seconds(program, Machine.of(H100, gpus=1).for_inference())[0][row]
    assert decode_seconds(64, 8192) <= found < 1.35 * decode_seconds(64, 8192)  # clocks of a step


def test_chosen_keys_take_the_time_of_those_that_are_read() -> None:
    """An indexer chooses 2,048 keys, however many a cache has; DeepSeek-V4's rows add up."""
    found: list[float] = []
    for context in (16_384, 131_072):
        run = Run(
            model="deepseek-v3.2", layers=4, mode="decode", batch_size=8, context_length=context
        )
        program = compile(run).program
        t = program.classes[0].tasks
        row = next(i for i in range(len(t)) if t.shapes[t.shape[i]].kernel == "cached_attention")
        found.append(task_seconds(program, Machine.of(H100, gpus=1).for_inference())[0][row])
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_a_chunk_takes_as_long_as_flash_attention() -> None:
    """8192 tokens, 32 heads, 8 key-value heads: 986 us measured (vLLM on H200, whose compute units
    are those of H100; context_attention_perf)."""
    q, h, kv, d = 8192.0, 32, 8, 128
    sizes = (q * h, h / kv, q * q / 2 * h, q * kv, 4.0 * d, 4 * q * kv * d)
    work = [np.array([x]) for x in sizes]
    found = float(cached_attention_seconds(*work, dtype="bf16", hardware=H100)[0])
    assert found == pytest.approx(986e-6, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "engine", "milliseconds"),
    [("b200", "trtllm", 0.218), ("b200", "vllm", 0.146), ("h200", "sglang", 0.196)],
)
def test_windows_compute_whole_tiles(gpu: str, engine: str, milliseconds: float) -> None:
    """Two prompts of 4,096 tokens with windows of 128 keys, 64 heads of 64 with 8 key-value heads.

    The measured times are those of context_attention_perf (aiconfigurator@095f58a5).
    """
    on = resolve(gpu).for_inference(engine=engine)
    b, q, h, kv, d, window = 2.0, 4096.0, 64, 8, 64, 128.0
    pairs = q * window - window * (window - 1) / 2
    moved = 2 * b * (q * kv * 2 * d + 2 * q * h * d)
    sizes = (b * q * h, h / kv, b * h * pairs, b * q * kv, 4.0 * d, moved)
    work = [np.array([x]) for x in sizes]
    found, unmasked = (
        float(cached_attention_seconds(*work, dtype="bf16", hardware=on, window=w)[0])
        for w in (window, 0.0)
    )
    assert found == pytest.approx(milliseconds * 1e-3, rel=0.25)
    assert found > unmasked


def test_masked_points_of_tiles() -> None:
    """Half a tile on the diagonal, and half at the lower edge of a window that queries reach."""
    queries = np.full(4, 1024.0)
    window = np.array([0.0, 128, 2048, 1024])
    points = np.array([1024 * 512.0, 1024 * 128 - 64 * 127, 1024 * 512, 1024 * 768])
    found = masked_points(queries, points, window) / queries
    assert found == pytest.approx([64, 64 * (1 + 1 - 127 / 1024), 64, 64 * 1.5], rel=1e-3)


@pytest.mark.parametrize(("gpus", "microseconds"), [(2, 2.8), (4, 3.3), (8, 4.0)])
def test_small_all_reduces_of_engines(gpus: int, microseconds: float) -> None:
    """32 KiB: 2.8 to 4.4 us, 3.1 to 4.9 us and 3.8 to 5.6 us in TensorRT-LLM, SGLang and vLLM;
    training's library takes two to four times as long."""
    machine = Machine.of(H100, gpus=8)
    (group,) = placements(machine, np.arange(gpus).reshape(1, -1))
    library = collective_seconds("all_reduce", 2**15, group, machine)
    served = machine.for_inference()
    found = collective_seconds("all_reduce", 2**15, group, served)
    assert algorithm_of("all_reduce", 2**15, group, served) == "one_kernel"
    assert found == pytest.approx(microseconds * 1e-6, rel=0.25)
    assert library > 2 * found


def test_large_all_reduces_are_those_of_the_library() -> None:
    machine = Machine.of(H100, gpus=8)
    (group,) = placements(machine, np.arange(8).reshape(1, -1))
    ours = collective_seconds("all_reduce", 2**28, group, machine.for_inference())
    assert ours == collective_seconds("all_reduce", 2**28, group, machine)


def test_several_nodes_have_no_direct_all_reduce() -> None:
    machine = Machine.of(H100, gpus=16).for_inference()
    (group,) = placements(machine, np.arange(16).reshape(1, -1))
    assert algorithm_of("all_reduce", 2**14, group, machine) != "one_kernel"


def test_training_and_unmeasured_hardware_keep_their_constants() -> None:
    assert Machine.of(H100, gpus=8).direct_all_reduce is None
    tpu = Machine.of(resolve("tpu-v5p"), gpus=8)
    assert tpu.for_inference() is tpu
    served = H100.for_inference()
    assert served.gemm["bf16"] == H100.gemm["bf16"]
    assert served.gemm["fp8"].fraction == H100.gemm["fp8"].fraction
    assert served.gemm["fp8"].launch_us < H100.gemm["fp8"].launch_us


def test_products_in_fp8_with_scales_of_blocks_have_constants_of_their_own() -> None:
    """Where the hardware has them; what is stored with one scale keeps those of fp8."""
    deepseek = Run(model="deepseek-v3", mode="decode", batch_size=8)
    assert in_blocks(deepseek, PRESETS["deepseek-v3"])
    assert in_blocks(Run(model="llama3-8b", weight_precision="fp8"), PRESETS["llama3-8b"])
    assert not in_blocks(Run(model="llama3-8b", weight_precision="nvfp4"), PRESETS["llama3-8b"])
    assert not in_blocks(Run(model="llama3-8b", mode="decode"), PRESETS["llama3-8b"])
    slow = InferenceGemmFit(tile_us=1, launch_us=20, memory_fraction=0.5, sharpness=2, fraction=0.3)
    of = H100.inference
    assert of is not None
    fits = of.model_copy(update={"gemm": {**of.gemm, BLOCKS: slow}})
    on = H100.model_copy(update={"inference": fits})
    assert on.for_inference().gemm == H100.for_inference().gemm
    served = on.for_inference(blocks=True).gemm["fp8"]
    assert (served.launch_us, served.fraction) == (20, 0.3)


def test_latents_and_queries_come_down_in_one_product() -> None:
    """Engines hold the three matrices side by side; training keeps them apart."""
    run = Run(model="deepseek-v3", layers=1, mode="decode", batch_size=8)
    down = [s for s in compile(run).program.classes[0].tasks.shapes if s.joint[:1] == ("kv_down",)]
    assert sorted(dict(shape.extents)["n"] for shape in down) == [64, 512, 1536]


def test_attention_to_latents_has_constants_of_its_own() -> None:
    """64 requests of 4,096 tokens on B200, 16 heads: 39 us by TensorRT-LLM, 41 by SGLang."""
    on = resolve("b200").for_inference(cache="fp8")
    sizes = {"q": 64, "a": 16, "v": 512, "d": 576, "k": 64 * 4096}

    def seconds(**more: int) -> float:
        extents = {name: np.array([float(size)]) for name, size in {**sizes, **more}.items()}
        pairs, rows = 64 * 16 * 4096, 64 * 4096
        work = np.array([2.0 * pairs * 1088]), np.array([576.0 * rows + 2 * 64 * 16 * 1088])
        kernels = Kernels(extents, *work, "bf16", np.array([False]))
        return float(kernels_seconds("cached_attention", kernels, on)[0])

    assert 0.9 * 39e-6 < seconds(latent=1) < 1.1 * 41e-6
    assert seconds(latent=1) > seconds()


def test_chosen_latents_of_prompts_take_a_tile_per_token() -> None:
    """8,192 tokens on B200, of 64 heads: 4,030 us by FlashMLA, behind few tokens or many."""
    on = resolve("b200").for_inference()

    def seconds(tokens: int, slots: int, pairs: float) -> float:
        sizes = {"q": tokens, "a": 64, "v": 512, "d": 576, "k": slots, "t": 2048, "latent": 1}
        extents = {name: np.array([float(size)]) for name, size in sizes.items()}
        work = np.array([2176.0 * 64 * pairs]), np.array([1152.0 * min(slots, 2048 * tokens)])
        kernels = Kernels(extents, *work, "bf16", np.array([False]))
        return float(kernels_seconds("cached_attention", kernels, on)[0])

    prompt = seconds(8192, 8192, 2048 * (8192 - 1024))
    assert prompt == pytest.approx(4030e-6, rel=0.02)
    assert seconds(8192, 65536, 2048.0 * 8192) == pytest.approx(prompt)
    # As long as all keys may be chosen, and in decode, which splits the keys of a request.
    assert seconds(2048, 2048, 2048 * 1024) < prompt / 20
    assert seconds(64, 64 * 8192, 2048.0 * 64) < prompt / 40


def test_an_engine_has_constants_of_its_own() -> None:
    """TensorRT-LLM's attention over an fp8 cache: 64 requests of 8,192 tokens, 32 heads of 128 with
    8 key-value heads on H200; and its products in fp8, whose operands the kernel before casts."""
    h200 = resolve("h200")
    own = h200.for_inference(engine="trtllm", cache="fp8")
    assert own.inference is not None
    assert h200.inference is not None
    fits = h200.inference.engines["trtllm"]
    assert own.inference.cached_attention == fits.cached_attention["fp8"]
    assert own.gemm["fp8"].launch_us < h200.for_inference().gemm["fp8"].launch_us
    a100 = resolve("a100-sxm-80gb")
    assert a100.for_inference(engine="sglang") == a100.for_inference()
    assert h200.for_inference(engine="trtllm").gemm["bf16"] == h200.gemm["bf16"]


def launches(engine: str | None, model: str = "llama3.1-8b") -> tuple[float, float]:
    """How many launches fewer a layer of decode has than its program, and one behind the last."""
    found: list[float] = []
    for layers in (2, 3):
        run = Run(model=model, layers=layers, mode="decode", tp=2, weight_precision="fp8")
        program, machine = compile(run).program, Machine.of(H100, gpus=2).for_inference()
        tasks = program.classes[0].tasks
        alone = task_seconds(program, machine)[0]
        joined = without_fused_launches(tasks, alone, engine, machine.hardware)
        found.append(float((alone - joined).sum()) / (H100.kernel_launch_us * 1e-6))
    return found[1] - found[0], 3 * found[0] - 2 * found[1]


@pytest.mark.numerics
def test_engines_join_kernels() -> None:
    """Of a layer: writing keys and values, a cast behind attention, the sum that ends it. In
    TensorRT-LLM also the rotation of queries and both norms, behind all_reduces; the first norm of
    a layer has none before it, and is a norm and a cast. Dense Qwen3's norms stay apart."""
    assert launches(None)[0] == pytest.approx(4)
    assert launches("vllm") == pytest.approx(launches(None))
    assert launches("trtllm")[0] == pytest.approx(7)
    assert launches("trtllm", "qwen3-8b")[0] == pytest.approx(2)


def test_unmeasured_hardware_launches_every_kernel() -> None:
    program = compile(Run(model="llama3-8b", layers=1, mode="decode")).program
    seconds = np.ones(len(program.classes[0].tasks))
    on = resolve("mi250x")
    assert without_fused_launches(program.classes[0].tasks, seconds, None, on) is seconds


def beside_prompts(heads: int, sharing: int) -> DecodeInPromptKernel | None:
    """How vLLM's kernel on an RTX PRO 6000 has requests of 128 values beside prompts."""
    on = resolve("rtx-pro-6000").for_inference(engine="vllm")
    return DecodeInPromptKernel.of(on, heads, sharing, 256)


@pytest.mark.parametrize(
    ("sharing", "requests", "context", "chunk", "us"),
    [(4, 64, 1024, 256, 325 - 11), (4, 128, 1024, 1024, 825 - 61), (8, 128, 1024, 256, 672 - 11),
     (4, 8, 1024, 16, 55 - 8), (4, 128, 128, 2048, 555 - 173)],
)  # fmt: skip
def test_requests_beside_prompts_take_tiles_of_prompts(
    sharing: int, requests: int, context: int, chunk: int, us: float
) -> None:
    """Rows of casys-kaist/LLMServingSim's attention.csv (32 heads), less those of the prompt."""
    beside = beside_prompts(32, sharing)
    assert beside is not None
    assert beside(requests, requests * (context + 1), chunk) * 1e6 == pytest.approx(us, rel=0.25)


def test_only_an_engine_with_one_kernel_takes_tiles_of_prompts() -> None:
    """FlashAttention 2 reads no cache in fp8, and SGLang has a kernel for each kind of request."""
    card = resolve("rtx-pro-6000")
    for on in (card.for_inference(engine="vllm", cache="fp8"), card.for_inference(), H100):
        assert DecodeInPromptKernel.of(on, 32, 4, 256) is None


def test_experts_in_four_bits_have_kernels_of_their_own() -> None:
    """Published times of the experts of gpt-oss-120b with 8,192 tokens (aiconfigurator@095f58a5).

    Triton's on H200 2.9 ms, TensorRT-LLM's 4.3 ms there and 0.88 ms on B200.
    """
    mlp = ExpertMLP(*(np.array([float(x)]) for x in (8192, 2880, 2880, 4, 128, 1, 1)))
    for name, engine, measured in (
        ("h200", None, 2.905e-3),
        ("h200", "trtllm", 4.302e-3),
        ("b200", "trtllm", 0.884e-3),
    ):
        on = resolve(name).for_inference(weights="mxfp4", engine=engine)
        (seconds,) = experts_seconds(mlp, dtype="bf16", on=on, weights=4.25 / 8)
        assert seconds == pytest.approx(measured, rel=0.15), (name, engine)
    # Marlin's tiles have 16 rows at least, and multiply at 256 TFLOP/s, which is no full power.
    h200 = resolve("h200").for_inference(weights="mxfp4", engine="vllm")
    marlin = h200.products("bf16", grouped=True)
    assert (marlin.least_rows, h200.sustained().products("bf16", grouped=True)) == (16, marlin)
    served = resolve("h200").for_inference(engine="vllm")
    assert served.products("bf16", grouped=True).least_rows == 32


def test_experts_in_mxfp4_are_multiplied_in_mxfp8_on_amd() -> None:
    """Rows of AITER's gptoss_fp8fp4_tuned_fmoe.csv and dsv4_fp8fp4_tuned_fmoe.csv on MI355X."""
    on = resolve("mi355x").for_inference(weights="mxfp4", engine="vllm")
    assert on.products("bf16", grouped=True).product == "mxfp8"
    assert resolve("mi300x").for_inference(weights="mxfp4") == resolve("mi300x").for_inference()


def test_biases_of_experts_are_within_their_products() -> None:
    run = Run(model="gpt-oss-120b", layers=1, mode="decode", batch_size=8, context_length=64)
    compiled = compile(run)
    machine = Machine.of(resolve("h200"), gpus=1).for_inference(weights="mxfp4", engine="vllm")
    (isolated,) = task_seconds(compiled.program, machine)
    tasks = compiled.program.classes[0].work.actions.tasks
    seconds = without_fused_launches(tasks, isolated, "vllm", machine.hardware)
    biases = [row for row, op in enumerate(tasks.op) if tasks.ops[int(op)] == "bias"]
    assert biases
    assert not any(seconds[row] for row in biases)
