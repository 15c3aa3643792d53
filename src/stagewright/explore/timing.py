"""What a structure's templates say of it on one machine: responses, memory, messages."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from stagewright.arrays import Float, Int, digest, is_any
from stagewright.explore.actions import REDUCES, STORES
from stagewright.explore.class_rows import ClassRows
from stagewright.explore.memory import Peaks
from stagewright.explore.responses import RankActions, Responses, responses
from stagewright.explore.shared.plans import PipelineShape
from stagewright.explore.shared.played import Played
from stagewright.explore.structures import Structure
from stagewright.explore.template_memory import TemplateRank, template_ranks
from stagewright.explore.templates import Kind, StructureTemplate, TemplatePrograms
from stagewright.explore.timed_memory.peaks import LatePeaks
from stagewright.lower.assembly.assemble import Assembly
from stagewright.program.columns import TaskKind
from stagewright.run.requests import allowance_of
from stagewright.run.sections.execution import ISSUED_BY, LAUNCHED_BY, Execution
from stagewright.run.settings import Run
from stagewright.time.columns.chunks import in_chunks
from stagewright.time.columns.durations import Columns
from stagewright.time.columns.meshes import MeshColumns
from stagewright.time.columns.neighbours import NeighbourMessages
from stagewright.time.columns.row_kinds import Known, RowKinds
from stagewright.time.experts.dispatch import Routed
from stagewright.time.hardware import Hardware
from stagewright.time.network import Machine
from stagewright.time.simulate.issue import Transfers
from stagewright.time.simulate.launches import ASYNCHRONOUS, HostWork, host_work


class TemplateFigures(NamedTuple):
    """What pipelines are put together from, for all tuples of a structure."""

    responses: Responses
    peaks: Peaks
    message: Float
    """Bytes of a message between neighbouring stages: [tuples]."""
    stride: Int
    """Distance between the ranks of two neighbouring stages: [tuples]."""
    beyond: Int
    """Ranks of a stage along axes slower than the pipeline's: [tuples]."""
    certain: Peaks | None = None
    """What is held at least, however long transfers take (`Templates.certain`)."""

    @classmethod
    def concatenated(cls, parts: list[TemplateFigures]) -> TemplateFigures:
        """Those of several structures of one form: their tuples behind each other."""
        certain = [of.certain for of in parts if of.certain is not None]
        return TemplateFigures(
            Responses.concatenated([of.responses for of in parts]),
            Peaks.concatenated([of.peaks for of in parts]),
            np.concatenate([of.message for of in parts]),
            np.concatenate([of.stride for of in parts]),
            np.concatenate([of.beyond for of in parts]),
            Peaks.concatenated(certain) if certain else None,
        )


