"""Expands a bundle: writes ranks as files, with the bytes that `write` writes for them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from stagewright.errors import UserError, did_you_mean
from stagewright.executors import RayCluster
from stagewright.program.columns import intersect
from stagewright.trace.formats.bundle import Bundle
from stagewright.trace.manifest import head_of
from stagewright.trace.templates import FORMATS
from stagewright.trace.write import WriteOptions, chosen_ranks, write_ranks


def expand(
    source: Bundle,
    out: Path | str,
    *,
    format: str = "chakra",
    ranks: Sequence[int] | None = None,
    cluster: RayCluster | None = None,
    **options: Unpack[WriteOptions],
) -> dict[str, Any]:
    """Write `ranks` of a bundle as `write` does those of its program; returns the manifest.

    With a `cluster`, its machines write into `out`, which all of them share.
    """
    if format not in FORMATS:
        hint = did_you_mean(format, FORMATS)
        raise UserError(f"format {format!r}: choose of {', '.join(FORMATS)}{hint}")
    chosen = chosen_ranks(source.world_size, ranks)
    manifest = source.manifest
    nodes = [
        {**entry, "files": len(intersect(class_ranks, chosen))}
        for entry, class_ranks in zip(manifest.pop("nodes"), source.ranks, strict=True)
    ]
    del manifest["format"]
    head = head_of(manifest, source.world_size, format, nodes)
    program = source.program(chosen)
    return write_ranks(program, out, chosen, head, users=source.users, cluster=cluster, **options)


@contextmanager
def traces(path: Path | str, ranks: Sequence[int]) -> Generator[list[Path]]:
    """Traces of some ranks of a bundle, with their groups, for as long as the block lasts."""
    with TemporaryDirectory(prefix="stagewright-") as folder:
        expand(Bundle(path), f"{folder}/out", ranks=ranks)
        yield [Path(folder, "out", FORMATS["chakra"].file.format(rank=rank)) for rank in ranks]
