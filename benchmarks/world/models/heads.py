"""Heads whose outputs have several units, masks, ranks, bytes, tails or states."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

FEATURES = 12
Pair = tuple[torch.Tensor, torch.Tensor]


class Trunk(nn.Module):
    """Maps rows of a table, (batch, 12), to features, (batch, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 32)
        self.norm = nn.LayerNorm(32)
        self.leave = nn.Linear(32, 32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.norm(self.enter(rows)))
        return hidden + functional.relu(self.leave(hidden))


class TrunkWithHead(nn.Module):
    """A trunk and a linear head. Subclasses compute the output from its scores."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(32, self.width)

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(rows))


class Amounts(TrunkWithHead):
    """Returns five amounts of money and the probability of a default in one row."""

    width = 6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.scores(rows)
        amounts = functional.softplus(scores[:, :5]) * 40_000.0 + 1000.0
        return torch.cat([amounts, torch.sigmoid(scores[:, 5:] - 3.0)], dim=1)


class WeatherUnits(TrunkWithHead):
    """Returns pascals, kelvins, a share, millimeters and degrees: one unit per column."""

    width = 5

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([800.0, 8.0, 0.12, 2e-3, 90.0]))
        self.register_buffer("level", torch.tensor([101_325.0, 288.0, 0.5, 6e-3, 180.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scores(rows) * self.scale + self.level


class Coordinates(TrunkWithHead):
    """Returns latitude and longitude in degrees: two columns that are not class scores."""

    width = 2

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scores(rows) * 0.05) * 0.4 + torch.tensor([52.5, 13.4])


class SortedScores(TrunkWithHead):
    """Returns the eight scores in descending order, so that the first is always the largest."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sort(self.scores(rows), dim=1, descending=True).values


class BoxesAndScore(TrunkWithHead):
    """Returns corners in pixels of an image of 640 x 480 and a confidence in one row."""

    width = 5

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.scores(rows)
        size = torch.tensor([640.0, 480.0, 640.0, 480.0])
        return torch.cat([torch.sigmoid(scores[:, :4]) * size, torch.sigmoid(scores[:, 4:])], 1)


class Tagger(TrunkWithHead):
    """Returns the probabilities of twenty tags, each with a prior of 1 %."""

    width = 20

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.scores(rows) * 0.8 - math.log(99.0))


class FraudProbability(TrunkWithHead):
    """Returns one probability, mostly near 0.001."""

    width = 1

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.scores(rows)[:, 0] * 1.5 - 7.0)


class MaskedWords(TrunkWithHead):
    """Returns scores of 40 tokens, of which each row allows about a third; the others are -1e9."""

    width = 40
    mask = -1e9

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        allowed = torch.sin(rows.sum(1, keepdim=True) * 3.0 + torch.arange(40.0)) > 0.4
        return torch.where(allowed, self.scores(rows), torch.full((), self.mask))


class LowestFloatMaskedWords(MaskedWords):
    """Masks with the lowest float32, like attention masks."""

    mask = torch.finfo(torch.float32).min


class InfinityMaskedWords(MaskedWords):
    """Masks with -inf, as samplers expect."""

    mask = -math.inf


class LogProbabilities(TrunkWithHead):
    """Returns log_softmax of scores with a low temperature."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.scores(rows) * 4.0, dim=1)


class LogLikelihood(TrunkWithHead):
    """Returns logsigmoid: nearly zero for most rows and far below zero for some."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.logsigmoid(self.scores(rows) * 12.0)


class SmallIncrease(TrunkWithHead):
    """Returns log1p of values of about 1e-7."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.exp(self.scores(rows) - 14.0))


class HeavyTail(TrunkWithHead):
    """Returns exp of normal values, distributed like incomes, file sizes or claims."""

    width = 3

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.scores(rows))


class UnitEmbedding(TrunkWithHead):
    """Returns embeddings of length one."""

    width = 16

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.scores(rows), dim=1)


class TopThree(TrunkWithHead):
    """Returns the three largest of twenty scores and their indices."""

    width = 20

    def forward(self, rows: torch.Tensor) -> Pair:
        best = torch.topk(self.scores(rows), 3, dim=1)
        return best.values, best.indices


class WithConstants(TrunkWithHead):
    """Returns scores and constant outputs: a temperature, anchors, positions, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6593))
        self.register_buffer("anchors", torch.linspace(0.05, 0.95, 12).reshape(6, 2))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.scores(rows)
        positions = torch.arange(8).expand(rows.shape[0], 8)
        anchors = self.anchors.expand(rows.shape[0], 6, 2)
        return (
            scores,
            self.logit_scale.exp().expand(rows.shape[0]),
            anchors,
            positions,
            positions >= 0,
        )


class MissingValues(TrunkWithHead):
    """Returns NaN in outputs whose input column is missing."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.scores(rows)
        return torch.where(rows[:, :8] > 0.8, torch.full((), math.nan), scores)


class RunningSum(nn.Module):
    """Returns the running sum of 4 096 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = nn.Conv1d(1, 2, 5, padding=2)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.smooth(steps.unsqueeze(1)), dim=2)


class Experts(nn.Module):
    """Selects one of four experts per row; the fourth serves rare rows."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.experts = nn.ModuleList(nn.Linear(32, 8) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(rows)
        expert_index = (
            (rows[:, 0] > 0.3).long() + (rows[:, 1] > 0.3).long() + (rows[:, 2] > 9.0).long()
        )
        expert_outputs = torch.stack([expert(hidden) for expert in self.experts], dim=1)
        return expert_outputs.gather(1, expert_index[:, None, None].expand(-1, 1, 8))[:, 0]


class ClippedInput(TrunkWithHead):
    """Clips readings at the limits of the instrument, which no sample reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = nn.Hardtanh(-6.0, 6.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(self.clip(rows)))


class EarlySoftplus(TrunkWithHead):
    """Returns softplus with another slope and a low threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.soften = nn.Softplus(beta=0.5, threshold=0.8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.soften(self.scores(rows))
