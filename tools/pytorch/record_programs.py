"""Record what a PyTorch program does on one rank: `record_programs.py SPEC...`.

Needs `pip install stagewright[torch]` (PyTorch 2.13; no GPU). One process plays one rank of any
number under the fake process group, with fake tensors: nothing is computed, every operator and
every collective is dispatched. A case is written to `cases/NAME.json`, in the form that
`compare.py` reads. A specification is JSON:

    python tools/pytorch/record_programs.py '{"name": "40_tiny_fsdp4", "mesh": [["dp", 4]],
        "rank": 1, "model": "tiny", "layers": 2, "batch": 2, "seq": 128, "mp": ["bf16", "fp32"]}'

`mesh` is outermost first: pp, dp_rep, dp (FSDP2, or DDP with "ddp": true), efsdp (data parallelism
of experts), ep, cp, tp. `model` is a name of `MODELS` or its sizes; options are those of
`DEFAULTS`. Two steps are run before the one that is recorded, so that optimizer states exist and
DDP has rebuilt its buckets. `random_programs.py` records many.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

CASES = Path(__file__).parents[2] / "tests" / "conformance" / "cases"
aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODELS = {
    "8b": {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336,
           "vocab": 128256},
    "tiny": {"hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 704, "vocab": 1024},
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "params": "fp32", "mp": None, "reshard": True, "ddp": False, "sp": False,
    "loss_parallel": False, "shared_input": True, "ac": False, "clip": False, "accum": 1,
    "tied": False, "attn": "sdpa", "optimizer": "adamw", "cp_rotate": None, "moe": False,
    "schedule": None, "n_mb": 1, "vpp": 1, "style": "loop",
}  # fmt: skip
"""Parameters' dtype; FSDP2's (param_dtype, reduce_dtype); reshard_after_forward; sequence parallel;
PrepareModuleInput; checkpoint each block; clip_grad_norm_; microbatches of gradient accumulation;
tied tables; kernel of attention (`Core`); rotation of context parallelism (allgather, alltoall);
experts; a schedule of torch.distributed.pipelining, its microbatches, stages of a rank, and their
order (loop or v)."""


# ---- the model: a Llama whose operators are all visible ------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return unit.type_as(x) * self.weight


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1).type_as(x)


class Core(nn.Module):
    """The product of attention: `_ContextParallel` takes modules, and flash kernels by name."""

    def __init__(self, copies: int, kind: str) -> None:
        super().__init__()
        self.copies, self.kind = copies, kind

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.copies > 1 and self.kind != "flash_gqa":
            k, v = (t.repeat_interleave(self.copies, dim=1) for t in (k, v))
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


class Attention(nn.Module):
    def __init__(self, m: dict[str, int], attn: str) -> None:
        super().__init__()
        self.width, self.copies = m["head_dim"], m["heads"] // m["kv_heads"]
        heads = {"wq": m["heads"], "wk": m["kv_heads"], "wv": m["kv_heads"]}
        for name, count in heads.items():
            setattr(self, name, nn.Linear(m["hidden"], count * m["head_dim"], bias=False))
        self.wo = nn.Linear(m["heads"] * m["head_dim"], m["hidden"], bias=False)
        self.core = Core(self.copies, attn)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.width) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = self.core(q, k, v)
        return self.wo(o.transpose(1, 2).contiguous().view(b, s, -1))


class MLP(nn.Module):
    def __init__(self, m: dict[str, int]) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(m["hidden"], m["ffn"], bias=False) for _ in range(2))
        self.w2 = nn.Linear(m["ffn"], m["hidden"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    def __init__(self, count: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(count, hidden, ffn)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(count, ffn, hidden))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.silu(torch.bmm(z, self.w1)) * torch.bmm(z, self.w3), self.w2)


class MoE(nn.Module):
    """Experts over `ep` ranks. Loads depend on data, which fake tensors lack: they are balanced."""

    def __init__(self, m: dict[str, int], group: Any, ep: int) -> None:
        super().__init__()
        self.topk, self.ep, self.group, self.count = m["topk"], ep, group, m["experts"] // ep
        self.router = nn.Linear(m["hidden"], m["experts"], bias=False)
        self.experts = Experts(self.count, m["hidden"], m["ffn"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = x.flatten(0, 1)
        width, ep = t.shape[1], self.ep
        weights, chosen = torch.topk(torch.softmax(self.router(t).float(), -1), self.topk, dim=-1)
        order = torch.argsort(chosen.flatten())
        token = order // self.topk
        z = t.index_select(0, token)
        rows = z.shape[0]
        split = [rows // ep] * ep
        if ep > 1:
            counts = torch.zeros(self.count * ep, dtype=torch.int64)
            all_to_all_single(counts, None, None, self.group)
            z = all_to_all_single_autograd(z, split, split, self.group)
            z = z.view(ep, self.count, -1, width).transpose(0, 1)
        z = self.experts(z.reshape(self.count, -1, width))
        if ep > 1:
            z = z.view(self.count, ep, -1, width).transpose(0, 1).reshape(rows, width)
            z = all_to_all_single_autograd(z, split, split, self.group)
        z = z.reshape(rows, width) * weights.flatten().index_select(0, order)[:, None].type_as(z)
        where = token[:, None].expand(-1, width)
        return torch.zeros_like(t).scatter_add(0, where, z).view(x.shape)


class Block(nn.Module):
    def __init__(self, m: dict[str, int], attn: str, experts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(m["hidden"]), Attention(m, attn)
        self.mlp_norm, self.mlp = RMSNorm(m["hidden"]), experts()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = x + self.attn(self.attn_norm(x), cos, sin)
        return h + self.mlp(self.mlp_norm(h))


class Llama(nn.Module):
    """The layers of a pipeline stage, with the embedding of the first and the head of the last."""

    def __init__(
        self, m: dict[str, int], seq: int, attn: str, experts: Callable[[], nn.Module],
        layers: range, *, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        first, last = 0 in layers, m["layers"] - 1 in layers
        self.tok = nn.Embedding(m["vocab"], m["hidden"]) if first else None
        self.layers = nn.ModuleDict({str(i): Block(m, attn, experts) for i in layers})
        self.norm = RMSNorm(m["hidden"]) if last else None
        self.out = nn.Linear(m["hidden"], m["vocab"], bias=False) if last else None
        if tied:
            self.out.weight = self.tok.weight
        waves = torch.arange(0, m["head_dim"], 2, dtype=torch.float32) / m["head_dim"]
        angle = torch.outer(torch.arange(seq, dtype=torch.float32), 5e5**-waves)
        self.register_buffer("cos", torch.cos(angle), persistent=False)
        self.register_buffer("sin", torch.sin(angle), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x if self.tok is None else self.tok(x)
        for block in self.layers.values():
            h = block(h, self.cos, self.sin)
        return h if self.out is None else self.out(self.norm(h))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


# ---- how it is distributed -----------------------------------------------------------------------


def tensor_parallel(model: Llama, tp: DeviceMesh, o: dict[str, Any]) -> None:
    between = Shard(1) if o["sp"] else Replicate()
    split = o["loss_parallel"]
    if model.tok is not None:
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        parallelize_module(model, tp, {"tok": rows})
    if model.out is not None:
        columns = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if split else Replicate(),
            use_local_output=not split,
        )
        norm = {"norm": SequenceParallel()} if o["sp"] else {}
        parallelize_module(model, tp, {"out": columns} | norm)
    for block in model.layers.values():
        columns = ("attn.wq", "attn.wk", "attn.wv", "mlp.w1", "mlp.w3")
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {n: RowwiseParallel(output_layouts=between) for n in ("attn.wo", "mlp.w2")}
        if o["sp"]:
            plan |= {"attn_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        if o["sp"] or o["shared_input"]:
            for name, more in (("attn", 2), ("mlp", 0)):
                plan[name] = PrepareModuleInput(
                    input_layouts=(between, *[None] * more),
                    desired_input_layouts=(Replicate(), *[None] * more),
                )
        parallelize_module(block, tp, plan)


def context_parallel(model: Llama, cp: DeviceMesh, o: dict[str, Any]) -> None:
    """The ring is a handler of DTensor for the flash kernel, which the model calls by name."""
    _attention._cp_options.enable_load_balance = True
    _attention.set_rotate_method(o["cp_rotate"])
    _attention._enable_cp_dtensor_dispatcher()
    kind = _attention._ContextParallel.AttentionType.SDPA
    for block in model.layers.values():
        style = _attention._ContextParallel(seq_dim=2, attention_type=kind)
        parallelize_module(block, cp, {"attn.core": style})


def sharded(
    model: Llama, mesh: DeviceMesh, of_experts: DeviceMesh | None, o: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"mesh": mesh}
    if o["mp"]:
        param, reduce = (DTYPES[d] for d in o["mp"])
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    blocks = list(model.layers.values())
    for block in blocks:
        placed = settings | {"reshard_after_forward": o["reshard"]}
        if of_experts is not None:  # as torchtitan: a block is one unit of two groups of parameters
            experts = set(block.mlp.experts.parameters())
            groups = (
                FSDPMeshInfo(mesh, shard_mesh_dim=0),
                FSDPMeshInfo(of_experts, shard_mesh_dim=0),
            )

            def place(p: nn.Parameter, experts: Any = experts, groups: Any = groups) -> Any:
                return ShardPlacementResult(placement=Shard(0), mesh_info=groups[p in experts])

            placed["shard_placement_fn"] = place
        fully_shard(block, **placed)
    fully_shard(model, **settings, reshard_after_forward=False)
    if of_experts is not None:  # torchtitan's `apply_fsdp_to_decoder`, which knows the next units
        for unit, following in itertools.pairwise([model, *blocks]):
            unit.set_modules_to_forward_prefetch([following])
        for unit, following in itertools.pairwise([model, *reversed(blocks)]):
            unit.set_modules_to_backward_prefetch([following])


def replicated(model: Llama, buckets: list[torch.Tensor]) -> nn.Module:
    """DDP, whose hook may not read the future of a fake collective, nor its buckets' indices."""
    wrapped = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses text as annotation
        buckets.append(active_fake_mode().from_tensor(bucket.buffer()))
        dist.all_reduce(bucket.buffer(), async_op=True)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, hook)
    reducer = wrapped.reducer

    class Outside:
        def __getattr__(self, name: str) -> Any:
            return getattr(reducer, name)

        def _rebuild_buckets(self) -> Any:
            with unset_fake_temporarily():
                return reducer._rebuild_buckets()

    wrapped.reducer = Outside()
    return wrapped


