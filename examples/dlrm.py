"""DLRM of MLPerf (Naumov et al., arXiv 1906.00091) in plain PyTorch, for `stagewright import`.

    stagewright import examples/dlrm.py:factory -o dlrm.stg
    stagewright simulate dlrm.stg --tp 8 --optimizer sgd --micro-batch-size 8192 \
        --global-batch-size 8192 --seq-length 1 --hardware h100-sxm

Criteo's terabyte of clicks has 13 numeric and 26 categorical features. Each category is a row of a
table; the tables of all features are one, so that tp splits its rows. Products of all pairs of rows
and an MLP predict the click.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208,
    11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
"""Rows of the tables with --max-ind-range=40000000 (MLPerf's reference)."""
NUMERIC, WIDTH = 13, 128


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a ReLU after each."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """An embedding table between two MLPs, and the loss of a step of training."""

    def __init__(self, rows: tuple[int, ...] = ROWS) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(sum(rows), WIDTH, mode="sum")
        first = [sum(rows[:i]) for i in range(len(rows))]
        self.register_buffer("first", torch.tensor(first, device="cpu"), persistent=False)
        self.bottom = mlp(NUMERIC, 512, 256, WIDTH)
        features = len(rows) + 1
        self.top = mlp(WIDTH + features * (features - 1) // 2, 1024, 1024, 512, 256)
        self.out = nn.Linear(256, 1)
        pairs = torch.tril_indices(features, features, -1, device="cpu")
        self.register_buffer("pairs", pairs[0] * features + pairs[1], persistent=False)

    def forward(self, numeric: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        dense = self.bottom(numeric)
        indices = (categories + self.first.to(categories.device)).flatten()
        rows = self.table(indices.unsqueeze(1)).unflatten(0, (-1, len(self.first)))
        vectors = torch.cat([dense.unsqueeze(1), rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        x = torch.cat([dense, products[:, self.pairs]], dim=1)
        return F.binary_cross_entropy_with_logits(self.out(self.top(x)).squeeze(1), clicks)


def factory(rows: tuple[int, ...] = ROWS) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model without values, and inputs for two clicks."""
    with torch.device("meta"):
        categories = torch.zeros(2, len(rows), dtype=torch.long)
        return DLRM(rows), (torch.zeros(2, NUMERIC), categories, torch.zeros(2))
