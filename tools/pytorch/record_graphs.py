"""Record graphs of one rank under a fake process group: `record_graphs.py CASE`.

Needs `pip install stagewright[torch]` (PyTorch 2.13; no GPU). Forward, loss and backward are one
graph of operations on local tensors and functional collectives, as torchtitan's GraphTrainer traces
them: tensor parallelism is DTensor's (`parallelize_module`), weights sharded over data parallelism
are gathered where they are used, and experts exchange their rows with `all_to_all_single`. Each is
written to `graphs/NAME.json`, which `test_graphs.py` reads without PyTorch.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from record_programs import Llama, loss_of, tensor_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from stagewright.imports.rank_graph import record_graph

GRAPHS = Path(__file__).parents[2] / "tests" / "conformance" / "graphs"
SIZES = {"hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 176, "vocab": 256,
         "layers": 2}  # fmt: skip
BATCH, SEQ = 2, 32


class Gathered(torch.autograd.Function):
    """The weights of a unit from their shards, gathered together; so are gradients scattered."""

    @staticmethod
    def forward(ctx: Any, group: Any, *shards: torch.Tensor) -> Any:
        ctx.group, ranks = group, dist.get_world_size(group)
        ctx.rows = [len(t) for t in shards]
        flat = funcol.all_gather_tensor(torch.cat([t.flatten() for t in shards]), 0, group)
        parts = flat.view(ranks, -1).split([t.numel() for t in shards], 1)
        return tuple(
            part.reshape(ranks * len(t), *t.shape[1:])
            for part, t in zip(parts, shards, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ranks = dist.get_world_size(ctx.group)
        flat = torch.cat([g.reshape(ranks, -1) for g in grads], 1).flatten()
        own = funcol.reduce_scatter_tensor(flat, "avg", 0, ctx.group)
        parts = own.split([g.numel() // ranks for g in grads])
        return None, *(
            part.view(rows, *g.shape[1:])
            for part, rows, g in zip(parts, ctx.rows, grads, strict=True)
        )


class Experts(nn.Module):
    """Experts of ranks of a group: rows of tokens, evenly spread, are exchanged."""

    def __init__(self, m: dict[str, int], group: Any) -> None:
        super().__init__()
        self.m, self.group, self.ranks = m, group, dist.get_world_size(group)
        here = m["experts"] // self.ranks
        self.router = nn.Linear(m["hidden"], m["experts"], bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(here, m["hidden"], m["ffn"])) for _ in "ab")
        self.w2 = nn.Parameter(torch.empty(here, m["ffn"], m["hidden"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, rows = self.m, x.flatten(0, 1)
        weights, chosen = torch.softmax(self.router(rows), -1).topk(m["topk"])
        order = chosen.flatten().argsort()
        copies = rows[order // m["topk"]]
        even = [len(order) // self.ranks] * self.ranks
        there = funcol.all_to_all_single_autograd(copies, even, even, self.group)
        own = there.unflatten(0, (self.w1.shape[0], -1))
        made = torch.bmm(F.silu(torch.bmm(own, self.w1)) * torch.bmm(own, self.w3), self.w2)
        back = funcol.all_to_all_single_autograd(made.flatten(0, 1), even, even, self.group)
        weighed = back * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // m["topk"], weighed).view_as(x)


def unit_of(name: str) -> str:
    """What is gathered together: a block, or all that is in none."""
    words = name.split(".")
    return words[1] if words[0] == "layers" else "root"


def traced(model: nn.Module, over: Any) -> Any:
    """Forward, loss and backward as one graph; weights are sharded `over` a group."""
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names = sorted(named, key=lambda n: (unit_of(n) != "root", unit_of(n)))
    units = [
        [n for n in names if unit_of(n) == unit] for unit in dict.fromkeys(map(unit_of, names))
    ]

    def step(local: list[torch.Tensor], ids: torch.Tensor, labels: torch.Tensor) -> Any:
        values: dict[str, Any] = dict(zip(names, local, strict=True))
        for unit in units if over else ():
            values |= zip(unit, Gathered.apply(over, *(values[n] for n in unit)), strict=True)
        for name, p in named.items():
            if isinstance(p, DTensor):
                values[name] = DTensor.from_local(values[name], p.device_mesh, p.placements)
        loss = loss_of(functional_call(model, {**values, **buffers}, (ids,)), labels)
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        return [loss, *torch.autograd.grad(loss, local)]

    ranks = dist.get_world_size(over) if over else 1
    local: list[torch.Tensor] = []
    for name in names:
        p = named[name]
        t = (p.to_local() if isinstance(p, DTensor) else p).detach()
        local.append(t[: len(t) // ranks].clone().requires_grad_())
    data = [torch.zeros(BATCH, SEQ, dtype=torch.long) for _ in range(2)]
    return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(local, *data)


CASES: dict[str, tuple[tuple[str, int], ...]] = {
    "llama_tp4": (("tp", 4),),
    "llama_fsdp4": (("dp", 4),),
    "llama_fsdp2_tp2": (("dp", 2), ("tp", 2)),
    "moe_ep4": (("ep", 4),),
}
"""The mesh of each, outermost first."""


def made(name: str) -> Any:
    """The graph of a case, and its mesh."""
    names, sizes = zip(*CASES[name], strict=True)
    dist.init_process_group("fake", rank=1, world_size=math.prod(sizes), store=FakeStore())
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    moe = name.startswith("moe")
    m = SIZES | ({"experts": 8, "topk": 2, "ffn": 48} if moe else {})
    model: Any = Llama(m, SEQ)
    for block in model.layers.values() if moe else ():
        block.mlp = Experts(m, mesh["ep"].get_group())
    if "tp" in names:
        options = {"sp": True, "loss_parallel": False, "shared_input": True}
        tensor_parallel(model, mesh["tp"], options)
    return traced(model, mesh["dp"].get_group() if "dp" in names else None), mesh


if __name__ == "__main__":
    for case in sys.argv[1:2]:  # one process for each: DTensor remembers groups
        recording = record_graph(*made(case), name=case)
        (GRAPHS / f"{case}.json").write_text(recording.to_json())
        print(case, len(recording.nodes), recording.process)
