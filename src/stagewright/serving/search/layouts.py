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
"""Largest number of nodes of an instance whose weights exceed a quarter of a node's memory."""
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
    """Space of the layouts of one instance; any setting of a run may be a list, as in a search.

    Raises UserError for settings of one step, which the requests over time decide.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name in sorted(given.keys() & OF_ONE_STEP - {"mode"}):
        raise UserError(f"{name} is of one step; requests over time are --requests or --rate")
    systems = [
        system if isinstance(system, Hardware) else resolve(str(system)) for system in hardware
    ]
    if not systems:
        raise UserError("Missing option '--hardware'; see `stagewright hardware` for names.")
    model = config or model_of(str(given.get("model", "")), str(given.get("as_family") or ""))
    experts = model.num_experts > 0
    max_size = min(max_gpus, max(_max_size(model, system) for system in systems))
    domain = max(system.scale_up.gpus for system in systems)
    degrees = {
        "tp": _powers_of_two(min(domain, max_size)),
        "pp": PIPELINES[experts],
        "dp": _powers_of_two(max_size) if experts else (1,),
    }
    named = {n: values_of(int, given[n], n) for n in degrees if n in given}
    if named.keys() == degrees.keys():
        max_size = max_gpus
    lists: dict[str, Sequence[Any]] = {**degrees, **named}
    sizes = sorted({t * p * d for t, p, d in product(*lists.values()) if t * p * d <= max_size})
    if not sizes:
        raise UserError(f"no layout of those asked for has at most {max_gpus} GPUs; raise --gpus")
    given |= {name: ",".join(map(str, values)) for name, values in lists.items()}
    request = search_request(
        given | {"mode": "decode"}, path, hardware=systems, gpus=sizes, vary=vary, model=config
    )
    if not experts or {"ep", "etp"} & given.keys():
        return request
    constraint = Constraint(
        "by default experts are split over all ranks, or within tp",
        ("tp", "dp", "ep", "etp"),
        _check_experts,
    )
    space = request.space
    return SearchRequest(
        Space(
            space.base,
            space.model,
            space.fleets,
            space.axes,
            (*space.extra_constraints, constraint),
        ),
        request.notes,
    )


def _max_size(model: ModelConfig, hardware: Hardware) -> int:
    """Largest number of GPUs of an instance by default.

    One node, or `NODES` where the weights in bf16 take more than a quarter of a node's memory.
    """
    node = hardware.gpus_per_node
    weights = 2 * parameters(model)[0]  # bytes in bf16
    return node if 4 * weights <= node * hardware.memory else NODES * node


def _powers_of_two(limit: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(limit.bit_length()))


def _check_experts(rows: Candidates, row: int) -> None:
    run = rows.run(row)
    over_all = run.ep == run.tp * run.dp and run.etp in (None, 1)
    within_tp = run.dp == 1 and run.ep == 1 and run.etp in (None, run.tp)
    if not over_all and not within_tp:
        raise UserError(
            f"ep={run.ep} etp={run.etp} is neither ep={run.tp * run.dp} etp=1 nor, with dp=1, "
            f"ep=1 etp={run.tp}; list it with --ep and --etp to try it"
        )
