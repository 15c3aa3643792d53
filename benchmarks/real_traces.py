"""Replays of public traces of PyTorch's profiler, as docs/accuracy/data/real-traces.csv.

    python benchmarks/real_traces.py FOLDER

The folder holds the traces under the names `repository--path`, with `--` for each `/`: `hta--`
is facebookresearch/HolisticTraceAnalysis@f4d0062c tests/data, `param--` facebookresearch/param
et_replay/tests, `tracelens--` AMD-AGI/TraceLens@171dd747 tests/traces; all three are MIT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import stagewright as sw
from stagewright.files import write_text
from stagewright.texttable import Table

OUT = Path(__file__).parent.parent / "docs/accuracy/data/real-traces.csv"
SOURCES = {
    "hta": "HolisticTraceAnalysis@f4d0062c tests/data",
    "param": "facebookresearch/param et_replay/tests",
    "tracelens": "TraceLens@171dd747 tests/traces",
}


def rows(folder: Path) -> list[dict[str, object]]:
    """A row for each rank of each trace."""
    found: list[dict[str, object]] = []
    for path in sorted(folder.glob("*--*")):
        source, _, name = path.name.partition("--")
        result = sw.replay(path)
        device = str(next(iter(result.text()))).partition(" on ")[2].partition(",")[0]
        for rank in result.table("ranks").rows:
            recorded = rank["recorded"]
            found.append(
                {
                    "source": SOURCES[source],
                    "trace": name.replace("--", "/"),
                    "rank": rank["rank"],
                    "device": device,
                    "kernels": rank["kernels"],
                    "recorded_ms": round(recorded * 1e3, 3),
                    "replayed_ms": round(rank["replayed"] * 1e3, 3),
                    "error": f"{rank['replayed'] / recorded - 1:+.2%}",
                    "error_of_links": f"{rank['linked'] / recorded - 1:+.2%}",
                    "idle_ms": round(rank["idle"] * 1e3, 3),
                    "waiting_ms": None
                    if rank["waiting"] is None
                    else round(rank["waiting"] * 1e3, 3),
                    "unexplained_ms": round(rank["unexplained"] * 1e3, 3),
                }
            )
    return found


if __name__ == "__main__":
    made = rows(Path(sys.argv[1]))
    table = Table("", {name: [row[name] for row in made] for name in made[0]})
    write_text(str(OUT), table.to_csv())
