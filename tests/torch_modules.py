"""Modules of users' kinds, for tests that import them from PyTorch: needs torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Layer(nn.Module):
    """Attention of a fused projection beside a convolution."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(d), nn.Conv1d(d, d, 3, padding=1)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Any) -> Any:
        b, s, d = x.shape
        h = self.norm(x)
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(h).view(b, s, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(o.transpose(1, 2).reshape(b, s, d))


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(Layer(32) for _ in range(3))
        self.head = nn.Linear(32, 96)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recurrent(nn.Module):
    """A cell in a loop over positions: as many copies as the example has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.into = nn.Embedding(96, 16), nn.Linear(16, 24)
        self.again, self.head = nn.Linear(24, 24, bias=False), nn.Linear(24, 96)

    def forward(self, tokens: Any) -> Any:
        x = self.into(self.embed(tokens))
        h = torch.zeros_like(x[:, 0])
        made = []
        for t in range(6):
            h = torch.tanh(x[:, t] + self.again(h))
            made.append(h)
        return self.head(torch.stack(made, 1))


class TwoTowers(nn.Module):
    """Users and items, each through an MLP, and the product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100, 16), nn.Embedding(200, 16)
        self.user = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 8))
        self.item = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, user: Any, item: Any, dense: Any) -> Any:
        u = self.user(torch.cat([self.users(user), dense], -1))
        return torch.sigmoid((u * self.item(self.items(item))).sum(-1)).mean()


class UNetBlock(nn.Module):
    """Convolutions with a shortcut, and one that doubles the resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(4, 16), nn.Conv2d(16, 32, 3, padding=1)
        self.second, self.short = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(16, 32, 1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)

    def forward(self, x: Any) -> Any:
        h = self.second(F.silu(self.first(F.silu(self.norm(x)))))
        return self.up(h + self.short(x))


class Odd(nn.Module):
    """An operation that no table has, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Any) -> Any:
        return self.b(torch.special.bessel_j0(self.a(x))).sum()


class Custom(nn.Module):
    """An operation of a user's own, with its gradient, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Any) -> Any:
        return self.b(squashed(self.a(x))).sum()


@torch.library.custom_op("stagewright_tests::squashed", mutates_args=())
def squashed(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(1 + x * x), which keeps its result for backward."""
    return x / (1 + x * x).sqrt()


@squashed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)


def _gradient(ctx: Any, grad: Any) -> Any:
    (y,) = ctx.saved_tensors
    return grad * (1 - y * y) ** 1.5


squashed.register_autograd(_gradient, setup_context=_keep)


class Image(nn.Module):
    """Attention between the places of a convolution, which are two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.q, self.k, self.v, self.o = (nn.Conv2d(16, 16, 1) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        x = self.conv(x) * self.gain
        q, k, v = (
            w(x).flatten(2).unflatten(1, (2, 8)).transpose(2, 3) for w in (self.q, self.k, self.v)
        )
        o = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(1, 2)
        return self.o(o.unflatten(2, (4, 6))).mean()


def tokens(*shape: int) -> Any:
    return torch.zeros(*shape, dtype=torch.long, device="meta")


def values(*shape: int) -> Any:
    return torch.zeros(*shape, device="meta")


CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "hybrid": (Hybrid, (lambda: tokens(2, 12),), {}),
    "recurrent": (Recurrent, (lambda: tokens(2, 6),), {"static": True}),
    "two towers": (
        TwoTowers, (lambda: tokens(4), lambda: tokens(4), lambda: values(4, 8)), {},
    ),
    "unet": (UNetBlock, (lambda: values(2, 16, 8, 8),), {"static": True}),
    "custom op": (Custom, (lambda: values(4, 16),), {"approximate": True}),
}  # fmt: skip
