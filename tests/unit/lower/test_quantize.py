"""Casts of operands of products: what they move by recipe, and which kernels they share."""

from collections.abc import Iterator

import numpy as np
import pytest

from stagewright.errors import UserError
from stagewright.lower.compile import compile
from stagewright.program.columns import Tasks
from stagewright.run.settings import Run

S, M = 64, 4096


def tasks(**settings: object) -> Tasks:
    run = Run.load(
        None, {"model": "llama3-8b", "layers": 1, "seq_length": S, "precision": "fp8", **settings}
    )
    (only,) = compile(run).program.classes
    return only.tasks


def named(t: Tasks, name: str) -> Iterator[tuple[str, int]]:
    for i in np.flatnonzero(np.array([n == name for n in t.names])[t.name]):
        yield t.ops[t.op[i]], int(t.traffic[i])


@pytest.mark.parametrize(
    ("recipe", "moved"),
    [
        ("tensorwise", 2 + 2 + 1 + 1),  # a read for the scale, a read, fp8 along both axes
        ("rowwise", 2 + 1 + 2 + 1),  # along rows in forward, along columns in backward
        ("blockwise", 2 + 1 + 1 + 2 * 4 / 128),  # rows and columns, a scale in fp32 of 128
        ("mxfp8", 2 + 2 * (1 + 1 / 32)),  # rows and columns, a byte of scale for 32
    ],
)
def test_a_cast_moves_the_bytes_of_its_recipe(recipe: str, moved: float) -> None:
    found = dict(named(tasks(fp8_recipe=recipe), "layer0.attn_norm_out"))
    assert found["cast"] == pytest.approx(moved * S * M, rel=1e-3)
    assert found["norm"] == pytest.approx(2 * 2 * S * M, rel=1e-2)


@pytest.mark.parametrize("settings", [{}, {"fp8_recipe": "delayed"}])
def test_delayed_scaling_casts_in_norms_and_by_a_kernel_elsewhere(
    settings: dict[str, object],
) -> None:
    t = tasks(**settings)
    norm = dict(named(t, "layer0.attn_norm_out"))
    assert norm == {"norm+cast": pytest.approx((2 + 1) * S * M, rel=2e-2)}
    inner = dict(named(t, "layer0.act"))
    assert inner["cast"] == (2 + 1 + 1) * S * 14336  # along rows, and transposed
    assert "glu" in inner


def test_inputs_of_frozen_weights_have_no_second_copy() -> None:
    for recipe, moved in {
        "delayed": 2 + 1,
        "tensorwise": 2 + 2 + 1,
        "mxfp8": 2 + 1 + 1 / 32,
    }.items():
        t = tasks(fp8_recipe=recipe, lora_rank=8, lora_target_modules=("linear_qkv",))
        inner = dict(named(t, "layer0.act"))
        assert inner["cast"] == pytest.approx(moved * S * 14336, rel=1e-6)


def test_gradients_are_cast_by_the_recipe_too() -> None:
    t = tasks(fp8_recipe="tensorwise")
    backward = [moved for op, moved in named(t, "layer0.cast") if op == "cast"]
    assert min(backward) >= 5 * S * 1024  # of keys and values, the narrowest


@pytest.mark.parametrize(("precision", "dtype"), [("nvfp4", "fp4"), ("int8", "int8")])
def test_products_are_in_the_format_of_the_precision(precision: str, dtype: str) -> None:
    t = tasks(precision=precision)
    products = np.array(["einsum" in op for op in t.ops])[t.op]
    layer = np.array([name.startswith("layer0") for name in t.names])[t.name]
    assert {t.dtypes[int(i)] for i in t.dtype[products & layer]} == {dtype}


def test_mxfp8_is_a_format_of_its_own() -> None:
    assert "mxfp8" in tasks(fp8_recipe="mxfp8").dtypes


def test_a_recipe_of_fp8_needs_fp8() -> None:
    with pytest.raises(UserError, match="fp8_recipe=mxfp8 needs precision=fp8"):
        tasks(precision="bf16", fp8_recipe="mxfp8")


def test_attention_in_fp8_casts_what_it_reads_and_makes() -> None:
    """As Transformer Engine's `fp8_dpa`: operands and the gradient of the result in fp8, and the
    results of both kernels back in bf16."""
    t = tasks(fp8_dot_product_attention=True)
    for name, width in (("q_core", 4096), ("k_core", 1024), ("v_core", 1024)):
        assert dict(named(t, f"layer0.{name}"))["cast"] == (2 + 1) * S * width
    kernels = {t.ops[o]: t.dtypes[d] for o, d in zip(t.op, t.dtype, strict=True)}
    assert kernels["attention"] == kernels["attention_bwd"] == "fp8"
    # Products after it are those without it, and so is what is sent to other ranks of tp.
    plain = tasks()
    assert t.flops.sum() == pytest.approx(plain.flops.sum(), rel=0.02)


def test_attention_in_fp8_needs_fp8() -> None:
    with pytest.raises(UserError, match="fp8_dot_product_attention=True needs precision=fp8"):
        tasks(precision="bf16", fp8_dot_product_attention=True)
