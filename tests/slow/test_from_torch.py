"""Modules of kinds that no preset has, traced here and counted beside PyTorch's own counter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagewright as sw
from stagewright.errors import UserError
from stagewright.graph.cost import flops
from stagewright.imports.rank_graph import record_graph
from stagewright.imports.sources import recorded
from stagewright.imports.translate import translate
from stagewright.lower.blocks import build_block
from stagewright.lower.parameters import parameters
from stagewright.lower.recipe import recipe_of
from stagewright.lower.variants import BlockVariant, place_blocks
from stagewright.model.config import ModelConfig
from stagewright.program.columns import CATEGORIES, PHASES
from stagewright.run.settings import Run

torch: Any = pytest.importorskip("torch", reason="needs the extra: pip install -e '.[torch]'")
nn: Any = torch.nn
F: Any = torch.nn.functional
counter: Any = pytest.importorskip("torch.utils.flop_counter")

modules: Any = pytest.importorskip("torch_modules", reason="needs torch")
CASES, Odd, tokens, values = modules.CASES, modules.Odd, modules.tokens, modules.values

pytestmark = pytest.mark.slow

if True:  # the modules need torch to be defined

    class Decoder(nn.Module):
        """Causal attention, RMSNorm and a gated MLP, each in one piece."""

        def __init__(self, norm: Any = nn.RMSNorm) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(96, 32), nn.Linear(32, 96, bias=False)
            self.layers = nn.ModuleList(Causal(norm) for _ in range(2))

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    class Written(nn.Module):
        """RMSNorm in operators, as transformers has it."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    class Causal(nn.Module):
        def __init__(self, norm: Any = nn.RMSNorm) -> None:
            super().__init__()
            self.first, self.second = norm(32), norm(32)
            self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
            self.up, self.gate = (nn.Linear(32, 80, bias=False) for _ in range(2))
            self.down = nn.Linear(80, 32, bias=False)

        def forward(self, x: Any) -> Any:
            h = self.first(x)
            heads = [w(h).unflatten(-1, (4, 8)).transpose(1, 2) for w in (self.q, self.k, self.v)]
            o = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.o(o.transpose(1, 2).flatten(2))
            h = self.second(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Around(nn.Module):
        """What a function makes of the stream, between a table and scores, as often as told."""

        def __init__(self, body: Any, width: int = 16, layers: int = 2) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(96, width), nn.Linear(width, 96)
            self.a = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
            self.b = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
            self.body = body

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for a, b in zip(self.a, self.b, strict=True):
                x = x + self.body(x, a, b)
            return self.head(x)

    def into_a_view(x: Any, a: Any, b: Any) -> Any:
        """Half of what one product made is overwritten through a view."""
        y = a(x)
        y[..., :8].add_(b(x)[..., 8:])
        return y

    def position_by_position(x: Any, a: Any, b: Any) -> Any:
        made = torch.zeros_like(x)
        for t in range(6):
            made[:, t] = b(torch.tanh(a(x[:, t])))
        return made

    def shifted(x: Any, a: Any, b: Any) -> Any:
        made = torch.zeros_like(x)
        made[:, 1:] = a(x)[:, :-1]
        return b(made)

    def put_at_indices(x: Any, a: Any, b: Any) -> Any:
        made = torch.zeros_like(x)
        made[:, :, [1, 5]] = a(x)[..., :2]
        return b(made)

    def norm_of_another(x: Any, a: Any, b: Any) -> Any:
        """What is scaled is not what the mean of squares is of."""
        return b(x) * torch.rsqrt(a(x).pow(2).mean(-1, keepdim=True) + 1e-6)

    def not_quite_gelu(x: Any, a: Any, b: Any) -> Any:
        return (1 + torch.tanh(a(x) + b(x) ** 3)) * x

    def post_norm(x: Any, a: Any, b: Any) -> Any:
        """The stream is read often in each layer."""
        return torch.sigmoid(a(x)) * b(x) + F.layer_norm(x * torch.relu(x), (16,))

    def heads(x: Any, a: Any, b: Any) -> list[Any]:
        return [y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (a(x), b(x), x)]

    def in_parts(x: Any, a: Any, b: Any, *, window: int = 0) -> Any:
        """Attention in operators, whose mask is true for what is hidden."""
        q, k, v = heads(x, a, b)
        at = torch.arange(x.shape[1], device=x.device)
        hidden = torch.triu(torch.ones_like(at[:, None] + at, dtype=torch.bool), 1)
        if window:
            hidden = hidden | (at[:, None] - at >= window)
        scores = (q @ k.transpose(-1, -2) / 3).masked_fill(hidden, -math.inf).softmax(-1)
        return (scores @ v).transpose(1, 2).flatten(2)

    def far_window(x: Any, a: Any, b: Any) -> Any:
        return in_parts(x, a, b, window=16384)

    def turned_pairs(x: Any, a: Any, b: Any) -> Any:
        """Rotary positions of channels side by side: heads that are two dims."""
        q, k, v = heads(x, a, b)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * torch.ones(4, device=x.device)
        c, s = angle.cos(), angle.sin()

        def turned(y: Any) -> Any:
            even, odd = y.unflatten(-1, (4, 2)).unbind(-1)
            return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)

        o = F.scaled_dot_product_attention(turned(q), turned(k), v)
        return o.transpose(1, 2).flatten(2)

    def turned_numbers(x: Any, a: Any, b: Any) -> Any:
        """Rotary positions by complex numbers, as the code of Llama was published with."""
        q, k, _ = heads(x, a, b)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * torch.ones(4, device=x.device)
        turn = torch.polar(torch.ones_like(angle), angle)

        def turned(y: Any) -> Any:
            number = torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2))
            return torch.view_as_real(number * turn).flatten(3).type_as(y)

        return F.scaled_dot_product_attention(turned(q), turned(k), k).transpose(1, 2).flatten(2)

    def of_experts(x: Any, a: Any, b: Any) -> Any:
        """All experts of all positions, weighed by a number for each that was chosen."""
        weight, chosen = a(x).softmax(-1).topk(2, -1)
        each = torch.where(chosen == 1, weight, 0).sum(-1, keepdim=True)
        return b(x) * each


