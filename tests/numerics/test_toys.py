"""Small models with experts, with images, and of blocks that hand on more than the stream.

Each block is sharded as on one device; programs of many parallelizations are sound.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers import pairs, rows_of
from invariants import check
from spmd import check_blocks
from stagewright.lower.compile import compile
from stagewright.run.settings import Run
from toys import OF_IMAGES, TOYS, WITH_LIVE_VALUES

DEGREES = [row["degrees"] for row in rows_of("test_toys", "degrees")]
OF_LAYERS = [row["degrees"] for row in rows_of("test_toys", "degrees_of_layers")]


@pytest.mark.parametrize(("model", "settings"), pairs(WITH_LIVE_VALUES, DEGREES, 8), ids=str)
def test_blocks_of_text_compute_what_one_device_does(model: str, settings: dict[str, Any]) -> None:
    if TOYS[model].encoder_num_layers:
        settings = settings | {"decoder_seq_length": 12 if "cp" in settings else 6}
    batch = 6 // settings.get("dp", 1)
    run = Run(model=model, dropout=False, seq_length=12, micro_batch_size=batch, **settings)
    check_blocks(TOYS[model], run)


@pytest.mark.parametrize(("model", "settings"), pairs(OF_IMAGES, OF_LAYERS), ids=str)
def test_blocks_of_images_compute_what_one_device_does(
    model: str, settings: dict[str, Any]
) -> None:
    run = Run(model=model, micro_batch_size=8 // settings.get("dp", 1), **settings)
    check_blocks(TOYS[model], run)


PROGRAMS = [(row["model"], row["settings"]) for row in rows_of("test_toys", "programs")]


@pytest.mark.parametrize(("model", "settings"), PROGRAMS, ids=str)
def test_programs_are_sound(model: str, settings: dict[str, Any]) -> None:
    run = Run(model=model, **settings)
    check(compile(run, TOYS.get(model)).program, streams=run.streams, seeds=(0,))
