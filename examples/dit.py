"""DiT-XL/2 (Peebles and Xie, arXiv 2212.09748) in plain PyTorch, for `stagewright import`.

    stagewright import examples/dit.py:factory --static -o dit.stg
    stagewright simulate dit.stg --dp 8 --zero 1 --micro-batch-size 32 --global-batch-size 256 \
        --seq-length 256 --hardware h100-sxm

A latent of 32 x 32 x 4 (an image of 256 x 256) becomes 256 patches, which 28 blocks transform; each
block is modulated by the time step and the class (adaLN-Zero). The loss is the mean squared error
of the predicted noise. The length of a sequence only counts tokens
in rates: 256 patches.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS, CLASSES, FREQUENCIES = 4, 1000, 256


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale the channels of all patches of an image."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimeEmbedding(nn.Module):
    """Time steps as sines and cosines, through an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        half = FREQUENCIES // 2
        rates = torch.exp(-9.21 * torch.arange(half, device=t.device) / half)
        angles = t[:, None] * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class Block(nn.Module):
    """Attention and an MLP, each modulated and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift1, scale1)
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1.unsqueeze(1) * self.proj(h)
        h = F.gelu(self.fc1(modulate(self.norm2(x), shift2, scale2)), approximate="tanh")
        return x + gate2.unsqueeze(1) * self.fc2(h)


class DiT(nn.Module):
    """The denoiser, and the loss of a step of training."""

    def __init__(
        self, layers: int = 28, width: int = 1152, heads: int = 16, size: int = 32, patch: int = 2
    ) -> None:
        super().__init__()
        self.grid, self.patch = size // patch, patch
        self.patches = nn.Conv2d(CHANNELS, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, self.grid**2, width), requires_grad=False)
        self.time = TimeEmbedding(width)
        self.classes = nn.Embedding(CLASSES + 1, width)  # one for images without a class
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, patch * patch * 2 * CHANNELS)  # noise and its variance

    def forward(self, latent: Tensor, t: Tensor, label: Tensor, noise: Tensor) -> Tensor:
        x = self.patches(latent).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(t) + self.classes(label)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        x = self.out(modulate(self.norm(x), shift, scale))
        x = x.unflatten(2, (self.patch, self.patch, -1)).unflatten(1, (self.grid, self.grid))
        image = torch.einsum("nhwpqc->nchpwq", x).flatten(4).flatten(2, 3)
        return ((image[:, :CHANNELS] - noise) ** 2).mean()


def factory(layers: int = 28) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """DiT-XL/2 without values, and inputs for two images."""
    with torch.device("meta"):
        latent = torch.zeros(2, CHANNELS, 32, 32)
        label = torch.zeros(2, dtype=torch.long)
        return DiT(layers), (latent, torch.zeros(2), label, torch.zeros_like(latent))