PRODUCTS = ("einsum", "conv", "conv_bwd")


def made(name: str) -> tuple[Any, tuple[Any, ...], ModelConfig]:
    kind, inputs, options = CASES[name]
    with torch.device("meta"):
        module = kind()
    given = tuple(each() for each in inputs)
    return module, given, sw.from_torch(module, given, **options)


def products(model: ModelConfig, batch: int, positions: int) -> int:
    """Operations of matrix products, convolutions and attention in the forward pass, whole."""
    run = Run(model=model.name, seq_length=positions).resolved(model)
    sizes = {name: n for m in model.modules for name, n in m.sizes.items()}
    known = {"M": model.hidden_size, "A": model.num_attention_heads, "V": model.vocab_size}
    known |= {"D": model.kv_channels, "F": model.ffn_hidden_size, "G": model.num_query_groups}
    known |= sizes | {"B": batch, "S": positions}
    total = 0
    for stage in place_blocks(run, model):
        for variant, _ in stage:
            for n in _graph(variant, model, run):
                if n.phase == "forward" and (
                    (n.op in PRODUCTS and len(n.srcs) == 2) or n.op == "attention"
                ):
                    total += int(flops(n, lambda dim, axes: dim.value(known)))
    return total


def _graph(variant: BlockVariant, model: ModelConfig, run: Run) -> Any:
    return build_block(variant, model, recipe_of(run, model)).graph


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_products_are_those_that_pytorch_counts(name: str):
    module, inputs, model = made(name)
    assert parameters(model)[0] == sum(p.numel() for p in module.parameters())
    with counter.FlopCounterMode(display=False) as counted:
        module(*inputs)
    shape = inputs[0].shape
    got = products(model, shape[0], shape[1] if len(shape) == 2 and name != "custom op" else 1)
    assert got == counted.get_total_flops()
    assert math.prod(shape) > 0


