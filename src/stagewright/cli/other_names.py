"""Options of Megatron-LM and vLLM that say a setting in other terms than ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stagewright.errors import UserError
from stagewright.run.sections import EXPERIMENT

if TYPE_CHECKING:
    from stagewright.run.experiment import Experiment
    from stagewright.run.settings import Run

SWITCHES = {
    name.replace("-", "_"): (setting, value)
    for setting in EXPERIMENT.values()
    for name, value in setting.switches.items()
}
"""Options without a value that stand for one value of a setting."""

DERIVED = {
    "enable_expert_parallel": "vLLM: ep over all ranks of tp, cp and dp, with etp=1.",
    "num_layers_per_virtual_pipeline_stage": "Megatron-LM: layers / (pp * vpp), which gives vpp.",
}
"""Options whose setting follows from others, with their help."""

_BY_DERIVED = {
    **dict.fromkeys(("ep", "etp"), "enable-expert-parallel"),
    "vpp": "num-layers-per-virtual-pipeline-stage",
}


def translate(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], Callable[[Experiment], Experiment]]:
    """Settings by our names, and what is left to do once all of the run is known."""
    settings = {k: v for k, v in given.items() if k not in SWITCHES and k not in DERIVED}
    for name, (setting, value) in SWITCHES.items():
        if name in given and setting.name not in settings:
            settings[setting.name] = value
        elif name in given and settings[setting.name] != value and value != setting.default:
            flag, got = "--" + name.replace("_", "-"), settings[setting.name]
            raise UserError(
                f"{flag} means {setting.flag} {value}, got {setting.flag} {got}; drop either"
            )

    def finish(experiment: Experiment) -> Experiment:
        run = experiment.run
        if given.get("enable_expert_parallel"):
            run = _expert_parallel(experiment)
        if "num_layers_per_virtual_pipeline_stage" in given:
            run = _virtual_stages(run, int(given["num_layers_per_virtual_pipeline_stage"]))
        for name in ("ep", "etp", "vpp"):
            if name in settings and settings[name] != getattr(run, name):
                raise UserError(
                    f"--{name} {settings[name]} contradicts --{_BY_DERIVED[name]}, which makes it "
                    f"{getattr(run, name)}; drop either"
                )
        return replace(experiment, run=run)

    return settings, finish


def _expert_parallel(experiment: Experiment) -> Run:
    """vLLM's expert parallelism: over all ranks, those that `nodes` fills with dp included."""
    from stagewright.api.simulated import fill_nodes

    run, cluster = experiment.run, experiment.cluster
    if cluster.nodes is not None:
        run = fill_nodes(run, cluster, cluster.nodes)
    return run.model_copy(update={"ep": run.tp * run.cp * run.dp, "etp": 1})


def _virtual_stages(run: Run, layers: int) -> Run:
    from stagewright.model.catalog import resolve

    depth = resolve(run.model, run.as_family or "").with_overrides(run.layers).depth
    if layers < 1 or depth % (run.pp * layers):
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {layers} x pp={run.pp} does not divide the "
            f"{depth} layers of {run.model}; use another, or --vpp and --layers-per-stage"
        )
    return run.model_copy(update={"vpp": depth // (run.pp * layers)})
