"""As people ship them: a detector of point clouds with numpy between its files, and BART's encoder
and decoder, which share their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Parts = Mapping[str, Callable[..., Any]]
_SIDE = 6


class VoxelEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(points).transpose(1, 2))).transpose(1, 2)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(6, 8, 3, padding=1)
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1)

    def forward(self, grid: torch.Tensor) -> dict[str, torch.Tensor]:
        features = torch.relu(self.shared(grid))
        return {"boxes": self.boxes(features), "scores": torch.sigmoid(self.scores(features))}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = VoxelEncoder(), Head()


def detect(parts: Parts, batch: Mapping[str, torch.Tensor]) -> Any:
    """Each point's features are added into the cell that it lies in."""
    features, points = parts["encoder"](batch["points"]).numpy(), batch["points"].numpy()
    grid = np.zeros((len(points), 6, _SIDE, _SIDE), np.float32)
    cells = np.clip(points[..., :2] * 2 + _SIDE / 2, 0, _SIDE - 1).astype(np.int64)
    for sample, row in enumerate(cells):
        for point, (x, y) in enumerate(row):
            grid[sample, :, x, y] += features[sample, point]
    return parts["head"](torch.from_numpy(grid))


def detector() -> nn.Module:
    return Detector().eval()


class BartEncoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return self.encoder(input_ids=source).last_hidden_state


class BartDecoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head = model.model.decoder, model.lm_head

    def forward(self, tokens: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        hidden = self.decoder(input_ids=tokens, encoder_hidden_states=memory, use_cache=False)
        return self.head(hidden.last_hidden_state[:, -1])


class Bart(nn.Module):
    def __init__(self) -> None:
        from transformers import BartConfig, BartForConditionalGeneration

        super().__init__()
        torch.manual_seed(0)
        sizes = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in
                 (("layers", 1), ("ffn_dim", 20), ("attention_heads", 2))}  # fmt: skip
        config = BartConfig(vocab_size=24, d_model=16, max_position_embeddings=16, **sizes)
        config._attn_implementation = "eager"
        model = BartForConditionalGeneration(config)
        self.encoder, self.decoder = BartEncoder(model), BartDecoder(model)


def translate(parts: Parts, batch: Mapping[str, torch.Tensor]) -> Any:
    memory = parts["encoder"](batch["source"])
    tokens, steps = torch.full((len(memory), 2), 2), []
    for _ in range(3):
        steps.append(parts["decoder"](memory=memory, tokens=tokens))
        tokens = torch.cat([tokens, steps[-1].argmax(-1, keepdim=True)], dim=1)
    return {"steps": torch.stack(steps, dim=1), "tokens": tokens}


def bart() -> nn.Module:
    return Bart().eval()
