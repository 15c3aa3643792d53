"""`Run`: all that a result depends on, as one frozen value; `rules.check` says if it can be done.

Its settings are declared in `sections`, and may be read section by section.

>>> run = Run(model="llama3.1-70b", tp=8, pp=4, dp=2, global_batch_size=64)
>>> run.world_size, run.microbatches
(64, 32)
>>> print(run.describe())
llama3.1-70b tp=8 dp=2 pp=4 global_batch_size=64
>>> from stagewright.run.sections.batch import BatchSection
>>> run.section(BatchSection).global_batch_size
64
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from reprlib import repr as shown  # short whatever the value
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from pydantic import BaseModel, ValidationError, field_validator, model_validator

from stagewright.errors import UserError
from stagewright.files import refuse_half_characters
from stagewright.launch.names import OTHERS
from stagewright.model.architecture import LIMITS
from stagewright.model.catalog import resolve
from stagewright.model.config import ModelConfig
from stagewright.printable import printable
from stagewright.run import lengths, requests
from stagewright.run.files import is_manifest, read_settings, settings_of
from stagewright.run.other_names import Pending
from stagewright.run.pipeline_split import compute_split, even_split, layout_split, split_with_ends
from stagewright.run.requests import ranks_of_text, read_prefill
from stagewright.run.sections import EXPERIMENT, SETTINGS, Settings
from stagewright.run.sections.declare import DEGREES, as_lists, setting_in_words, text_of
from stagewright.run.sections.inference import PrefillRanks
from stagewright.run.validation import invalid
from stagewright.schedule import schedules
from stagewright.schedule.generators import equal_group

_Section = TypeVar("_Section")

STEP_TOKENS = 4_194_304
"""Tokens of the default batch: Llama 2's, arXiv 2307.09288, section 2.2."""
TOKENS_PER_GPU = 1024
"""Tokens per GPU of the default batch on many GPUs: Llama 3 405B's 16M on 16,384, arXiv
2407.21783, table 4."""

_ELSEWHERE = EXPERIMENT.keys() - SETTINGS.keys()
"""Settings of the machine and of the execution."""