class JoinedFigures:
    """The figures of several structures' templates of one form behind each other, and who has their
    tuples, by pipeline."""

    def __init__(self) -> None:
        """Of no structure yet."""
        self._parts: list[TemplateFigures] = []
        self._begin: dict[int, int] = {}
        """By id of the figures, the number of the first of their tuples."""
        self._count = 0
        self._users: dict[PipelineShape, list[tuple[Int, ...]]] = {}

    def add(self, of: TemplateFigures, shape: PipelineShape, tuples: Int, *columns: Int) -> None:
        """Some users of `of`: which of its tuples each has, and columns of numbers of theirs."""
        if id(of) not in self._begin:
            self._begin[id(of)] = self._count
            self._parts.append(of)
            self._count += len(of.stride)
        self._users.setdefault(shape, []).append((tuples + self._begin[id(of)], *columns))

    def join(self) -> TemplateFigures:
        """All figures, once all users are known: the parts are dropped, which take much memory."""
        found = TemplateFigures.concatenated(self._parts)
        self._parts.clear()
        return found

    def users(self) -> Iterator[tuple[PipelineShape, tuple[Int, ...]]]:
        """Each pipeline, the tuples of its users among all that are joined, and their columns."""
        for shape, some in self._users.items():
            yield shape, tuple(map(np.concatenate, zip(*some, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class KnownOnMachine:
    """What structures have in common on one machine."""

    durations: Known
    played: Played

    @classmethod
    def of(cls, durations: Known) -> Self:
        """What is known of durations; no action was played yet."""
        return cls(durations, Played.none())

    @staticmethod
    def key(machine: Machine) -> Hashable:
        """What machines must have in common for this to be known of all."""
        return machine.gpus, machine.network, repr(machine.hardware)


class Templates:
    """The templates of a structure, and what holds for them on every machine."""

    def __init__(self, of: Structure) -> None:
        """No template is made before it is asked for."""
        self.of = of
        self._programs = TemplatePrograms(of.step, of.variants)
        self._known: dict[Kind, tuple[StructureTemplate, Peaks]] = {}
        self.holding: dict[Kind, list[list[TemplateRank]]] = {}
        """What ranks hold in each program of a template that was made."""
        self._durations: dict[KnownOnMachine, Known] = {}
        self.row_kinds: dict[Hashable, list[RowKinds]] = {}
        """By program and machine, what the rows of each rank class take where products and
        collectives do not overlap in chunks."""
        self.timed_rows: dict[Hashable, list[tuple[RowKinds, Int]]] = {}
        """By program, machine and way to execute, what they take, and what a GPU draws in them."""
        self._transfers: dict[int, list[Transfers]] = {}
        """By program, what is known of each rank class in any execution."""
        self._ranks: dict[Hashable, list[RankActions]] = {}
        self._messages: dict[int, Float] = {}
        self._hosts: dict[Hashable, tuple[Hardware, list[HostWork] | None]] = {}
        """Each with its hardware: while that is held, no other has the id in the key."""

    def template(self, of: Kind, run: Run) -> tuple[StructureTemplate, Peaks]:
        """The template of one kind of pipeline, and its memory."""
        if of not in self._known:
            made = self._programs.template(of)
            self.holding[of], cases = template_ranks(made, len(self.of))
            self._known[of] = made, Peaks.of(made, self.holding[of], cases, allowance_of(run))
        return self._known[of]

    def certain(self, of: Kind, run: Run) -> Peaks:
        """The memory of a template that was made, as `Live` has it where it is `certain`."""
        made, peaks = self._known[of]
        ranks = [[each.certain() for each in ranks] for ranks in self.holding[of]]
        return Peaks.of(made, ranks, peaks.cases, allowance_of(run))

    def ranks(self, of: Kind, how: Execution) -> list[list[RankActions]]:
        """The actions of each program of a template that was made, by class, as they are issued."""
        how = how.only(*ISSUED_BY)
        made, _ = self._known[of]
        kinds = made.kinds
        for each, layers in zip(made.assemblies, made.stage_layers, strict=True):
            if (id(each), how) not in self._ranks:
                if id(each) not in self._transfers:
                    own = each.program
                    self._transfers[id(each)] = [Transfers(own, of.tasks) for of in own.classes]
                known = enumerate(self._transfers[id(each)])
                self._ranks[id(each), how] = [
                    RankActions.of(kinds, layers, each, n, transfers, how) for n, transfers in known
                ]
        return [self._ranks[id(each), how] for each in made.assemblies]

    def hosts(
        self, of: Kind, run: Run, how: Execution, hardware: Hardware
    ) -> list[list[HostWork] | None]:
        """What the hosts do in each program of a template that was made; they wait for messages or
        not as the schedule of the run has it."""
        how = how.only(*LAUNCHED_BY)
        made, _ = self._known[of]
        found: list[list[HostWork] | None] = []
        for each in made.assemblies:
            key = id(each), run.vpp > 1, run.schedule in ASYNCHRONOUS, how, id(hardware)
            if key not in self._hosts:
                small = made.run.model_copy(update={"vpp": run.vpp, "schedule": run.schedule})
                self._hosts[key] = hardware, host_work(each.program, small, how, hardware)
            found.append(self._hosts[key][1])
        return found

    def message(self, assembly: Assembly) -> Float:
        """Bytes of a message between neighbouring stages in a program: [tuples]."""
        if id(assembly) not in self._messages:
            self._messages[id(assembly)] = self._message(assembly)
        return self._messages[id(assembly)]

    def _message(self, assembly: Assembly) -> Float:
        sizes = np.zeros(len(self.of))
        pipeline = [n for n, p in enumerate(assembly.program.peers) if p.axis == "pp"]
        for rank in assembly.ranks:
            tasks = rank.of.tasks
            sends = (tasks.kind == TaskKind.SEND) & np.isin(tasks.slot, pipeline)
            kernels: list[int] = np.unique(rank.kernel[sends]).tolist()
            for kernel in kernels:
                size = np.asarray(assembly.kernels[kernel].comm_bytes, dtype=np.float64)
                sizes = np.maximum(sizes, size)
        return sizes

    @cached_property
    def distances(self) -> tuple[Int, Int]:
        """The distance between the ranks of two neighbouring stages, and the ranks of a stage along
        axes slower than the pipeline's: [tuples] each."""
        stride = self.of.stride
        return stride, self.of.ranks_of_stage // stride

    def durations(self, on: KnownOnMachine) -> Known:
        """What is known of the structure's durations on a machine."""
        return self._durations.setdefault(on, on.durations.of_structure())


class MachineTiming:
    """A structure's templates on one machine."""

    def __init__(
        self,
        templates: Templates,
        machine: Machine,
        how: Execution,
        on: KnownOnMachine,
        routed: Routed | None = None,
        *,
        usual: bool = False,
    ) -> None:
        """`on`: what other structures, and other ways to execute, have found on the machine;
        `routed`: how a flexible dispatcher sends tokens.

        `usual`: responses are those of actions that do nothing that happens once per step, there
        is no energy, and memory is known at least (`TemplateFigures.certain`), too.
        """
        self.templates, self.machine, self.how, self.on = templates, machine, how, on
        self.routed, self.usual = routed, usual
        self.of = templates.of
        self.durations = templates.durations(on)
        self._known: dict[tuple[Kind, bool, bool], TemplateFigures] = {}
        self._figures: dict[tuple[object, ...], TemplateFigures] = {}
        self._late: dict[int, LatePeaks] = {}

    def late(self, of: TemplateFigures) -> LatePeaks | None:
        """The memory that goes with figures, if some transfers free it behind later kernels."""
        return self._late.get(id(of))

    def figures(self, of: Kind, run: Run) -> TemplateFigures:
        """Those of a resolved run's pipeline, and of all of its kind."""
        alike = of, run.vpp > 1, run.schedule in ASYNCHRONOUS
        if alike not in self._known:
            self._known[alike] = self._of_kind(of, run)
        return self._known[alike]

    def _of_kind(self, of: Kind, run: Run) -> TemplateFigures:
        made, peaks = self.templates.template(of, run)
        hosts = self.templates.hosts(of, run, self.how, self.machine.hardware)
        key = of, *map(_content, hosts)
        if key not in self._figures:
            ranks = self.templates.ranks(of, self.how)
            timed = [
                [
                    ClassRows.of(rank.places, kinds, drawn, None if work is None else work[nth])
                    for nth, (rank, (kinds, drawn)) in enumerate(zip(mine, took, strict=True))
                ]
                for mine, took, work in zip(ranks, self._rows(made), hosts, strict=True)
            ]
            found = responses(made, ranks, timed, self.on.played, usual=self.usual)
            stride, beyond = self.templates.distances
            message = self.templates.message(made.base)
            certain = self.templates.certain(of, run) if self.usual else None
            self._figures[key] = TemplateFigures(found, peaks, message, stride, beyond, certain)
            if not self.usual and _late(of, ranks[0]):
                sent = NeighbourMessages(message, stride, beyond, self._pp, self.machine)
                late = LatePeaks(
                    made, self.templates.holding[of], ranks, timed, peaks, sent.seconds(0, 1)
                )
                self._late[id(self._figures[key])] = late
        return self._figures[key]

    @property
    def _pp(self) -> Int:
        """The ranks of pipelines, all of which have as many ranks as the machine: [tuples]."""
        return np.maximum(self.machine.gpus // self.of.ranks_of_stage, 1)

    def _rows(self, of: StructureTemplate) -> list[list[tuple[RowKinds, Int]]]:
        """What the rows of each program of a template take, by class, and what a GPU draws in those
        of each kind (`Columns.energy`)."""
        known = self.templates.timed_rows
        found: list[list[tuple[RowKinds, Int]]] = []
        for each in of.assemblies:
            key = id(each), self.on, self.how.tp_comm_overlap, self.routed, self.usual
            if key not in known:
                known[key] = self._timed(each)
            found.append(known[key])
        return found

    def _timed(self, assembly: Assembly) -> list[tuple[RowKinds, Int]]:
        columns = Columns(
            assembly.kernels, len(self.of), self.machine.hardware, self.durations, self.routed
        )
        meshes = MeshColumns(
            assembly.program,
            self.of.mesh,
            self._pp,
            self.machine,
            self.durations.groups,
            self.of.orders,
        )
        key = id(assembly), self.on, self.routed
        if key not in self.templates.row_kinds:
            self.templates.row_kinds[key] = [
                columns.of_rows(rank.of.tasks, rank.kernel, meshes) for rank in assembly.ranks
            ]
        found: list[tuple[RowKinds, Int]] = []
        for rank, rows in zip(assembly.ranks, self.templates.row_kinds[key], strict=True):
            if self.how.tp_comm_overlap:
                rows = in_chunks(columns, rank.of.tasks, rows, meshes)
            drawn = np.full_like(rows.number, columns.none) if self.usual else columns.energy(rows)
            found.append((rows, drawn))
        return found


def _late(of: Kind, ranks: Sequence[RankActions]) -> bool:
    """Whether the memory of a template is counted over time: reductions free some of it, or stores
    do and there are more kinds of actions than in 1F1B. Other candidates with stores are left to
    the order of issue: they are too many to play each."""
    counted = (REDUCES,) if of.schedule == "1f1b" else (REDUCES, STORES)
    return any(is_any(rank.places.frees, counted).any() for rank in ranks)


def _content(hosts: list[HostWork] | None) -> bytes | None:
    """What is equal for equal work of hosts."""
    if hosts is None:
        return None
    return digest(*(part for each in hosts for part in (each.seconds, each.waits)))