# ---- what is recorded ----------------------------------------------------------------------------

NOTHING = -1
KINDS: dict[
    str, tuple[str, int, int | None]
] = {  # operand that goes in, that comes out (None: the result)
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, None),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, None),
    "_c10d_functional.all_reduce": ("all_reduce", 0, None),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0, None),
    "c10d._allgather_base_": ("all_gather", 1, 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, 0),
    "c10d.allreduce_": ("all_reduce", 0, 0),
    "c10d.send": ("send", 0, NOTHING),
    "c10d.recv_": ("recv", NOTHING, 0),
}
FLOPS = dict(flop_registry) | {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)
    ),
}
PROPAGATING = [0]


def local(t: torch.Tensor) -> torch.Tensor:
    return t._local_tensor if isinstance(t, DTensor) else t


def size(t: torch.Tensor) -> int:
    return local(t).numel() * t.element_size()


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_iter(tree) if isinstance(t, torch.Tensor)]


def group_of(arguments: Any) -> dist.ProcessGroup | None:
    for a in arguments:
        if isinstance(a, str):
            with contextlib.suppress(RuntimeError):  # the name of a reduction
                return torch._C._distributed_c10d._resolve_process_group(a)
        if isinstance(a, torch.ScriptObject):
            with contextlib.suppress(Exception):
                return dist.ProcessGroup.unbox(a)
    return None


