"""Record what a PyTorch program does on one rank: `record_programs.py SPEC...`.

Needs `pip install stagewright[torch]` (PyTorch 2.13; no GPU). One process plays one rank of any
number under the fake process group, with fake tensors: nothing is computed, every operator and
every collective is dispatched. A case is written to `cases/NAME.json`, in the form that
`compare.py` reads. A specification is JSON:

    python tools/pytorch/record_programs.py '{"name": "40_tiny_fsdp4", "mesh": [["dp", 4]],
        "rank": 1, "model": "tiny", "layers": 2, "batch": 2, "seq": 128, "mp": ["bf16", "fp32"]}'

`mesh` is outermost first: dp (FSDP2, or DDP with "ddp": true), dp_rep, tp. Options are those of
`DEFAULTS`. Two steps are run before the one that is recorded, so that optimizer states exist and
DDP has rebuilt its buckets.
"""

from __future__ import annotations

import collections
import contextlib
import functools
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
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
}  # fmt: skip
"""Parameters' dtype; FSDP2's (param_dtype, reduce_dtype); reshard_after_forward; sequence parallel;
PrepareModuleInput; checkpoint each block; clip_grad_norm_; microbatches."""


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


class Attention(nn.Module):
    def __init__(self, m: dict[str, int]) -> None:
        super().__init__()
        self.width, self.copies = m["head_dim"], m["heads"] // m["kv_heads"]
        heads = {"wq": m["heads"], "wk": m["kv_heads"], "wv": m["kv_heads"]}
        for name, count in heads.items():
            setattr(self, name, nn.Linear(m["hidden"], count * m["head_dim"], bias=False))
        self.wo = nn.Linear(m["heads"] * m["head_dim"], m["hidden"], bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.width) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.copies > 1:
            k, v = (t.repeat_interleave(self.copies, dim=1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).contiguous().view(b, s, -1))


class MLP(nn.Module):
    def __init__(self, m: dict[str, int]) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(m["hidden"], m["ffn"], bias=False) for _ in range(2))
        self.w2 = nn.Linear(m["ffn"], m["hidden"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, m: dict[str, int]) -> None:
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(m["hidden"]), Attention(m)
        self.mlp_norm, self.mlp = RMSNorm(m["hidden"]), MLP(m)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = x + self.attn(self.attn_norm(x), cos, sin)
        return h + self.mlp(self.mlp_norm(h))


class Llama(nn.Module):
    def __init__(self, m: dict[str, int], seq: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(m["vocab"], m["hidden"])
        self.layers = nn.ModuleDict({str(i): Block(m) for i in range(m["layers"])})
        self.norm, self.out = RMSNorm(m["hidden"]), nn.Linear(m["hidden"], m["vocab"], bias=False)
        waves = torch.arange(0, m["head_dim"], 2, dtype=torch.float32) / m["head_dim"]
        angle = torch.outer(torch.arange(seq, dtype=torch.float32), 5e5**-waves)
        self.register_buffer("cos", torch.cos(angle), persistent=False)
        self.register_buffer("sin", torch.sin(angle), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tok(ids)
        for block in self.layers.values():
            h = block(h, self.cos, self.sin)
        return self.out(self.norm(h))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


# ---- how it is distributed -----------------------------------------------------------------------


def tensor_parallel(model: Llama, tp: DeviceMesh, o: dict[str, Any]) -> None:
    between = Shard(1) if o["sp"] else Replicate()
    split = o["loss_parallel"]
    plan: dict[str, Any] = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "out": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if split else Replicate(),
            use_local_output=not split,
        ),
    }
    if o["sp"]:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, tp, plan)
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


def sharded(model: Llama, mesh: DeviceMesh, o: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"mesh": mesh}
    if o["mp"]:
        param, reduce = (DTYPES[d] for d in o["mp"])
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for block in model.layers.values():
        fully_shard(block, **settings, reshard_after_forward=o["reshard"])
    fully_shard(model, **settings, reshard_after_forward=False)


def replicated(model: Llama) -> nn.Module:
    """DDP, whose hook may not read the future of a fake collective, nor its buckets' indices."""
    wrapped = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)

    def hook(_: Any, bucket: Any) -> torch.futures.Future[Any]:
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

