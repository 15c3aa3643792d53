"""Blocks of the KV cache beside what engines have logged, and closed forms."""

import pytest

from stagewright.errors import UserError
from stagewright.model.catalog import resolve
from stagewright.run.sections.serving import EngineSection
from stagewright.run.settings import Run
from stagewright.serving.deployment import InstanceGroup
from stagewright.serving.instance import kv_capacity
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine


def capacity(memory, tokens=2048, **settings):
    run = Run(mode="decode", **settings)
    return kv_capacity(run, resolve(run.model), int(memory), tokens)


def test_blocks_are_those_that_vllm_logged():
    # vLLM 0.19, RTX 4090 (casys-kaist/LLMServingSim@5daddb21)
    assert capacity(0.9 * 25250627584, model="llama3.1-8b").num_blocks == pytest.approx(
        2588, rel=0.02
    )


def test_ranks_that_copy_keys_send_them_once():
    assert capacity(80e9, model="llama3.1-8b", tp=4).bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert capacity(80e9, model="llama3.1-8b", tp=16).bytes_per_token == 2 * 32 * 8 * 128 * 2
    latent = capacity(140e9, model="deepseek-v3", tp=8, ep=8)
    assert latent.bytes_per_token == 61 * 576 * 2


def test_layers_that_choose_keys_keep_all_of_them():
    # Latents, and of the indexer's keys 128 bytes and a scale
    found = capacity(140e9, model="deepseek-v3.2", tp=8, ep=8)
    assert found.bytes_per_token == 61 * (576 * 2 + 128 + 4)


def test_windows_are_blocks_of_a_request():
    found = capacity(80e9, model="gpt-oss-120b")
    assert found.bytes_per_token == 2 * 18 * 8 * 64 * 2
    assert found.blocks_per_request == -(-(128 + 15) // 16)


def test_weights_that_leave_no_room_are_refused():
    with pytest.raises(UserError, match="leave no room"):
        capacity(80e9, model="llama3.1-70b")


def test_a_step_has_several_requests_where_positions_are_learned():
    few = capacity(10e9, model="gpt2", tokens=1024)
    found = capacity(10e9, model="gpt2", tokens=8192)
    assert found.bytes_per_token == few.bytes_per_token == 2 * 12 * 768 * 2
    # Activations of eight times the tokens
    assert few.num_blocks * 0.9 < found.num_blocks < few.num_blocks


def test_weights_that_leave_no_room_are_named_with_what_would_help():
    """DeepSeek-R1 in fp8 on four B200: not in 0.9 of 180 GB, but in 0.96."""
    run = Run(model="deepseek-r1", mode="decode", tp=4, weight_precision="fp8")
    model = resolve("deepseek-r1")
    with pytest.raises(UserError, match=r"weights \(169 GB\).*in 162 GB of a GPU, .* takes 1 GB"):
        kv_capacity(run, model, int(180e9 * 0.9), 8192)
    assert kv_capacity(run, model, int(180e9 * 0.96), 8192).num_blocks > 1000


def test_a_share_of_free_memory_is_one_of_what_weights_leave():
    run, model = Run(mode="decode", model="llama3.1-8b"), resolve("llama3.1-8b")
    whole = kv_capacity(run, model, int(80e9), 2048).num_blocks
    assert kv_capacity(run, model, int(80e9), 2048, share=0.5).num_blocks == whole // 2
    engines = EngineSection(scheduler="tensorrt-llm", free_gpu_memory_fraction=0.5)
    machine = Machine.of(hardware_of("h100-sxm"), gpus=1)
    group = InstanceGroup.of(run, model, machine, engines)
    limit, hardware = group.limits.tokens, machine.hardware.memory
    half = kv_capacity(run, model, hardware, limit, share=0.5)
    assert group.instance.cache == half