class Recorder(TorchDispatchMode):
    """Collectives and FLOPs of local operators, and bytes of all storages, by phase."""

    def __init__(self, now: dict[str, str]) -> None:
        super().__init__()
        self.now_in = now
        self.collectives: list[tuple[str, str, tuple[int, ...], str, int, int]] = []
        self.flops: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.known: dict[int, list[Any]] = {}  # id of a storage -> bytes, phase, reference
        self.now: collections.Counter[str] = collections.Counter()
        self.peak, self.peak_by, self.peak_in = 0, dict[str, int](), ""

    @property
    def phase(self) -> str:
        return self.now_in["now"]

    def hold(self, things: Any, phase: str) -> None:
        for t in tensors(things):
            storage = local(getattr(t, "elem", t)).untyped_storage()
            if id(storage) in self.known:
                continue
            entry = [storage.size(), phase, None]

            def gone(_: Any, key: int = id(storage), entry: list[Any] = entry) -> None:
                self.known.pop(key, None)
                self.now[entry[1]] -= entry[0]

            entry[2] = weakref.ref(storage, gone)
            self.known[id(storage)] = entry
            self.now[phase] += entry[0]

    def resized(self, storage: Any) -> None:
        if (entry := self.known.get(id(storage))) is not None:
            self.now[entry[1]] += storage.size() - entry[0]
            entry[0] = storage.size()

    def total(self) -> int:
        return sum(self.now.values())

    def look(self) -> None:
        if self.total() > self.peak:
            self.peak, self.peak_in = self.total(), self.phase
            self.peak_by = {k: v for k, v in self.now.items() if v}

    def __enter__(self) -> Recorder:
        self.mode, self.resize = active_fake_mode(), torch.UntypedStorage.resize_

        def resize_(storage: Any, n: int) -> None:
            self.resize(storage, n)
            self.resized(storage)
            self.look()

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize
        super().__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first becomes operators on local tensors
        if op is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # the fake kernel makes a new tensor, the real one does not
        result = op(*args, **(kwargs or {}))
        if PROPAGATING[0] or active_fake_mode() is not self.mode:
            return result  # DTensor asks for shapes
        packet, name = op._overloadpacket, op._schema.name.split("::")[1]
        if packet in FLOPS:
            count = FLOPS[packet](*args, **(kwargs or {}), out_val=result)
            self.flops[self.phase][name] += count
        kind = KINDS.get(f"{op.namespace}.{name}")
        if kind is not None:
            what, i, out = kind
            ins = [] if i == NOTHING else tensors(args[i])
            outs = tensors(result if out is None else [] if out == NOTHING else args[out])
            group = group_of([*args, *(kwargs or {}).values()])
            ranks = tuple(dist.get_process_group_ranks(group))
            dtype = str((ins or outs)[0].dtype).removeprefix("torch.")
            sizes = sum(map(size, ins)), sum(map(size, outs))
            self.collectives.append((self.phase, what, ranks, dtype, *sizes))
        self.hold(result, self.phase)
        self.look()
        return result


