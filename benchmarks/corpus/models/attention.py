"""Transformers: one over patches of an image, one over tokens with padding."""

from __future__ import annotations

import math

import torch
from torch import nn


class Encoder(nn.Module):
    """A pre-norm encoder layer: attention and a two-layer perceptron, each with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 2 * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """A vision transformer with patches of 8 x 8, a class token and learned positions."""

    def __init__(self, classes: int = 10, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.5)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.2)
        self.block1 = Encoder(width, 4)
        self.block2 = Encoder(width, 4)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.fc(self.norm(self.block2(self.block1(x)))[:, 0])


class SelfAttention(nn.Module):
    """Attention written as scaled dot products, with a padding mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = 1.0 / math.sqrt(width // heads)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.softmax = nn.Softmax(dim=-1)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = self.split(query), self.split(key), self.split(value)
        scores = query @ key.transpose(-1, -2) * self.scale
        scores = scores.masked_fill(padding[:, None, None, :], -1e9)
        mixed = self.softmax(scores) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape (batch, length, width) to (batch, heads, length, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TokenClassifier(nn.Module):
    """A token classifier with positions, masked attention and the mean over unpadded tokens."""

    def __init__(self, classes: int = 6, vocabulary: int = 120, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(64, width)
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, 4)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 64)
        self.gelu = nn.GELU()
        self.down = nn.Linear(64, width)
        self.fc = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == 0
        indices = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(indices)
        x = x + self.attention(self.norm1(x), padding)
        x = x + self.down(self.gelu(self.up(self.norm2(x))))
        mask = (~padding).to(x.dtype).unsqueeze(-1)
        return self.fc((x * mask).sum(1) / mask.sum(1).clamp(min=1.0))