BODIES: list[Any] = [
    into_a_view, position_by_position, shifted, put_at_indices, norm_of_another, not_quite_gelu,
    post_norm, turned_pairs, turned_numbers, of_experts,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_no_product_is_lost_behind_what_is_written_in_parts_or_looks_like_a_norm(body: Any):
    with torch.device("meta"):
        module = Around(body)
    model = sw.from_torch(module, tokens(2, 6), static=True)
    assert parameters(model)[0] == sum(p.numel() for p in module.parameters())
    with counter.FlopCounterMode(display=False) as counted:
        module(tokens(2, 6))
    assert products(model, 2, 6) == counted.get_total_flops()
    assert model.chain == ("embed", "2 layer", "head")


@pytest.mark.parametrize("body", [in_parts, far_window])
def test_a_mask_that_is_true_for_what_is_hidden_is_computed(body: Any):
    """Also where its window is too large to compute the mask for so many positions."""
    with torch.device("meta"):
        module = Around(body)
    (text,) = [
        line
        for line in sw.from_torch(module, tokens(2, 6)).modules[0].text.splitlines()
        if line.startswith("attention = ")
    ]
    assert ("causal=true" in text, "window=16384" in text) == (True, body is far_window)


def test_what_cannot_be_said_is_refused_or_told():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return torch.cond(x.sum() > 0, self.a, self.b, (x,))

    class Two(Branch):
        def forward(self, x: Any) -> Any:
            return self.a(x), self.b(x)

    class Nothing(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.ones(3)

    with torch.device("meta"):
        branch, two, complex_ = Branch(), Two(), nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(UserError, match=r"^test_from_torch\.py:\d+: cond runs a function"):
        sw.from_torch(branch, values(4, 16))
    with pytest.raises(UserError, match="returns no tensor that depends on its inputs"):
        sw.from_torch(Nothing(), values(4, 16))
    with pytest.raises(UserError, match="give an example with a batch of 2 or more"):
        sw.from_torch(two, values(1, 16))
    with pytest.raises(UserError, match="makes complex numbers"):
        sw.from_torch(complex_, values(4, 4).to(torch.complex64))
    notes = sw.from_torch(two, values(4, 16)).notes
    assert "left out: 272 parameters that the result does not depend on: b.weight, b.bias" in notes
    assert any("dim 1 of x is 16" in note for note in notes)


def test_layers_are_found_and_a_run_can_be_compiled():
    *_, model = made("hybrid")
    assert model.chain[1] == "3 layer"
    compiled = sw.compile(
        Run(model="hybrid", tp=2, pp=3, seq_length=12, global_batch_size=6), model
    )
    assert compiled.run.world_size == 6


def test_control_flow_on_values_is_refused_with_the_line_that_has_it(capfd: Any):
    class Branch(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(UserError, match=r"cannot trace Branch: test_from_torch\.py:\d+: "):
        sw.from_torch(Branch(), values(4, 16))
    assert capfd.readouterr() == ("", "")


def test_what_is_unknown_is_refused_by_name():
    with torch.device("meta"):
        module = Odd()
    with pytest.raises(UserError, match=r"no row for aten\.special_bessel_j0"):
        sw.from_torch(module, values(4, 16))


def test_bytes_saved_for_backward_are_those_that_autograd_saves():
    """But for the loss: two numbers of four bytes, and the inputs, which are not counted as saved.

    With `--framework torchtitan`, whose operators are PyTorch's own.
    """
    module, ids = Decoder(Written), torch.zeros(2, 16, dtype=torch.long)
    model = sw.from_torch(module, ids)
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), ids)}
    kept: dict[int, Any] = {}

    def pack(t: Any) -> Any:
        kept.setdefault(t.untyped_storage()._cdata, t.untyped_storage())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = F.cross_entropy(module(ids).flatten(0, 1), ids.flatten())
    theirs = sum(s.nbytes() for key, s in kept.items() if key not in own and s.nbytes() > 4)
    settings: dict[str, Any] = {"precision": "fp32", "dropout": False, "global_batch_size": 2}
    run = Run(
        model=model.name, framework="torchtitan", seq_length=16, micro_batch_size=2, **settings
    )
    (of,) = sw.compile(run, model).program.classes
    v, last = of.values, int(np.flatnonzero(of.tasks.phase == PHASES.index("forward"))[-1])
    there = v.value[(v.first <= last) & (v.last > last)]
    saved = v.category[there] == CATEGORIES.index("activations")
    inputs = [v.names.index(n) for n in ("embedding.tokens", "head.labels") if n in v.names]
    ours = int(v.size[there[saved & ~np.isin(v.name[there], inputs)]].sum())
    names = {v.names[v.name[i]]: int(v.size[i]) for i in there[saved]}
    assert ours == theirs, (names, loss)


def saved(path: Path, device: str, *, decomposed: bool = False) -> None:
    """A decoder as a file that `torch.export.save` writes."""
    with torch.device(device):
        module, ids = Decoder(), torch.zeros(2, 16, dtype=torch.long)
    vary = torch.export.Dim.DYNAMIC
    program = torch.export.export(module, (ids,), dynamic_shapes=({0: vary, 1: vary},))
    torch.export.save(program.run_decompositions() if decomposed else program, path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["values", "meta", "decomposed"])
def test_a_saved_program_is_the_module_that_was_saved(kind: str, tmp_path: Path):
    """Also where its attention, norms and activations were taken apart into core operations."""
    path = tmp_path / "saved.pt2"
    device = "meta" if kind == "meta" else "cpu"
    saved(path, device, decomposed=kind == "decomposed")
    from_file = translate(recorded(str(path)))
    with torch.device("meta"):
        module = Decoder()
    of_module = sw.from_torch(module, tokens(2, 16), name="saved").modules[0].text
    kept = [line for line in from_file.text.splitlines() if not line.startswith("#")]
    assert kept == [line for line in of_module.splitlines() if not line.startswith("#")]
    assert any("which parameters are tied" in note for note in from_file.notes) == (kind == "meta")


def test_a_file_that_is_no_saved_program_is_refused(tmp_path: Path, caplog: Any):
    path = tmp_path / "other.pt2"
    with pytest.raises(UserError, match="no such file"):
        recorded(str(path))
    path.write_bytes(b"not an archive")
    with pytest.raises(UserError, match=r"other\.pt2: no saved torch\.export program"):
        recorded(str(path))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_messages_of_a_pipeline_in_a_recorded_graph_are_refused_by_name():
    distributed: Any = pytest.importorskip("torch.distributed")
    fakes: Any = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    proxies: Any = pytest.importorskip("torch.fx.experimental.proxy_tensor")
    distributed.init_process_group("fake", rank=0, world_size=2, store=fakes.FakeStore())
    try:

        def stage(x: Any, w: Any) -> Any:
            y = x @ w
            distributed.send(y, 1)
            return y.sum()

        graph = proxies.make_fx(stage, tracing_mode="fake")(torch.zeros(2, 4), torch.zeros(4, 4))
        with pytest.raises(UserError, match=r"c10d\.send\.default is a message of a pipeline"):
            record_graph(graph)
    finally:
        distributed.destroy_process_group()
