"""Simulated steps in the JSON of PyTorch's profiler."""

import gzip
import json
import math
from collections import defaultdict

import numpy as np
import pytest

import stagewright as sw
from stagewright.program.columns import COLLECTIVES, TaskKind
from stagewright.run.sections.cluster import ClusterSection
from stagewright.time.collectives import collective_seconds
from stagewright.time.network import placements
from stagewright.views import kineto

RUNS = {
    "tp": {"model": "llama3-8b", "layers": 2, "seq_length": 512, "tp": 2,
           "sequence_parallel": True},
    "pp": {"model": "llama3-8b", "layers": 4, "seq_length": 512, "pp": 2, "dp": 2},
    "experts": {"model": "mixtral-8x7b", "layers": 2, "seq_length": 256, "ep": 2, "dp": 2},
    "decode": {"model": "llama3-8b", "layers": 2, "mode": "decode", "batch_size": 4,
               "context_length": 256, "tp": 2},
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def step(request):
    """A simulated step of each kind."""
    return sw.simulate(hardware="h100-sxm", what=sw.Run(**RUNS[request.param]))


def events_of(step, lane, rank=None):
    """Trace of a rank: its head, and events with a duration by category."""
    rank = int(lane.ranks[0]) if rank is None else rank
    head = json.loads(kineto.trace(step.timeline, lane, step.machine.hardware, rank))
    events = defaultdict(list)
    for event in head.pop("traceEvents"):
        if event["ph"] == "X":
            events[event["cat"]].append(event)
    return head, events


def test_kernels_take_what_the_step_takes(step):
    for lane, parts in zip(step.timeline.lanes, step.parts, strict=True):
        _, events = events_of(step, lane)
        names = {i + 1 for i in np.flatnonzero(lane.is_kernel)}
        of_compute = [e for e in events["kernel"] if e["args"]["External id"] in names]
        total = sum(e["dur"] for e in of_compute)
        assert total == pytest.approx(sum(parts.kernels.values()) * 1e6, rel=1e-4)
        last = max(e["ts"] + e["dur"] for e in events["kernel"])
        assert last <= step.seconds * 1e6 + 0.01
        (annotation,) = events["user_annotation"]
        assert annotation["dur"] == pytest.approx(step.seconds * 1e6)


def test_kernels_of_a_stream_follow_each_other(step):
    for lane in step.timeline.lanes:
        _, events = events_of(step, lane)
        end = defaultdict(float)
        for event in sorted(events["kernel"], key=lambda e: (e["ts"], e["dur"])):
            assert event["ts"] >= end[event["tid"]] - 0.002, event
            end[event["tid"]] = event["ts"] + event["dur"]


def test_each_kernel_has_its_launch_and_operator(step):
    lane = step.timeline.lanes[0]
    _, events = events_of(step, lane)
    operators = {e["args"]["External id"]: e for e in events["cpu_op"]}
    calls = {e["args"]["correlation"]: e for e in events["cuda_runtime"]}
    assert events["kernel"]
    for kernel in events["kernel"]:
        call = calls[kernel["args"]["correlation"]]
        operator = operators[kernel["args"]["External id"]]
        assert kernel["ts"] >= call["ts"] + call["dur"] - 0.002
        assert operator["ts"] <= call["ts"] + 0.002
        assert call["ts"] + call["dur"] <= operator["ts"] + operator["dur"] + 0.002


def test_products_have_the_flops_of_the_program(step):
    """Query, key and value are one product, which has the FLOPs of the three."""
    lane = step.timeline.lanes[0]
    _, events = events_of(step, lane)
    launched = {e["args"]["External id"] for e in events["kernel"]}
    flops = 0
    for operator in events["cpu_op"]:
        if operator["name"] in ("aten::mm", "aten::bmm"):
            assert operator["args"]["External id"] in launched  # parts of others have none
            (*stack, m, k), (*_, n) = operator["args"]["Input Dims"]
            flops += 2 * math.prod(stack) * m * n * k
    tasks = lane.rank_class.tasks
    extents = [{**shape.sizes(), "": shape.kernel == "gemm"} for shape in tasks.shapes]
    of_shape = [2 * math.prod(e[x] for x in ("batch", "m", "n", "k")) if e[""] else 0
                for e in extents]  # fmt: skip
    assert flops == int(np.array([*of_shape, 0])[tasks.shape].sum())


def test_collectives_say_what_they_send(step):
    program, lane = step.timeline.program, step.timeline.lanes[0]
    head, events = events_of(step, lane)
    config = {of["pg_name"]: of["ranks"] for of in head["distributedInfo"]["pg_config"]}
    assert head["distributedInfo"]["world_size"] == program.mesh.world_size
    back = {name: kind for kind, (name, _) in kineto.COLLECTIVE_NAMES.items()}
    item = {"BFloat16": 2, "Float": 4, "Byte": 1, "Long": 8, "Int": 4}
    sent = defaultdict(int)
    for kernel in events["kernel"]:
        args = kernel["args"]
        if args.get("Collective name") not in back:
            continue
        kind, size = back[args["Collective name"]], args["In msg nelems"] * item[args["dtype"]]
        ranks = json.loads(args["Process Group Ranks"])
        assert config[args["Process Group Name"]] == ranks
        assert len(ranks) == args["Group size"] > 1
        sent[kind] += size
        (group,) = placements(step.machine, np.array([ranks]))
        if step.compiled.run.mode == "train" and len(step.timeline.lanes) == 1:  # nobody waits
            seconds = collective_seconds(kind, size, group, step.machine)
            assert kernel["dur"] == pytest.approx(seconds * 1e6, rel=1e-3, abs=0.01)
    tasks = lane.rank_class.tasks
    wanted = defaultdict(int)
    for row in np.flatnonzero(tasks.kind == TaskKind.COLLECTIVE):
        wanted[COLLECTIVES[tasks.collective[row]]] += int(tasks.comm_bytes[row])
    assert sent == wanted


def test_streams_wait_for_what_tasks_wait_for(step):
    _, events = events_of(step, step.timeline.lanes[0])
    recorded = {e["args"]["correlation"]: e for e in events["cuda_runtime"]}
    for sync in events["cuda_sync"]:
        if sync["name"] == "Stream Wait Event":
            record = recorded[sync["args"]["wait_on_cuda_event_record_corr_id"]]
            assert record["name"] == "cudaEventRecord"
            assert record["ts"] <= sync["ts"] + 0.002
            assert sync["args"]["wait_on_stream"] != sync["args"]["stream"]


def test_generate_writes_one_rank_of_each_timing(tmp_path):
    compiled = sw.compile(sw.Run(**RUNS["pp"]))
    cluster = ClusterSection(hardware="h100-sxm")
    manifest = sw.generate(compiled, str(tmp_path / "a"), format="kineto", cluster=cluster)
    names = [kineto.FILE.format(rank=rank) for rank in (0, 2)]
    assert sorted(manifest["files"]) == ["comm_group.json", *names]
    sw.generate(compiled, str(tmp_path / "b"), format="kineto", cluster=cluster, ranks=[1, 2])
    ours, again = (tmp_path / of / names[1] for of in "ab")
    assert ours.read_bytes() == again.read_bytes()
    packed = (tmp_path / "b" / kineto.FILE.format(rank=1)).read_bytes()
    other = json.loads(gzip.decompress(packed))
    assert other["distributedInfo"]["rank"] == 1
    with pytest.raises(sw.UserError, match="hardware"):
        sw.generate(compiled, str(tmp_path / "c"), format="kineto")