class Run(BaseModel, Settings, frozen=True, extra="forbid"):
    """A model and how it is trained or served: settings by name, `None` where a default follows.

    The names are those of Megatron-LM where it has one, then vLLM's. `world_size` is tp * cp * dp *
    pp, plus the ranks of `prefill`. `sections` declares the settings.
    """

    if not TYPE_CHECKING:  # type checkers and editors know the settings by name

        def __init__(self, **settings: Any) -> None:
            """Settings by name; a UserError names the first that is unknown or may not be so."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise invalid(error, type(self).model_fields) from None

    @classmethod
    def _validated(cls, values: Any) -> Self:
        """A run from settings by name; a ValidationError says which may not be so."""
        run = cls.__new__(cls)
        cls.__pydantic_validator__.validate_python(values, self_instance=run)
        return run

    @model_validator(mode="before")
    @classmethod
    def _fill_in_habits(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        _refuse_half_characters(cast("Mapping[str, Any]", values))
        given = as_lists(cast("Mapping[str, Any]", values), SETTINGS)
        return habits_of(str(given.get("framework"))) | given

    @field_validator("requests", mode="before")
    @classmethod
    def _read_requests(cls, value: Any) -> Any:
        """Rows as groups; a path as it is."""
        return lengths.groups_of_rows(value) if isinstance(value, list | tuple) else value  # pyright: ignore

    @field_validator("prefill", mode="before")
    @classmethod
    def _read_prefill(cls, value: Any) -> Any:
        return read_prefill(value)

    @field_validator("expert_load", mode="before")
    @classmethod
    def _read_load(cls, value: Any) -> Any:
        """The numbers of expert loads, a list for each layer or one for all; text: a path, or how
        many times the mean the busiest rank gets."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"{value:g}"
        if not isinstance(value, list | tuple):
            return value
        rows = cast("list[object]", [*value])
        lists = [cast("list[object]", row) for row in rows if isinstance(row, list | tuple)]
        if len(lists) not in (0, len(rows)) or not rows:
            raise UserError(f"expert_load: holds {shown(rows)}, wanted a list for each layer")
        return tuple(tuple(row) for row in lists or [rows])

    @classmethod
    def load(cls, path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Self:
        """A run from a YAML file, or an earlier run's manifest; overrides replace.

        Every error is a UserError that names the setting, and the file if it came from there.
        `stagewright.load_run` reads bundles, too.
        """
        return cls.of({} if path is None else read_settings(path), overrides, path)

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        path: str | Path | None = None,
    ) -> Self:
        """A run from settings by name or a manifest; `path` is where they stood, for errors.

        Settings of the machine and of the execution are passed over.
        """
        run, _, pending = cls.read(values, overrides, path)
        return run.completed(pending)

    @classmethod
    def read(
        cls,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        path: str | Path | None = None,
    ) -> tuple[Self, dict[str, Any], Pending]:
        """A run, all settings that were given, and what options of other tools imply.

        `completed` adds the latter: from `--enable-expert-parallel` follow `ep` and `etp`.
        """
        try:
            if is_manifest(values):
                # Settings that follow from others, or from another framework, are computed anew.
                recorded = cls._validated(values["run"]).unresolved().model_dump()
                framework = recorded["framework"]
                if (overrides or {}).get("framework", framework) != framework:
                    implied = habits_of(framework).items()
                    recorded = {k: v for k, v in recorded.items() if (k, v) not in implied}
                values = {**values, "run": recorded}
            chosen, pending = settings_of(values, overrides, path)
            given = {k: v for k, v in chosen.items() if k not in _ELSEWHERE}
            return cls._validated(given), chosen, pending
        except ValidationError as error:
            raise invalid(error, cls.model_fields, path, overrides or {}) from None

    def completed(self, pending: Pending) -> Self:
        """The run with the settings that options of other tools derive from all of it."""
        update: dict[str, Any] = {}
        options = {**pending.options}
        if options.pop("enable_expert_parallel", False):
            update |= {"ep": self.tp * self.cp * self.dp, "etp": 1}
        copies = options.pop("num_distributed_optimizer_instances", 1)
        if copies < 1 or self.dp % copies:
            raise UserError(
                f"--num-distributed-optimizer-instances {copies} does not divide dp={self.dp}; "
                "give more GPUs (--gpus), or another number"
            )
        update |= {"dp_shard": self.dp // copies} if copies > 1 else {}
        update |= self._stages(options)
        for name, value in update.items():
            if name in self.model_fields_set and getattr(self, name) != value:
                by = " and ".join(
                    OTHERS[option].flag
                    for option in pending.options
                    if name in OTHERS[option].makes
                )
                raise UserError(
                    f"{SETTINGS[name].flag} {text_of(getattr(self, name))} contradicts {by}, which "
                    f"makes it {text_of(value)}; drop either"
                )
        return self.model_copy(update=update) if update else self

    def _stages(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """vpp and layers per stage, as options of other tools give them."""
        if not options:
            return {}
        depth = resolve(self.model, self.as_family or "").with_overrides(self.layers).depth
        layout = options.get("pipeline_model_parallel_layout")
        if layout is not None:
            vpp, split = layout_split(layout, self.pp)
            return {"vpp": vpp, "layers_per_stage": split}
        count = options.get("num_layers_per_virtual_pipeline_stage")
        if count is not None:
            return {"vpp": self._virtual_stages(count, depth)}
        count = options.get("parallelism_pipeline_parallel_layers_per_stage")
        if count is not None:
            return {"vpp": self._virtual_stages(count, depth, rounded_up=True)}
        ends = [options.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
        return {"layers_per_stage": split_with_ends(depth, self.pp, self.vpp, *ends)}

    def _virtual_stages(self, layers: int, depth: int, *, rounded_up: bool = False) -> int:
        """Virtual stages of each rank where each has so many layers, or at most so many.

        The embedding and the output count for layers as they do where layers are split.
        """
        depth += self.first_stage_less_layers + self.last_stage_less_layers
        stages = -(-depth // max(layers, 1)) if rounded_up else depth // max(layers, 1)
        if layers < 1 or stages % self.pp or (depth % layers and not rounded_up):
            name = "num-layers-per-virtual-pipeline-stage"
            if rounded_up:
                name = "parallelism.pipeline_parallel_layers_per_stage"
            raise UserError(
                f"--{name} {layers} x pp={self.pp} does not divide "
                f"the {depth} layers of {self.model}; use another, or --vpp and --layers-per-stage"
            )
        return stages // self.pp

    def section(self, section: type[_Section]) -> _Section:
        """The settings of one section, such as `sections.batch.BatchSection`."""
        names = [of.name for of in fields(section)]  # pyright: ignore[reportArgumentType]
        return section(**{name: getattr(self, name) for name in names})

    def resolved(self, model: ModelConfig) -> Self:
        """The same run with every `None` that has a default replaced by it."""
        defaults = self._defaults(model.with_overrides(self.layers).depth)
        longest = min(model.max_position_embeddings, 8192)
        if self.mode == "train":
            defaults["seq_length"] = longest
            if self.pipeline_split == "compute":
                whole = model.with_overrides(self.layers, self.vocab)
                defaults["layers_per_stage"] = compute_split(whole, self.virtual_stages)
            if model.encoder_num_layers:
                defaults["decoder_seq_length"] = self.seq_length or longest
        else:
            defaults |= requests.defaults(self, model, longest)
            if model.quantization and model.quantization.kv_cache and self.precision == "bf16":
                defaults["kv_cache_dtype"] = model.quantization.kv_cache
        absent = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if self.etp is None and self.expert_tensor_parallel_size != self.tp:
            absent["etp"] = self.expert_tensor_parallel_size
        if isinstance(self.requests, str):
            absent["requests"] = lengths.read(self.requests)
        if self.prefill is not None:
            absent["prefill"] = self.prefill_ranks
        return self.model_copy(update=absent)

    def unresolved(self, model: ModelConfig | None = None) -> Self:
        """Replace settings that have their default value by `None`: the reverse of `resolved`.

        A resolved run with another pp contradicts itself; an unresolved one does not. Of lengths
        the default follows from the model, if that is given.
        """
        defaults = self._defaults(sum(self.layers_per_stage or ()))
        if self.pipeline_split == "compute":
            defaults["layers_per_stage"] = self.layers_per_stage
        same = [name for name, value in defaults.items() if getattr(self, name) == value]
        run = self.model_copy(update=dict.fromkeys(same))
        if model is None:
            return run
        for setting in SETTINGS.values():
            value = getattr(run, setting.name)
            if value is not None and setting.default is None and setting.unset:
                without = run.model_copy(update={setting.name: None})
                run = without if getattr(without.resolved(model), setting.name) == value else run
        return run

    def _defaults(self, layers: int) -> dict[str, Any]:
        # More stages than layers, or than any model has, are refused by `rules.check`.
        less = (0, 0)
        if self.mode == "train":
            less = self.first_stage_less_layers, self.last_stage_less_layers
        even = None
        if self.virtual_stages <= min(layers + sum(less), LIMITS["num_layers"]):
            even = even_split(layers, self.virtual_stages, *less)
            even = None if min(even) < 0 else even
        split: dict[str, Any] = {"layers_per_stage": even}
        if self.mode != "train":
            split["kv_cache_dtype"] = "fp32" if self.precision == "fp32" else "bf16"
            split["dcp"] = self.cp
            return split if self.requests else split | {"batch_size": self.dp * self.pp}
        return split | {
            "dp_shard": self.dp if self.zero else None,
            "global_batch_size": self.micro_batch_size * self.dp * self._fewest_microbatches,
            "schedule": "interleaved" if self.vpp > 1 else "1f1b",
        }

    @property
    def world_size(self) -> int:
        """Number of ranks, with those of `prefill`.

        ep is no factor: its ranks are those of tp, cp and dp.
        """
        prefill = self.prefill_ranks
        ranks = self.tp * self.cp * self.dp * self.pp
        return ranks + (prefill.world_size if prefill else 0)

    @property
    def prefill_ranks(self) -> PrefillRanks | None:
        """The setting `prefill`, read."""
        return ranks_of_text(self.prefill) if isinstance(self.prefill, str) else self.prefill

    @property
    def microbatches(self) -> int:
        """Microbatches that pass through a pipeline per step."""
        if self.mode != "train":
            return requests.microbatches(self)
        if self.global_batch_size is None:
            return self._fewest_microbatches
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def _fewest_microbatches(self) -> int:
        group = self.microbatch_group_size_per_vp_stage
        return schedules.fewest(self.schedule or "1f1b", self.pp, group)

    @property
    def microbatch_group(self) -> int | None:
        """Microbatches that pass through the chunks of a rank together; None: the schedule says."""
        return self.group_of(self.microbatches)

    def group_of(self, microbatches: int) -> int | None:
        """`microbatch_group` with so many microbatches.

        torch's ScheduleInterleaved1F1B makes `microbatches // pp` equal rounds.
        """
        given = self.microbatch_group_size_per_vp_stage
        schedule = self.schedule or ("interleaved" if self.vpp > 1 else "1f1b")
        if given or schedule != "interleaved" or self.framework != "torchtitan":
            return given
        equal = equal_group(self.pp, microbatches)
        return None if microbatches % equal else equal

    @property
    def sequence_parallel_ranks(self) -> int:
        """Ranks that split norms and dropout along the sequence: tp, or 1."""
        return self.tp if self.sequence_parallel else 1

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Ranks that split each expert: etp, or what it is where none is given.

        That is tp, as in Megatron-LM, but 1 for inference with ep, as in vLLM, which gives whole
        experts to the ranks of tp (`FusedMoEParallelConfig.make`).
        """
        if self.etp is not None:
            return self.etp
        return 1 if self.mode != "train" and self.ep > 1 else self.tp

    @property
    def virtual_stages(self) -> int:
        """Pipeline stages, counting each chunk of a rank."""
        return self.pp * self.vpp

    def given(self) -> dict[str, Any]:
        """Settings that differ from their defaults in the habits of the run's framework, by name.

        The degrees come first, then the others by name.
        """
        run = self.unresolved()
        values = {
            name: getattr(run, name) for name in (*DEGREES, *sorted(SETTINGS.keys() - {*DEGREES}))
        }
        return {
            name: value
            for name, value in values.items()
            if value != SETTINGS[name].default_of(self.framework)
        }

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """The model, the degrees above 1 and every other setting that is not its default.

        >>> Run(model="gpt2", dp=2, sequence_parallel=True, layers_per_stage=(3, 4)).describe()
        'gpt2 dp=2 layers_per_stage=3,4 sequence_parallel'
        """
        words = [self.model]
        for name, value in self.given().items():
            if name == "requests" and not isinstance(value, str):
                words.append(f"requests={lengths.describe(value)}")
            elif name == "expert_load" and not isinstance(value, str):
                words.append("expert_load=...")
            else:
                words.append(setting_in_words(name, value))
        return printable(" ".join(words))


def usual_batch(run: Run, model: ModelConfig, gpus: Iterable[int]) -> int:
    """Usual global batch size in sequences: about `STEP_TOKENS` tokens, more on many GPUs.

    A search that is given none assumes it. A run by itself has the fewest microbatches that its
    schedule takes, since its traces grow with them; `simulate` says both.

    A power of two times the odd factor of every number of GPUs, since dp divides both. If that is
    more than four times as much, only the odd factor of the largest number counts.

    >>> from stagewright.model.catalog import resolve
    >>> run, model = Run(model="llama3.1-405b"), resolve("llama3.1-405b")
    >>> [usual_batch(run, model, [gpus]) for gpus in (64, 16384, 192, 7)]
    [512, 2048, 768, 896]
    """
    counts = sorted({*gpus})
    length = run.resolved(model).seq_length or 1
    target = max(STEP_TOKENS, TOKENS_PER_GPU * counts[-1]) / length
    odd = [count // (count & -count) for count in counts]
    common = math.lcm(*odd)
    batch = common if common <= 4 * target else odd[-1]
    while batch < target:
        batch *= 2
    return batch


def habits_of(framework: str) -> dict[str, Any]:
    """Defaults of a framework that are not those of `Run`, Megatron-LM's; each setting has its own.

    docs/internals/frameworks.md shows them, with sources.

    >>> run = Run(model="llama3-8b", framework="torchtitan", recompute_early_stop=False)
    >>> run.operators, run.recompute_early_stop
    ('eager', False)
    """
    return {of.name: of.habits[framework] for of in SETTINGS.values() if framework in of.habits}


def _refuse_half_characters(values: Mapping[str, Any]) -> None:
    """Raise a UserError for a path of other bytes than UTF-8: manifests and traces repeat it."""
    for name, value in values.items():
        try:
            refuse_half_characters("\\", value)
        except ValueError as error:
            raise UserError(f"{name!a}: {error}, or rename the file") from None
