"""Stamps ranks on the machines of a Ray cluster, each straight to storage that all of them share.

A share is some ranks of one class. What a lost machine was writing is written again by another: a
file is whole or not there, and has the same bytes whoever writes it.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stagewright.arrays import Int
from stagewright.errors import UserError
from stagewright.program.columns import Program
from stagewright.trace.manifest import Done
from stagewright.trace.storage import Local, Place, place
from stagewright.trace.templates import FORMATS, Batch, stamp_some

SHARE = 256_000_000  # bytes that a task writes, at most
TRIES = 5  # of a share whose machine was lost


def stamp(
    program: Program,
    to: Place,
    format: str,
    batches: Sequence[Batch],
    provenance: Mapping[str, str | int],
    note: Callable[[Done], None],
    tell: Callable[[Done], None],
    address: str | None = None,
) -> None:
    """Write every rank's file, as `stamp.stamp` does.

    `address` of the cluster: `host:port`, `ray://host:port` or `auto`; None: as the environment
    says, or a new one on this machine.
    """
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address)
    try:
        cores = int(ray.cluster_resources().get("CPU", 1))
        task = ray.remote(num_cpus=1, max_retries=TRIES)(_stamp)
        shared = ray.put(program)
        busy: dict[Any, tuple[Int, int]] = {}

        def begin(ranks: Int, tries: int = 1) -> None:
            busy[task.remote(shared, to.address, format, provenance, ranks)] = ranks, tries

        for ranks in _shares(batches, cores):
            begin(ranks)
        try:
            while busy:
                (ref,), _ = ray.wait([*busy], num_returns=1)
                ranks, tries = busy.pop(ref)
                try:
                    some: Done = ray.get(ref)
                except ray.exceptions.RayTaskError as error:
                    raise _cause(error) from error
                except ray.exceptions.RayError as error:
                    if tries == TRIES:
                        raise OSError(f"a share was lost {TRIES} times: {error}") from error
                    begin(ranks, tries + 1)
                    continue
                note(some)
                tell(some)
        except BaseException:
            for ref in busy:
                ray.cancel(ref, force=True)
            raise
    finally:
        if ours:
            ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError(
            "engine ray: needs the package ray, here and on the cluster; install stagewright[ray]"
        ) from None


def _connect(ray: Any, address: str | None) -> None:
    server = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:([0-9]{1,5})", address or "")
    try:
        if server is not None:
            # Ray itself knocks for many minutes.
            socket.create_connection((server[1], int(server[2])), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        told = str(error).strip().splitlines()
        what = told[0] if told else type(error).__name__
        raise UserError(f"address {address}: no Ray cluster answers: {what}") from None


def _shares(batches: Sequence[Batch], cores: int) -> Iterator[Int]:
    """The ranks of each task: not too many bytes, and several tasks for each core."""
    sizes = [batch.at_most or 1_000_000 for batch in batches]
    total = sum(size * len(batch.ranks) for size, batch in zip(sizes, batches, strict=True))
    share = min(SHARE, total // (4 * max(1, cores)))
    for size, batch in zip(sizes, batches, strict=True):
        step = max(1, share // size)
        for at in range(0, len(batch.ranks), step):
            yield batch.ranks[at : at + step]


def _stamp(
    program: Program, address: str, format: str, provenance: Mapping[str, str | int], ranks: Int
) -> Done:
    """A share, on a machine of the cluster."""
    to = place(address)
    if isinstance(to, Local) and not os.path.isdir(address):
        raise OSError(f"{socket.gethostname()} has no {address}: name a directory that all share")
    form = FORMATS[format]
    batches = form.plan(program, ranks, provenance)
    done = [stamp_some(to, form.file, batch.template(), batch.ranks) for batch in batches]
    return Done.joined(done)


def _cause(error: Any) -> BaseException:
    """What went wrong on another machine, in its own words."""
    cause = error.cause
    if isinstance(cause, ImportError):
        return UserError(f"engine ray: a machine of the cluster lacks a package: {cause}")
    return cause if isinstance(cause, OSError | UserError) else error
