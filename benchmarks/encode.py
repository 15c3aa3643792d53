"""How fast Chakra traces are encoded and written, beside a plain write of the same bytes.

    PYTHONPATH=src python benchmarks/encode.py [--nodes 115000] [--classes 4] [--ranks 8]

The program is synthetic: a pipeline of transformer stages with the mix of kinds, dependencies and
sizes of a sharded training step, made of arrays without the rest of Stagewright.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagewright.formats import chakra
from stagewright.layout import Mesh
from stagewright.program import Communicator, Kind, Peer, Program, RankClass, Tasks
from stagewright.write import write


def tasks(count: int, seed: int) -> Tasks:
    """One rank's tasks: of every 23, 16 compute, 5 are collectives, one a send, one a receive."""
    random = np.random.default_rng(seed)
    row = np.arange(count)
    at = row % 23
    kind = np.where(at < 16, Kind.COMPUTE, np.where(at < 21, Kind.COLLECTIVE, Kind.SEND))
    kind[at == 22] = Kind.RECV
    names = tuple(f"layer.{part}.{what}" for part in ("attention", "mlp") for what in range(24))
    ops = ("einsum", "softmax", "all_gather", "reduce_scatter", "send", "recv", "add", "rms_norm")

    def only(
        which: NDArray[np.bool_], values: NDArray[np.int64], other: int = 0
    ) -> NDArray[np.int64]:
        return np.where(which, values, other)

    computes, collects = kind == Kind.COMPUTE, kind == Kind.COLLECTIVE
    data_counts = np.minimum(row, random.integers(1, 4, count))
    order_counts = np.where(computes, 0, np.minimum(row, 1))
    owner = np.repeat(row, data_counts)
    slot = np.where(collects, row % 2, np.where(kind == Kind.SEND, 0, 1))
    return Tasks(
        kind=kind.astype(np.uint8),
        name=(row % len(names)).astype(np.int32),
        op=(row % len(ops)).astype(np.int32),
        phase=(row * 4 // count).astype(np.uint8),
        stage=np.zeros(count, np.int32),
        layer=(row // 23 % 49 - 1).astype(np.int32),
        microbatch=(row // (23 * 49) % 33 - 1).astype(np.int32),
        flops=only(computes, random.integers(1, 1 << 40, count)),
        traffic=only(computes, random.integers(1, 1 << 30, count)),
        collective=only(collects, row % 4, -1).astype(np.int8),
        dtype=np.zeros(count, np.int8),
        comm_bytes=only(~computes, random.integers(1, 1 << 28, count)),
        slot=only(~computes, slot, -1).astype(np.int16),
        tag=only(at > 20, row // 23, -1).astype(np.int32),
        shape=np.full(count, -1, np.int32),
        data_ptr=np.concatenate(([0], np.cumsum(data_counts))),
        data=np.maximum(0, owner - random.integers(1, 40, len(owner))).astype(np.int32),
        order_ptr=np.concatenate(([0], np.cumsum(order_counts))),
        order=(np.repeat(row, order_counts) - 1).astype(np.int32),
        names=names,
        ops=ops,
        dtypes=("bf16",),
        shapes=(),
    )


def program(nodes: int, classes: int, ranks: int) -> Program:
    """`classes` pipeline stages of `ranks` ranks each."""
    mesh = Mesh((("tp", 2), ("dp", ranks // 2), ("pp", classes)))
    return Program(
        mesh=mesh,
        classes=tuple(
            RankClass(np.arange(ranks) + ranks * stage, stage, tasks(nodes, stage), {})
            for stage in range(classes)
        ),
        communicators=(Communicator(("tp",)), Communicator(("dp",))),
        peers=(Peer("pp", 1), Peer("pp", -1)),
    )


@contextmanager
def timed(what: str, per: Callable[[float, float], str]) -> Generator[None]:
    """Print what took how long: CPU seconds of all threads, seconds on the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{what:36} {cpu:7.2f} CPU-s {wall:7.2f} s   {per(cpu, wall)}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=115_000, help="per class")
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=8, help="per class, an even number")
    parser.add_argument("--workers", type=int, help="threads that write [one per core]")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    made = program(args.nodes, args.classes, args.ranks)
    for _ in range(2):  # the first time, memory and file system are cold
        encoding(made)
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            writing(made, Path(folder), args.workers)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory {peak / 1024:.0f} MiB")


def encoding(made: Program) -> None:
    """Templates, without any rank's own values."""
    nodes = sum(len(of.tasks) for of in made.classes)

    def rate(cpu: float, wall: float) -> str:
        return f"{nodes / cpu / 1e6:.2f} million nodes per CPU-second"

    # One rank per class: others would be further batches only where their numbers are wider.
    firsts = np.array([of.ranks[0] for of in made.classes])
    with timed("encode", rate):
        for batch in chakra.plan(made, firsts, {}):
            batch.template()
    with timed("sizes alone", rate):
        size = sum(batch.size for batch in chakra.plan(made, firsts, {}))
    print(f"{nodes} nodes of {size / nodes:.0f} bytes on average")


def writing(made: Program, folder: Path, workers: int | None) -> None:
    """All ranks' files, beside what the same bytes cost at least."""
    ranks = np.arange(made.mesh.world_size)
    batches = chakra.plan(made, ranks, {})
    total = sum(batch.size * len(batch.ranks) for batch in batches)

    def speed(cpu: float, wall: float) -> str:
        return f"{total / 1e6 / wall:.0f} MB/s on the clock, {total / 1e6 / cpu:.0f} per CPU-second"

    template = batches[0].template()
    with template.stamped(batches[0].ranks[0]) as data:
        plain = bytes(data)
    with timed(f"plain write of {total / 1e6:.0f} MB", speed):
        for rank in ranks:
            (folder / f"{rank}").write_bytes(plain)
    with timed("SHA-256 of the same", speed):
        for _ in ranks:
            hashlib.sha256(plain).hexdigest()
    with timed("stamping alone", speed):
        for nth in range(len(ranks)):
            with template.stamped(batches[0].ranks[nth % len(batches[0].ranks)]):
                pass
    with timed("write(): encode, stamp, hash, write", speed):
        write(made, folder / "out", manifest={}, workers=workers)


if __name__ == "__main__":
    main()