KINDS: dict[
    str, tuple[str, int, int | None]
] = {  # operand that goes in, that comes out (or result)
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, None),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, None),
    "_c10d_functional.all_reduce": ("all_reduce", 0, None),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0, None),
    "c10d._allgather_base_": ("all_gather", 1, 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, 0),
    "c10d.allreduce_": ("all_reduce", 0, 0),
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

    def __init__(self) -> None:
        super().__init__()
        self.phase = "outside"
        self.collectives: list[tuple[str, str, tuple[int, ...], str, int, int]] = []
        self.flops: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.known: dict[int, list[Any]] = {}  # id of a storage -> bytes, phase, reference
        self.now: collections.Counter[str] = collections.Counter()
        self.peak, self.peak_by, self.peak_in = 0, dict[str, int](), ""

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
            ins, outs = tensors(args[i]), tensors(result if out is None else args[out])
            group = group_of([*args, *(kwargs or {}).values()])
            ranks = tuple(dist.get_process_group_ranks(group))
            dtype = str(ins[0].dtype).removeprefix("torch.")
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


def record(spec: dict[str, Any]) -> dict[str, Any]:
    """A case, in the form of `cases/`."""
    o = DEFAULTS | spec
    m = MODELS[o["model"]] | {"layers": o["layers"]}
    names, degrees = zip(*o["mesh"], strict=True)
    outside_fake_mode()
    world = math.prod(degrees)
    dist.init_process_group("fake", rank=o["rank"], world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=names)
    groups = {tuple(dist.get_process_group_ranks(mesh[n].get_group())): n for n in names}
    over = mesh["dp_rep", "dp"] if "dp_rep" in names else mesh["dp"] if "dp" in names else None
    with FakeTensorMode(allow_non_fake_inputs=o["ddp"]):
        with held_in(DTYPES[o["params"]]):
            model: Any = Llama(m, o["seq"])
        if "tp" in names:
            tensor_parallel(model, mesh["tp"], o)
        if o["ac"]:
            for name, block in model.layers.items():
                model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
        if o["ddp"]:
            model = replicated(model)
        elif over is not None:
            sharded(model, over, o)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        shape, rows = (o["batch"], o["seq"]), range(o["accum"])
        data = [[torch.randint(0, m["vocab"], shape) for _ in range(2)] for _ in rows]
        after: dict[str, int] = {}
        gradients = [0]

        def step(recorder: Recorder) -> None:
            def done(phase: str) -> None:
                after[phase] = recorder.total()

            for i, (ids, labels) in enumerate(data):
                last = i == len(data) - 1
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(last)
                quiet = model.no_sync() if o["ddp"] and not last else contextlib.nullcontext()
                with quiet, loss_parallel() if o["loss_parallel"] else contextlib.nullcontext():
                    recorder.phase = "forward"
                    loss = loss_of(model(ids), labels)
                    done("forward")
                    recorder.phase = "backward"
                    loss.backward()
                    del loss
                    done("backward")
            if o["clip"]:
                recorder.phase = "clip"
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            recorder.phase = "optimizer"
            optimizer.step()
            done("optimizer")
            gradients[0] = sum(size(p.grad) for p in model.parameters() if p.grad is not None)
            optimizer.zero_grad()

        for _ in range(2):
            step(Recorder())  # which is not entered
        recorder = Recorder()
        state = [v for s in optimizer.state.values() for v in s.values()]
        for what, things in (
            ("param", [*model.parameters(), *model.buffers()]), ("opt", state), ("input", data)
        ):  # fmt: skip
            recorder.hold([local(t) for t in tensors(things)], what)
        recorder.look()
        with recorder:
            step(recorder)
    found: dict[tuple[Any, ...], list[int]] = {}
    for phase, kind, ranks, dtype, *sizes in recorder.collectives:
        row = found.setdefault((phase, kind, groups[ranks], len(ranks), dtype), [0, 0, 0])
        row[:] = [row[0] + 1, row[1] + sizes[0], row[2] + sizes[1]]
    options = {k: o[k] for k in (*DEFAULTS, "batch", "seq") if o[k] != DEFAULTS.get(k)}
    params = [*model.parameters()]
    return {
        "name": o["name"], "torch": torch.__version__, "model": m, "mesh": o["mesh"],
        "rank": o["rank"], "options": options,
        "params": {
            "rank_param_bytes": sum(map(size, params)),
            "rank_grad_bytes": gradients[0],
            "rank_opt_state_bytes": sum(size(t) for t in tensors(state)),
        },
        "collectives": [[*key, *row] for key, row in found.items()],
        "flops": {phase: dict(ops) for phase, ops in recorder.flops.items()},
        "live": {"peak": recorder.peak, "peak_in": recorder.peak_in, "by": recorder.peak_by,
                 "after": after},
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
