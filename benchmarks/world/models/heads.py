"""Heads: outputs in several units, masks, ranks, bytes, tails, states."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

FEATURES = 12
Pair = tuple[torch.Tensor, torch.Tensor]


class Trunk(nn.Module):
    """Rows of a table, (batch, 12), to (batch, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 32)
        self.norm = nn.LayerNorm(32)
        self.leave = nn.Linear(32, 32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.norm(self.enter(rows)))
        return hidden + functional.relu(self.leave(hidden))


class Headed(nn.Module):
    """A trunk and a linear head; what is made of its scores is the subclass."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(32, self.width)

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(rows))


class Money(Headed):
    """Five sums of money and the probability of a default, in one row."""

    width = 6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.scores(rows)
        sums = functional.softplus(scores[:, :5]) * 40_000.0 + 1000.0
        return torch.cat([sums, torch.sigmoid(scores[:, 5:] - 3.0)], dim=1)


class Weather(Headed):
    """Pascal, kelvin, share, millimetres, degrees: a unit a column."""

    width = 5

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([800.0, 8.0, 0.12, 2e-3, 90.0]))
        self.register_buffer("level", torch.tensor([101_325.0, 288.0, 0.5, 6e-3, 180.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scores(rows) * self.scale + self.level


class Place(Headed):
    """Latitude and longitude in degrees: two columns that are no classes."""

    width = 2

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scores(rows) * 0.05) * 0.4 + torch.tensor([52.5, 13.4])


class SortedScores(Headed):
    """The eight scores in falling order: the first is always the largest."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sort(self.scores(rows), dim=1, descending=True).values


class BoxesAndScore(Headed):
    """Corners in pixels of a 640 by 480 picture, and a confidence, in one row."""

    width = 5

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.scores(rows)
        size = torch.tensor([640.0, 480.0, 640.0, 480.0])
        return torch.cat([torch.sigmoid(scores[:, :4]) * size, torch.sigmoid(scores[:, 4:])], 1)


class Tagger(Headed):
    """Twenty tags, each with the usual prior of one per cent."""

    width = 20

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.scores(rows) * 0.8 - math.log(99.0))


class Fraud(Headed):
    """One probability, mostly near a thousandth."""

    width = 1

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.scores(rows)[:, 0] * 1.5 - 7.0)


class MaskedWords(Headed):
    """Scores of 40 words, of which a row allows about a third; the others are -1e9."""

    width = 40
    mask = -1e9

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        allowed = torch.sin(rows.sum(1, keepdim=True) * 3.0 + torch.arange(40.0)) > 0.4
        return torch.where(allowed, self.scores(rows), torch.full((), self.mask))


class LeastWords(MaskedWords):
    """The same with the least float32 there is, as attention masks have it."""

    mask = torch.finfo(torch.float32).min


class LostWords(MaskedWords):
    """The same with -inf, as samplers want it."""

    mask = -math.inf


class LogProbabilities(Headed):
    """log_softmax of sharp scores."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.scores(rows) * 4.0, dim=1)


class LogLikelihood(Headed):
    """logsigmoid: of most rows nearly zero, of some far below."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.logsigmoid(self.scores(rows) * 12.0)


class SmallIncrease(Headed):
    """log1p of changes of a ten-millionth."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.exp(self.scores(rows) - 14.0))


class HeavyTail(Headed):
    """exp of a normal: incomes, sizes of files, claims."""

    width = 3

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.scores(rows))


class Embedded(Headed):
    """Embeddings of length one."""

    width = 16

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.scores(rows), dim=1)


class Ranked(Headed):
    """The three best of twenty, and who they are."""

    width = 20

    def forward(self, rows: torch.Tensor) -> Pair:
        best = torch.topk(self.scores(rows), 3, dim=1)
        return best.values, best.indices


class WithConstants(Headed):
    """Scores beside outputs that no sample moves: a temperature, anchors, positions, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6593))
        self.register_buffer("anchors", torch.linspace(0.05, 0.95, 12).reshape(6, 2))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.scores(rows)
        places = torch.arange(8).expand(rows.shape[0], 8)
        anchors = self.anchors.expand(rows.shape[0], 6, 2)
        return scores, self.logit_scale.exp().expand(rows.shape[0]), anchors, places, places >= 0


class Gaps(Headed):
    """Columns that are missing give NaN in the answers that need them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.scores(rows)
        return torch.where(rows[:, :8] > 0.8, torch.full((), math.nan), scores)


class Running(nn.Module):
    """The running sum of 4 096 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = nn.Conv1d(1, 2, 5, padding=2)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.smooth(steps.unsqueeze(1)), dim=2)


class Experts(nn.Module):
    """Four experts of which a gate takes one a row; the fourth is for rows that are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.experts = nn.ModuleList(nn.Linear(32, 8) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(rows)
        chosen = (rows[:, 0] > 0.3).long() + (rows[:, 1] > 0.3).long() + (rows[:, 2] > 9.0).long()
        answers = torch.stack([expert(hidden) for expert in self.experts], dim=1)
        return answers.gather(1, chosen[:, None, None].expand(-1, 1, 8))[:, 0]


class Limited(Headed):
    """Readings are clipped where the instrument ends: no sample gets there."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = nn.Hardtanh(-6.0, 6.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(self.clip(rows)))


class Softened(Headed):
    """softplus with a slope of its own, that ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.soften = nn.Softplus(beta=0.5, threshold=0.8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.soften(self.scores(rows))