def outside_fake_mode() -> None:
    """Meshes compute with integers, and DTensor's shapes with tensors of their own."""

    def wrapped(f: Callable[..., Any], flag: bool) -> Callable[..., Any]:
        @functools.wraps(f)
        def g(*args: Any, **kwargs: Any) -> Any:
            PROPAGATING[0] += flag
            try:
                with unset_fake_temporarily():
                    return f(*args, **kwargs)
            finally:
                PROPAGATING[0] -= flag

        return g

    for name in ("__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate"):
        f = DeviceMesh.__dict__.get(name)
        if isinstance(f, staticmethod):
            setattr(DeviceMesh, name, staticmethod(wrapped(f.__func__, False)))
        elif callable(f):
            setattr(DeviceMesh, name, wrapped(f, False))
    if isinstance(f := DeviceMesh.__dict__.get("mesh"), property) and f.fget:
        DeviceMesh.mesh = property(wrapped(f.fget, False))
    name = "_propagate_tensor_meta_non_cached"
    setattr(ShardingPropagator, name, wrapped(getattr(ShardingPropagator, name), True))


@contextlib.contextmanager
def held_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- pipeline stages -----------------------------------------------------------------------------


def without_votes() -> None:
    """Stages vote over P2P which of them infers shapes; here all shapes are given."""

    def warmup(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedules._PipelineSchedule._warmup_p2p = warmup


def layers_of_stage(layers: int, stages: int, stage: int) -> range:
    """An even split, of which the first stages have the remainder."""
    each, more = divmod(layers, stages)
    begin = stage * each + min(stage, more)
    return range(begin, begin + each + (stage < more))


def noted(stage: PipelineStage, phase: dict[str, str], actions: list[str]) -> None:
    """Set the phase for the time of an action, and list it."""

    def wrap(name: str, letter: str, during: str) -> None:
        method = getattr(stage, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            microbatch = next(iter(args), kwargs.get("fwd_chunk_id", kwargs.get("bwd_chunk_id")))
            half = name == "backward_one_chunk" and not kwargs.get("full_backward", True)
            actions.append(f"{stage.stage_index}{'I' if half else letter}{microbatch}")
            before, phase["now"] = phase["now"], "backward_input" if half else during
            try:
                return method(*args, **kwargs)
            finally:
                phase["now"] = before

        setattr(stage, name, noting)

    wrap("forward_one_chunk", "F", "forward")
    wrap("backward_one_chunk", "B", "backward")
    wrap("backward_weight_one_chunk", "W", "backward_weight")


# ---- a program -----------------------------------------------------------------------------------


class Program:
    """A model on a rank, and its step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        o = self.o = DEFAULTS | spec
        given = o["model"]
        self.m = (MODELS[given] if isinstance(given, str) else given) | {"layers": o["layers"]}
        names, degrees = zip(*o["mesh"], strict=True)
        self.size = collections.defaultdict(lambda: 1, o["mesh"])
        outside_fake_mode()
        world = math.prod(degrees)
        dist.init_process_group("fake", rank=o["rank"], world_size=world, store=FakeStore())
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=names)
        self.dims = {name: mesh[name] for name in names}
        self.over, self.of_experts = None, None
        if not o["ddp"] and not {"dp", "dp_rep", "efsdp"}.isdisjoint(names):
            if "efsdp" in names:
                self.over = self.dims["efsdp_ep"] = mesh["efsdp", "ep"]._flatten("efsdp_ep")
                self.of_experts = mesh["efsdp"]
            elif "dp_rep" in names:
                self.over = mesh["dp_rep", "dp"]
            elif "cp" in names:
                self.over = self.dims["dp_cp"] = mesh["dp", "cp"]._flatten("dp_cp")
            else:
                self.over = mesh["dp"]
        self.phase = {"now": "outside"}
        self.actions: list[str] = []
        self.gradients = 0
        self.buckets: list[torch.Tensor] = []
        """Of DDP in a step, which live on to the next one."""

    def model(self, layers: range) -> Any:
        """The layers of a stage, distributed."""
        o, m, ep = self.o, self.m, self.size["ep"]
        group = self.dims["ep"].get_group() if "ep" in self.dims else None

        def experts() -> nn.Module:
            return MoE(m, group, ep) if o["moe"] else MLP(m)

        with held_in(DTYPES[o["params"]]):
            seq = o["seq"] // self.size["cp"]
            model: Any = Llama(m, seq, o["attn"], experts, layers, tied=o["tied"])
        if "tp" in self.dims:
            tensor_parallel(model, self.dims["tp"], o)
        if "cp" in self.dims:
            context_parallel(model, self.dims["cp"], o)
        if o["ac"]:
            for name, block in model.layers.items():
                model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
        if o["ddp"]:
            return replicated(model, self.buckets)
        if self.over is not None:
            sharded(model, self.over, self.of_experts, o)
        return model

    def build(self) -> None:
        """Make the model, or the stages, and the optimizer."""
        o, m = self.o, self.m
        local_seq = o["seq"] // self.size["cp"]
        rows = o["batch"] * o["n_mb"]
        data = [
            [torch.randint(0, m["vocab"], (rows, local_seq)) for _ in range(2)]
            for _ in range(o["accum"])
        ]
        if "pp" not in self.dims:
            self.models = [self.model(range(m["layers"]))]
            self.data: Any = data
        else:
            self.build_stages()
            first, last = (any(getattr(s, f"is_{end}") for s in self.stages)
                           for end in ("first", "last"))  # fmt: skip
            ((ids, labels),) = data
            self.data = ((ids,) if first else (), labels if last else None)
        self.parameters = [p for model in self.models for p in model.parameters()]
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[o["optimizer"]]
        self.optimizer: Any = kind(self.parameters, lr=1e-4, foreach=False)

    def build_stages(self) -> None:
        o, m, pp, tp = self.o, self.m, self.dims["pp"], self.size["tp"]
        without_votes()
        count, rank = self.size["pp"] * o["vpp"], pp.get_local_rank()
        loop = [rank + i * self.size["pp"] for i in range(o["vpp"])]
        mine = [rank, count - 1 - rank] if o["style"] == "v" else loop
        dtype = DTYPES[o["mp"][0] if o["mp"] else o["params"]]
        seq = o["seq"] // self.size["cp"]
        self.models, self.stages = [], list[PipelineStage]()
        for number in mine:
            model = self.model(layers_of_stage(m["layers"], count, number))
            between = torch.empty(
                o["batch"], seq // tp if o["sp"] else seq, m["hidden"],
                dtype=dtype, requires_grad=True,
            )  # fmt: skip
            tokens = torch.empty(o["batch"], seq, dtype=torch.long)
            logits = torch.empty(o["batch"], seq, m["vocab"], dtype=dtype, requires_grad=True)
            stage = PipelineStage(
                model, number, count, torch.device("cpu"), group=pp.get_group(),
                input_args=tokens if number == 0 else between,
                output_args=logits if number == count - 1 else between,
            )  # fmt: skip
            noted(stage, self.phase, self.actions)
            self.models.append(model)
            self.stages.append(stage)
        kind = schedules.get_schedule_class(o["schedule"])
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self.schedule: Any = kind(
            self.stages[0] if single else self.stages, o["n_mb"], loss_fn=loss_of
        )

    def step(self, done: Callable[[str], None]) -> None:
        """Forward, backward, clipping and the optimizer; `done` is called after each."""
        o = self.o
        self.buckets.clear()
        if "pp" in self.dims:
            ids, labels = self.data
            self.phase["now"] = "step"
            target = {} if labels is None else {"target": labels, "losses": []}
            self.schedule.step(*ids, return_outputs=False, **target)
        else:
            self.microbatches(self.models[0], done)
        if o["clip"]:
            self.phase["now"] = "clip"
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=False)
        self.phase["now"] = "optimizer"
        self.optimizer.step()
        done("optimizer")
        self.gradients = sum(size(p.grad) for p in self.parameters if p.grad is not None)
        self.optimizer.zero_grad()

    def microbatches(self, model: Any, done: Callable[[str], None]) -> None:
        o = self.o
        for i, (ids, labels) in enumerate(self.data):
            last = i == len(self.data) - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            quiet = model.no_sync() if o["ddp"] and not last else contextlib.nullcontext()
            with quiet, loss_parallel() if o["loss_parallel"] else contextlib.nullcontext():
                self.phase["now"] = "forward"
                loss = loss_of(model(ids), labels)
                done("forward")
                self.phase["now"] = "backward"
                loss.backward()
                del loss
                done("backward")

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Tensors that live longer than a step, by what they are."""
        buffers = [b for model in self.models for b in model.buffers()]
        received = [
            info.buffer
            for stage in (self.stages if "pp" in self.dims else ())
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
            if getattr(info, "buffer", None) is not None
        ]
        return {
            "param": [*self.parameters, *buffers],
            "opt": tensors([[*s.values()] for s in self.optimizer.state.values()]),
            "input": tensors(self.data),
            "recv_buffers": received,
            "buckets": self.buckets,
        }


def record(spec: dict[str, Any]) -> dict[str, Any]:
    """A case, in the form of `cases/`; `kinds` and `order` are all of its collectives in order."""
    program = Program(spec)
    o = program.o
    groups = {
        tuple(dist.get_process_group_ranks(mesh.get_group())): name
        for name, mesh in program.dims.items()
    }
    after: dict[str, int] = {}
    with FakeTensorMode(allow_non_fake_inputs=o["ddp"]):
        program.build()
        for _ in range(2):
            program.step(lambda _: None)
        program.actions.clear()
        recorder = Recorder(program.phase)
        for what, things in program.held().items():
            recorder.hold([local(t) for t in things], what)
        recorder.look()

        def done(phase: str) -> None:
            after[phase] = recorder.total()

        with recorder:
            program.step(done)
    found: dict[tuple[Any, ...], list[int]] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    order: list[int] = []
    for phase, kind, ranks, dtype, *sizes in recorder.collectives:
        group = kind, groups[ranks], len(ranks), dtype
        row = found.setdefault((phase, *group), [0, 0, 0])
        row[:] = [row[0] + 1, row[1] + sizes[0], row[2] + sizes[1]]
        order.append(kinds.setdefault((*group, *sizes), len(kinds)))
    options = {k: o[k] for k in (*DEFAULTS, "batch", "seq") if o[k] != DEFAULTS.get(k)}
    pipelined = "pp" in program.dims
    return {
        "name": o["name"], "torch": torch.__version__, "model": program.m, "mesh": o["mesh"],
        "rank": o["rank"], "options": options,
        "params": {
            "rank_param_bytes": sum(map(size, program.parameters)),
            "rank_grad_bytes": program.gradients,
            "rank_opt_state_bytes": sum(map(size, program.held()["opt"])),
        },
        "collectives": [[*key, *row] for key, row in found.items()],
        "flops": {phase: dict(ops) for phase, ops in recorder.flops.items()},
        "live": {"peak": recorder.peak, "peak_in": recorder.peak_in, "by": recorder.peak_by}
        | ({} if pipelined else {"after": after}),
        **({"actions": " ".join(program.actions)} if pipelined else {}),
        "kinds": [*map(list, kinds)], "order": " ".join(map(str, order)),
    }  # fmt: skip


def text_of(case: dict[str, Any]) -> str:
    """JSON with a line for each field, and for each row of collectives."""
    lines: list[str] = []
    for key, value in case.items():
        rows = ",\n  ".join(map(json.dumps, value)) if key == "collectives" else ""
        lines.append(f' "{key}": ' + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    for argument in sys.argv[1:2]:  # one process for each: DTensor remembers groups
        case = record(json.loads(argument))
        (CASES / f"{case['name']}.json").write_text(text_of(case))
        print(text_of(case))
