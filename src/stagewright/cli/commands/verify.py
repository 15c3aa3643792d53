"""The command that checks traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stagewright.cli import output
from stagewright.cli.command import command
from stagewright.cli.options import GROUP_FILE, JSON, WORKERS

if TYPE_CHECKING:
    from stagewright.check.report import Report


@command(
    70,
    "stagewright verify traces",
    "stagewright verify traces/workload --comm-group traces/comm_group.json --json",
)
@click.argument("directory")
@GROUP_FILE
@JSON
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@WORKERS
def verify(
    directory: str, comm_group: str | None, as_json: bool, strict: bool, workers: int | None
) -> int:
    """Check Chakra traces of any tool; the exit code is 0 if they are sound, else 1.

    DIRECTORY has files such as workload.0.et; it may also be DIR/workload, one file, or a bundle,
    which is checked by its rank classes.
    """
    from stagewright.check.verify import verify

    report = verify(directory, comm_group, workers=workers)
    if as_json:
        output.print_json(report.to_json())
    else:
        _print_report(report)
    return int(not report.ok or (strict and bool(report.findings)))


def _print_report(report: Report) -> None:
    from stagewright.check.inspect import readable
    from stagewright.numbers import plural

    color = {"error": "red", "warning": "yellow"}
    for finding in report.findings:
        where = "" if finding.rank is None else f"rank {finding.rank}: "
        more = _more(finding.nodes, finding.ranks)
        level = click.style(f"{finding.level}", fg=color[finding.level], bold=True)
        click.echo(f"{level} [{finding.code}] {where}{readable(finding.message)}{more}")
    for text in report.skipped:
        click.echo(f"not checked: {readable(text)}")
    output.say(
        f"{report.directory}: {plural(report.ranks, 'file', 'files')}, "
        f"{plural(report.kinds, 'kind', 'kinds')}, {report.nodes:,} nodes, "
        f"{report.bytes:,} bytes, {report.seconds:.1f} s; checked: {', '.join(report.checks)}"
    )
    numbers = [(len(report.of(level)), level) for level in ("error", "warning")]
    words = [f"{n} {level}{'s' * (n > 1)}" for n, level in numbers if n]
    click.echo(", ".join(words) if words else "sound")


def _more(nodes: int, ranks: int) -> str:
    if ranks > 1:
        return f" ({nodes:,} such, on {ranks:,} ranks)"
    return f" ({nodes:,} such)" if nodes > 1 else ""
