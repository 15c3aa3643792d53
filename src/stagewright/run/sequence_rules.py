"""Rules of sequences: positions of the model, and pieces over cp and tp."""

from __future__ import annotations

import math

from stagewright.errors import UserError, divisors
from stagewright.model.config import ModelConfig
from stagewright.run.rule import Refuse, apply, nearest, require_divides
from stagewright.run.settings import Run

INDEXED = (
    Refuse(
        lambda run, model: run.cp > 1 and model.index_topk and run.cp_comm_type != "all_gather",
        "cp_comm_type={run.cp_comm_type}: each query of {model.name} reads keys anywhere in the "
        "sequence, which an indexer chooses among all; use cp_comm_type=all_gather",
    ),
    Refuse(
        lambda run, model: run.cp > 1 and model.o_groups and run.cp_comm_type != "all_gather",
        "cp_comm_type={run.cp_comm_type}: each query of {model.name} reads compressed keys of the "
        "whole sequence; use cp_comm_type=all_gather",
    ),
    Refuse(
        lambda run, model: (run.seq_length or 0) % model.positions_of_a_key,
        "seq_length={run.seq_length} is no multiple of the {model.positions_of_a_key} positions "
        "that have one compressed key in {model.name}; {use}",
        lambda run, model: {"use": nearest(run.seq_length or 0, model.positions_of_a_key)},
    ),
)
"""Attention to chosen and compressed keys: ranks that share a sequence, and its length."""

SEQUENCE = (
    Refuse(
        lambda run, model: model.vision and run.seq_length != model.max_position_embeddings,
        "seq_length={run.seq_length} is not the {model.max_position_embeddings} positions of an "
        "image of {model.name}; leave it out",
    ),
    Refuse(
        lambda run, model: (
            model.position == "learned" and (run.seq_length or 0) > model.max_position_embeddings
        ),
        "seq_length={run.seq_length} is longer than the {model.max_position_embeddings} learned "
        "positions of {model.name}; use at most {model.max_position_embeddings}",
    ),
    Refuse(
        lambda run, model: (run.document_length or 0) > (run.seq_length or 0),
        "document_length={run.document_length} is longer than seq_length={run.seq_length}, which "
        "documents are packed into; use at most that",
    ),
    Refuse(
        lambda run, model: (
            run.document_length
            and not (model.causal and model.attends and not model.encoder_num_layers)
        ),
        "document_length={run.document_length} is about causal attention, which {model.name} has "
        "none of; drop it",
    ),
)


def check_images(run: Run, model: ModelConfig) -> None:
    """A tower's sequence is what its images make it, and the text comes after that."""
    assert model.tower is not None
    positions = model.tower.max_position_embeddings
    length = run.resolved(model).seq_length or 0
    if length < positions:
        raise UserError(
            f"seq_length={length} has no room for text behind the {positions - 1} patches of an "
            f"image of {model.name}; use {positions} or more"
        )
    of = f"positions of an image of {model.name}"
    for name, ranks in (
        ("sequence_parallel with tp", run.sequence_parallel_size),
        ("cp", run.cp),
    ):
        if ranks > 1:
            require_divides(name, ranks, positions, of, end=", or none")


def check_decoder_sequence(run: Run, model: ModelConfig) -> None:
    """Refuse lengths of a decoder behind an encoder that ranks do not split, or without one."""
    if not model.encoder_num_layers:
        if run.decoder_seq_length is not None:
            raise UserError(
                f"decoder_seq_length={run.decoder_seq_length} is of an encoder and a decoder, but "
                f"{model.name} has no encoder; use seq_length"
            )
        return
    length = run.resolved(model).decoder_seq_length
    if length is None:
        return
    pieces = 2 * run.cp if run.cp > 1 and run.cp_comm_type != "a2a" else run.cp
    ranks = f"cp x tp={run.cp * run.tp}" if run.cp > 1 else f"tp={run.tp}"
    _check_pieces("decoder_seq_length", length, pieces, run, ranks)


def check_sequence(run: Run, model: ModelConfig) -> None:
    """Refuse a sequence of training that the model lacks positions for, or that is not split."""
    run = run.resolved(model)
    apply(SEQUENCE, run, model)
    length = run.seq_length
    assert length is not None
    apply(INDEXED, run, model)
    if run.cp_comm_type == "a2a" and model.attends:
        _check_ulysses(run, model)
    causal = model.causal and not model.encoder_num_layers  # whose sequence this is
    balanced = run.cp > 1 and causal and model.attends and run.cp_comm_type != "a2a"
    pieces = 2 * run.cp if balanced else run.cp
    _check_pieces("seq_length", length, pieces, run, f"cp x tp={run.cp * run.tp}")


def _check_ulysses(run: Run, model: ModelConfig) -> None:
    """All-to-alls over cp leave each rank whole heads."""
    heads = model.num_attention_heads // run.tp
    groups = max(1, model.num_query_groups // run.tp)
    for count, what in ((heads, "attention"), (groups, "key-value")):
        if count % run.cp and (what == "attention" or count > 1):
            raise UserError(
                f"cp={run.cp} does not divide the {count} {what} heads of a rank ({model.name} "
                f"with tp={run.tp}), which cp_comm_type=a2a needs; use cp={divisors(count)}, or p2p"
            )


def _check_pieces(name: str, length: int, pieces: int, run: Run, ranks: str) -> None:
    """A sequence is split into pieces over cp, and with sequence parallelism over tp."""
    if length % pieces:
        why = f"2 x cp={pieces} (causal load balance)" if pieces > run.cp else f"cp={run.cp}"
        raise UserError(f"{name}={length} is not divisible by {why}; {nearest(length, pieces)}")
    step = math.lcm(pieces, run.cp * run.tp)
    if run.sequence_parallel and length % step:
        raise UserError(
            f"{name}={length} is not divisible by {ranks}, which sequence_parallel needs; "
            f"{nearest(length, step)}"
        )
