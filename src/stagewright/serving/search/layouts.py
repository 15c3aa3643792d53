"""The layouts that a search for serving tries: degrees of one instance, on each hardware.

Of a dense model dp is no axis: a rank of it would be an instance of its own. Experts are split as
vLLM splits them: over all ranks (`--enable-expert-parallel`: ep = tp x dp), or within tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from stagewright.errors import UserError
from stagewright.lower.parameters import parameters
from stagewright.model.catalog import resolve as model_of
from stagewright.model.config import ModelConfig
from stagewright.run.sections.serving import OF_ONE_STEP
from stagewright.searching.candidates import Candidates
from stagewright.searching.constraints import Constraint
from stagewright.searching.lists import values_of
from stagewright.searching.request import SearchRequest, search_request
from stagewright.searching.space import Space
from stagewright.time.hardware import Hardware, resolve

MAX_GPUS = 256
"""GPUs of all instances by default."""
NODES = 4
"""Nodes of an instance at most, where a quarter of one does not hold the weights."""
PIPELINES = {False: (1, 2, 4), True: (1,)}
"""Degrees of pipelines by default: of a dense model, and of one with experts."""


def layouts(
    settings: Mapping[str, Any],
    path: str | Path | None = None,
    *,
    hardware: Sequence[str | Hardware],
    max_gpus: int = MAX_GPUS,
    vary: Mapping[str, Any] | None = None,
    config: ModelConfig | None = None,
) -> SearchRequest:
    """The space of the layouts of one instance; any setting of a run may be a list, as in a search.

    Raises UserError for settings of one step, which the requests over time decide.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name in sorted(given.keys() & OF_ONE_STEP - {"mode"}):
        raise UserError(f"{name} is of one step; requests over time are --requests or --rate")
    systems = [of if isinstance(of, Hardware) else resolve(str(of)) for of in hardware]
    if not systems:
        raise UserError("Missing option '--hardware'; see `stagewright hardware` for names.")
    model = config or model_of(str(given.get("model", "")), str(given.get("as_family") or ""))
    experts = model.num_experts > 0
    most = min(max_gpus, max(_sizes(model, of) for of in systems))
    domain = max(of.scale_up.gpus for of in systems)
    degrees = {
        "tp": _doubling(min(domain, most)),
        "pp": PIPELINES[experts],
        "dp": _doubling(most) if experts else (1,),
    }
    named = {n: values_of(int, given[n], n) for n in degrees if n in given}
    if named.keys() == degrees.keys():
        most = max_gpus
    lists: dict[str, Sequence[Any]] = {**degrees, **named}
    sizes = sorted({t * p * d for t, p, d in product(*lists.values()) if t * p * d <= most})
    if not sizes:
        raise UserError(f"no layout of those asked for has at most {max_gpus} GPUs; raise --gpus")
    given |= {name: ",".join(map(str, of)) for name, of in lists.items()}
    of = search_request(
        given | {"mode": "decode"}, path, hardware=systems, gpus=sizes, vary=vary, model=config
    )
    if not experts or {"ep", "etp"} & given.keys():
        return of
    constraint = Constraint(
        "by default experts are split over all ranks, or within tp",
        ("tp", "dp", "ep", "etp"),
        _check_experts,
    )
    space = of.space
    return SearchRequest(
        Space(
            space.base,
            space.model,
            space.fleets,
            space.axes,
            (*space.extra_constraints, constraint),
        ),
        of.notes,
    )


def _sizes(model: ModelConfig, hardware: Hardware) -> int:
    """The most GPUs of an instance by default: one node, or `NODES` where the weights in bf16 take
    more than a quarter of a node's memory."""
    node = hardware.gpus_per_node
    held = 2 * parameters(model)[0]  # in bf16
    return node if 4 * held <= node * hardware.memory else NODES * node


def _doubling(most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(most.bit_length()))


def _check_experts(rows: Candidates, row: int) -> None:
    run = rows.run(row)
    over_all = run.ep == run.tp * run.dp and run.etp in (None, 1)
    within_tp = run.dp == 1 and run.ep == 1 and run.etp in (None, run.tp)
    if not over_all and not within_tp:
        raise UserError(
            f"ep={run.ep} etp={run.etp} is neither ep={run.tp * run.dp} etp=1 nor, with dp=1, "
            f"ep=1 etp={run.tp}; list it with --ep and --etp to try it"
        )
