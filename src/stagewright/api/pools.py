"""Groups of instances from settings, each with its layout and machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as shown
from typing import Any, NamedTuple, cast

from stagewright.errors import UserError, either
from stagewright.files import from_yaml, read_text
from stagewright.model.catalog import resolve as model_of
from stagewright.model.config import ModelConfig
from stagewright.run.experiment import Experiment, with_settings
from stagewright.run.requests import ranks_of_text
from stagewright.run.sections import SETTINGS
from stagewright.run.sections.serving import OF_ONE_STEP, EngineSection, PoolSection
from stagewright.run.settings import Run
from stagewright.serving.deployment import Deployment, InstanceGroup
from stagewright.serving.disaggregation import Role
from stagewright.serving.engine import Scheduler
from stagewright.serving.instance import make_instance
from stagewright.serving.routers import router_of
from stagewright.serving.schedulers.named import batch_limits, refuse_others, scheduler_of
from stagewright.serving.speculative import drafter_of
from stagewright.serving.stages import PromptStages
from stagewright.serving.workload import Workload
from stagewright.time.hardware import Hardware
from stagewright.time.hardware import resolve as hardware_of
from stagewright.time.network import Machine

Row = Mapping[str, Any]
"""How a group of instances differs from what settings say of all: settings by name."""

ROLES: tuple[Role, ...] = ("both", "prefill", "decode")


class Given(NamedTuple):
    """What is given as an object in place of settings."""

    workload: Workload | None = None
    scheduler: Scheduler | None = None
    config: ModelConfig | None = None
    pools: Sequence[Row] | None = None
    stages: Sequence[Row] | None = None
    classes: Sequence[Row] | None = None


def rows_of(
    asked: PoolSection, engines: EngineSection, given: Sequence[Row] | None = None
) -> Sequence[Row]:
    """The groups that are asked for; none where all instances are alike and serve whole requests.

    `given` are rows that a caller has, in place of a file of them. Raises UserError for settings
    that contradict each other.
    """
    about = [n for n in ("prefill", "prefill_hardware") if getattr(asked, n) is not None]
    if asked.pools is not None or given is not None:
        if about or asked.prefill_instances is not None or engines.instances > 1:
            raise UserError(
                "--pools says which instances there are; leave out --instances and --prefill..., "
                "or the file"
            )
        if given is not None:
            return _rows(given, "pools")
        assert asked.pools is not None
        values = from_yaml(read_text(asked.pools, "a file of instances in YAML"), asked.pools)
        return _rows(values, asked.pools)
    if asked.prefill_instances is None:
        if about:
            flag = about[0].replace("_", "-")
            raise UserError(f"--{flag} is of --prefill-instances N: give how many there are")
        if asked.prefill_router != PoolSection.prefill_router:
            raise UserError("--prefill-router is of --prefill-instances N: give how many there are")
        if asked.kv_transfer != "prompt":
            raise UserError("--kv-transfer is of --prefill-instances N: give how many there are")
        return []
    row: dict[str, Any] = {"serves": "prefill", "instances": asked.prefill_instances}
    if asked.prefill is not None:
        row |= {"etp": None, "layers_per_stage": None} | ranks_of_text(asked.prefill).settings()
    if asked.prefill_hardware is not None:
        row["hardware"] = asked.prefill_hardware
    return [row, {"serves": "decode", "instances": engines.instances}]


def _rows(values: object, where: str) -> list[Row]:
    """Rows of settings by name; raises UserError for anything else."""
    rows = [*cast("Sequence[Any]", values)] if isinstance(values, list | tuple) else []
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"{where}: got {shown(cast('object', values))}, wanted a list of groups of "
            "instances, such as - {serves: prefill, instances: 2, tp: 4}"
        )
    for row in rows:
        for name in row:
            if str(name) in OF_ONE_STEP or not isinstance(name, str):
                raise UserError(f"{where}: {shown(name)} is no setting of a group of instances")
    return rows


@dataclass(frozen=True, eq=False)
class Planned:
    """A group of instances before its step times are made."""

    serves: Role
    experiment: Experiment
    hardware: Hardware
    engines: EngineSection

    def changed(self, row: Row) -> Planned:
        """This group with other settings."""
        values = dict(row)
        serves = values.pop("serves", "both")
        if serves not in ROLES:
            raise UserError(f"serves is {shown(serves)}, wanted {either(ROLES)}")
        values.setdefault("instances", 1)
        name = values.pop("hardware", None)
        if name is not None and not isinstance(name, str):
            raise UserError(f"hardware is {shown(name)}, wanted a name or a file")
        engines = with_settings(self.engines, values)
        own = {n: values[n] for n in values if n not in EngineSection.__dataclass_fields__}
        for each in own:
            if each in ("model", "max_model_len", "kv_block_size") or each not in SETTINGS:
                raise UserError(
                    f"{shown(each)} cannot differ between groups of instances; wanted serves, "
                    "instances, hardware, settings of a layout (tp, pp, ...) or of an engine"
                )
        run = self.experiment.run
        if own:
            run = Run.asked({}, {**run.given(), **own, "model": run.model, "mode": "decode"})
        return Planned(
            serves,
            replace(self.experiment, run=run),
            self.hardware if name is None else hardware_of(name),
            engines,
        )

    def group(self, given: Given, alike: Iterable[InstanceGroup] = ()) -> InstanceGroup:
        """The instances with their step times, which may be those of others that are alike."""
        run, cluster, engines = self.experiment.run, self.experiment.cluster, self.engines
        machine = Machine.of(
            self.hardware,
            gpus=run.world_size,
            topology=cluster.topology,
            algorithm=cluster.algorithm,
        )
        limits = batch_limits(engines, self.hardware)
        chosen = given.scheduler
        if chosen is None:
            refuse_others(engines)
        scheduler = chosen or scheduler_of(engines, limits, run.pp)
        router_of(engines.router)
        share, drafts = engines.gpu_memory_utilization, _drafts(engines)
        for of in alike:
            same = of.instance.run == run and of.instance.machine == machine
            same = same and _drafts(of.settings) == drafts
            if same and of.limits == limits and of.settings.gpu_memory_utilization == share:
                return InstanceGroup(of.instance, engines, limits, scheduler, self.serves)
        model = (given.config or model_of(run.model, run.as_family or "")).with_overrides(
            num_layers=run.layers, vocab_size=run.vocab, mtp_num_layers=run.mtp_num_layers
        )
        made = make_instance(
            run,
            model,
            machine,
            self.experiment.execution,
            max_tokens=limits.tokens,
            max_requests=limits.requests,
            gpu_memory_utilization=share,
            drafter=drafter_of(engines, run, model),
        )
        return InstanceGroup(made, engines, limits, scheduler, self.serves)


def _drafts(engines: EngineSection) -> tuple[str | None, str | None]:
    return engines.speculative_method, engines.speculative_model


def deployment_of(
    plans: Iterable[Planned], given: Given, asked: PoolSection, stages: PromptStages | None = None
) -> Deployment:
    """Groups of instances with their step times."""
    router_of(asked.prefill_router, "--prefill-router")
    groups: list[InstanceGroup] = []
    for plan in plans:
        groups.append(plan.group(given, groups))
    found = Deployment(tuple(groups), asked.prefill_router, stages, kv_transfer=asked.kv_transfer)
    if asked.kv_transfer != "prompt" and not found.disaggregated:
        raise UserError("--kv-transfer is of --prefill-instances N: give how many there are")
    return found
