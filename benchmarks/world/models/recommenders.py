"""Recommenders and rankers with embedding tables, feature crosses and two towers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

SIZES = (400, 60, 30, 12)
NUMBERS = 5
ITEMS = 80


class Tables(nn.Module):
    """One embedding table per category: (batch, categories) to (batch, categories, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in SIZES)

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        columns = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        return torch.stack(columns, dim=1)


class Dlrm(nn.Module):
    """DLRM: products of all pairs of embeddings and the numbers; returns a click probability."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables(8)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(5, 5, -1))

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        vectors = torch.cat([dense.unsqueeze(1), self.tables(categories)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([dense, crossed], dim=1)) - 2.0)


class WideAndDeep(nn.Module):
    """The sum of a linear model of the categories and a deep one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Tables(1)
        self.deep = Tables(8)
        self.mlp = nn.Sequential(
            nn.Linear(32 + NUMBERS, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        deep = torch.cat([self.deep(categories).flatten(1), numbers], dim=1)
        return (self.wide(categories).sum(1) + self.mlp(deep))[:, 0]


class CrossNetwork(nn.Module):
    """DCN v2: crosses of all features and a deep network, with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        width = 32 + NUMBERS
        self.tables = Tables(8)
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(width, 24), nn.ReLU())
        self.click, self.buy = nn.Linear(width + 24, 1), nn.Linear(width + 24, 1)

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.cat([self.tables(categories).flatten(1), numbers], dim=1)
        crossed = first
        for cross in self.crosses:
            crossed = first * torch.tanh(cross(crossed)) + crossed
        features = torch.cat([crossed, self.deep(first)], dim=1)
        click = torch.sigmoid(self.click(features) - 3.0)
        return click, click * torch.sigmoid(self.buy(features) - 2.0)


class FactorizationMachine(nn.Module):
    """DeepFM: the square of the sum minus the sum of squares of the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables = Tables(1), Tables(8)
        self.deep = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        vectors = self.tables(categories)
        crossed = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        scores = self.linear(categories).sum(1) + 0.1 * crossed + self.deep(vectors.flatten(1))
        return scores + 0.1 * numbers.sum(1, keepdim=True)


class MatrixFactorization(nn.Module):
    """The product of a user's and an item's vector, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(SIZES[0], 16), nn.Embedding(SIZES[1], 16)
        self.user_bias, self.item_bias = nn.Embedding(SIZES[0], 1), nn.Embedding(SIZES[1], 1)

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        user, item = categories[:, 0], categories[:, 1]
        product = (self.users(user) * self.items(item)).sum(1)
        return product + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0] + 3.5


class TwoTowers(nn.Module):
    """Embeddings of length one of a user and an item, and their cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables(8)
        self.user = nn.Sequential(nn.Linear(16 + NUMBERS, 24), nn.ReLU(), nn.Linear(24, 12))
        self.item = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12))

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vectors = self.tables(categories).flatten(1)
        user = functional.normalize(self.user(torch.cat([vectors[:, :16], numbers], 1)), dim=1)
        item = functional.normalize(self.item(vectors[:, 16:]), dim=1)
        return user, item, (user * item).sum(1)


class NextItem(nn.Module):
    """GRU4Rec: scores of the next item, with -1e9 for items of the history."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 16, padding_idx=0)
        self.gru = nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, ITEMS)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.items(history))
        scores = self.head(states[:, -1])
        visited = functional.one_hot(history, ITEMS).sum(1) > 0
        return scores.masked_fill(visited, -1e9)
