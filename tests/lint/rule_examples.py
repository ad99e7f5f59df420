"""For each rule a model that exports without an error but computes wrong values, and its
rewrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gate.decision.check_result import Verdict
from gate.errors import ModelError

WIDTH = 6


class Net(nn.Module):
    """Map (batch, 6) to (batch, 4); subclasses put the fault into `before`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.before(x))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class NumpyMaximum(Net):
    def before(self, x):
        return x / float(np.abs(x.detach().numpy()).max())


class TensorMaximum(Net):
    def before(self, x):
        return x / torch.amax(torch.abs(x))


class FloatOfTensor(Net):
    def before(self, x):
        return x * float(x[0, 0])


class ElementOfTensor(Net):
    def before(self, x):
        return x * x[0, 0]


class Item(Net):
    def before(self, x):
        return x / x.abs().max().item()


class ToList(Net):
    def before(self, x):
        return x * torch.tensor(x[0].tolist())


class FirstRow(Net):
    def before(self, x):
        return x * x[0]


class IntOfShape(Net):
    def before(self, x):
        return x - x.sum(0, keepdim=True) / int(x.shape[0])


class ShapeAsItIs(Net):
    def before(self, x):
        return x - x.sum(0, keepdim=True) / x.shape[0]


class Length(Net):
    def before(self, x):
        return x - x.sum(0, keepdim=True) / len(x)


class ReadData(Net):
    def before(self, x):
        scale = x.data.abs().amax(1, keepdim=True)
        return x / scale


class WriteData(Net):
    def before(self, x):
        y = x * 1.0
        y.data.mul_(2.0).add_(x.sum(1, keepdim=True))
        return y


class Detached(Net):
    def before(self, x):
        scale = x.detach().abs().amax(1, keepdim=True)
        return x / scale


class OutOfPlace(Net):
    def before(self, x):
        return x * 2.0 + x.sum(1, keepdim=True)


class InPlaceShape(Net):
    def before(self, x):
        rows = x.shape[0]
        padded = rows
        padded += 2
        return x * (padded / rows)


class NewShape(Net):
    def before(self, x):
        rows = x.shape[0]
        padded = rows + 2
        return x * (padded / rows)


class If(Net):
    def before(self, x):
        if x.sum() > 2.0:
            x = x * 2.0
        return x


class Where(Net):
    def before(self, x):
        return torch.where(x.sum() > 2.0, x * 2.0, x)


class While(Net):
    def before(self, x):
        while x.abs().max() > 2.0:
            x = x * 0.5
        return x


class Halvings(Net):
    def before(self, x):
        turns = torch.ceil(torch.log2(x.abs().max() / 2.0)).clamp(min=0.0)
        return x * torch.pow(0.5, turns)


class For(Net):
    def before(self, x):
        total = torch.zeros(WIDTH)
        for row in x:
            total = total + row * row
        return x + total


class WholeBatch(Net):
    def before(self, x):
        return x + (x * x).sum(0)


class NegativeIndices(Net):
    def before(self, x):
        rows, columns = torch.tensor([0, -1, 0, -1, 1, -1]), torch.tensor([-1, 0, -2, 0, 1, 2])
        return x.reshape(-1, 2, 3)[:, rows, columns]


class IndicesFromTheFront(Net):
    def before(self, x):
        rows, columns = torch.tensor([0, 1, 0, 1, 1, 1]), torch.tensor([2, 0, 1, 0, 1, 2])
        return x.reshape(-1, 2, 3)[:, rows, columns]


class WriteBehindNone(Net):
    def before(self, x):
        y = x * 1.0
        y[:, None, torch.tensor([0, 2])] = x[:, None, :2]
        return y


class WriteByRankTwo(Net):
    def before(self, x):
        y = x * 1.0
        y[:, torch.tensor([[0, 1], [2, 3]])] = x[:, 2:6].reshape(-1, 2, 2)
        return y


class WriteByRankOne(Net):
    def before(self, x):
        y = x * 1.0
        y[:, torch.tensor([0, 1, 2, 3])] = x[:, 2:6]
        return y


class WriteInPlace(Net):
    def before(self, x):
        y = x * 1.0
        y[:, torch.tensor([0, 2])] = x[:, :2]
        return y


class MaskOfRows(Net):
    """Correct only for one row; if there are as many rows as columns, it masks columns."""

    def before(self, x):
        y = x * 1.0
        y[x[:, 0] > 0] = x.mean()
        return y


class MaskOfElements(Net):
    def before(self, x):
        return torch.where(x[:, :1] > 0, x.mean(), x)


class BroadcastSlice(Net):
    def before(self, x):
        y = x * 1.0
        y[:, 1:3] = x[:, 3:4]
        return y


class ExpandedSlice(Net):
    def before(self, x):
        y = x * 1.0
        y[:, 1:3] = x[:, 3:4].expand(-1, 2)
        return y


class TextInput(Net):
    def forward(self, x, mode: str = "plain"):
        return self.fc(x) if mode == "plain" else -self.fc(x)


class TextInInit(Net):
    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x):
        return self.fc(x) if self.mode == "plain" else -self.fc(x)


class DictInput(Net):
    def forward(self, inputs: dict[str, torch.Tensor]):
        return self.fc(inputs["image"] * 2 + inputs["mask"])


class ByName(nn.Module):
    """Call a model that takes a dict, as its user does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image, mask):
        return self.model({"image": image, "mask": mask})


class TwoInputs(Net):
    def forward(self, image, mask):
        return self.fc(image * 2 + mask)


class TextOutput(Net):
    def forward(self, x):
        return self.fc(x), "cat"


class DictOutput(Net):
    def forward(self, x):
        scores = self.fc(x)
        return {"scores": scores, "doubled": scores * 2}


class TupleOutput(Net):
    def forward(self, x):
        scores = self.fc(x)
        return scores, scores * 2


class Dropout(Net):
    def before(self, x):
        return functional.dropout(x, 0.5)


class DropoutInTraining(Net):
    def before(self, x):
        return functional.dropout(x, 0.5, self.training)


class WhileTracing(Net):
    def before(self, x):
        if torch.jit.is_tracing():
            return x * 1.01
        return x


class WhileScripting(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_scripting():
            return self.fc(x * 1.01)
        return self.fc(x)


class WhileExporting(Net):
    def before(self, x):
        if torch.compiler.is_exporting():
            return x * 1.01
        return x


class Plain(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Always(Net):
    def before(self, x):
        return x * 1.0


class RanksOfBranches(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        z = y.unsqueeze(1) if bool(x.sum() > 0) else y
        return z.transpose(-1, -2).flatten(1)


class SameRank(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        z = y.unsqueeze(1) if bool(x.sum() > 0) else y.unsqueeze(1) * 1.0
        return z.transpose(-1, -2).flatten(1)


class SoftplusThreshold(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(functional.softplus(x, threshold=0.5))


class SoftplusModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Softplus(beta=2, threshold=1)

    def before(self, x):
        return self.soft(x)


class SoftplusWritten(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.where(x > 0.5, x, functional.softplus(x)))


class PoolDivisor(Net):
    def before(self, x):
        pooled = functional.avg_pool2d(x.reshape(-1, 1, 2, 3), (1, 3), divisor_override=2)
        return x + pooled.sum((1, 2, 3))[:, None]


class PoolTimes(Net):
    def before(self, x):
        pooled = functional.avg_pool2d(x.reshape(-1, 1, 2, 3), (1, 3)) * 1.5
        return x + pooled.sum((1, 2, 3))[:, None]


class Manhattan(Net):
    def before(self, x):
        a, b = x.reshape(-1, 2, 3), x.reshape(-1, 2, 3) * 2
        return torch.cat([torch.cdist(a, b, p=1.0).flatten(1), x[:, :2]], 1)


class ManhattanWritten(Net):
    def before(self, x):
        a, b = x.reshape(-1, 2, 3), x.reshape(-1, 2, 3) * 2
        between = (a[:, :, None] - b[:, None]).abs().sum(-1)
        return torch.cat([between.flatten(1), x[:, :2]], 1)


class PairwiseEpsilon(Net):
    def before(self, x):
        return x * functional.pairwise_distance(x, x.flip(1), eps=0.1, keepdim=True)


class PairwiseWritten(Net):
    def before(self, x):
        return x * (x - x.flip(1) + 0.1).square().sum(1, keepdim=True).sqrt()


class FractionalCorrection(Net):
    def before(self, x):
        return x * torch.std(x, 1, correction=0.5, keepdim=True)


class CorrectionWritten(Net):
    def before(self, x):
        centered = x - x.mean(1, keepdim=True)
        return x * (centered.square().sum(1, keepdim=True) / 5.5).sqrt()


class ScatterMean(Net):
    def before(self, x):
        places = torch.tensor([0, 0, 2, 2, 1, 1]).expand(x.shape[0], -1)
        return x.scatter_reduce(1, places, x.flip(1), reduce="mean")


class ScatterMeanWritten(Net):
    def before(self, x):
        places = torch.tensor([0, 0, 2, 2, 1, 1]).expand(x.shape[0], -1)
        summed = x.scatter_add(1, places, x.flip(1))
        return summed / torch.ones_like(x).scatter_add(1, places, torch.ones_like(x))


class Accumulate(Net):
    def before(self, x):
        y = x.t().index_put((torch.tensor([0, 0, 2]),), x.t()[:3], accumulate=True)
        return y.t()


class AccumulateByScatter(Net):
    def before(self, x):
        places = torch.tensor([0, 0, 2]).expand(x.shape[0], -1)
        return x.scatter_add(1, places, x[:, :3])


class Limited(Net):
    """Most rows of the table exceed max_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, WIDTH, max_norm=1.0)

    def before(self, x):
        return self.table(x).mean(1)


class LimitedBag(Limited):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(12, WIDTH, max_norm=1.0)

    def before(self, x):
        return self.table(x)


class LimitedFunction(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(functional.embedding(x, self.table, max_norm=1.0).mean(1))


class LimitedWritten(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x)
        norm = torch.sqrt((rows * rows).sum(-1, keepdim=True))
        return self.fc(torch.where(norm > 1.0, rows / (norm + 1e-7), rows).mean(1))


class IndexAdd(Net):
    def before(self, x):
        groups = torch.tensor([0, 0, 2, 2, 1, 1])
        return x + torch.zeros(x.shape[0], WIDTH).index_add(1, groups, x)


class IndexAddInPlace(Net):
    """The groups depend on the input."""

    def before(self, x):
        y = torch.zeros(WIDTH, x.shape[0])
        y.index_add_(0, x[0].abs().long().clamp(max=1), x.t())
        return x + y.t()


class OneHot(Net):
    def before(self, x):
        groups = torch.tensor([0, 0, 2, 2, 1, 1])
        return x + x @ functional.one_hot(groups, WIDTH).float()


class OneHotOfInput(Net):
    def before(self, x):
        groups = functional.one_hot(x[0].abs().long().clamp(max=1), WIDTH)
        return x + x @ groups.float()


class IntegerMean(Net):
    def before(self, x):
        return x + (x * 5).long().mean(1, keepdim=True, dtype=torch.float32)


class FloatMean(Net):
    def before(self, x):
        return x + (x * 5).long().float().mean(1, keepdim=True)


class LogAddExp(Net):
    def before(self, x):
        return torch.logaddexp(x * 90, x.flip(1) * 90)


class LogSumExp(Net):
    def before(self, x):
        return torch.logsumexp(torch.stack([x * 90, x.flip(1) * 90]), 0)


class FloorDivide(Net):
    def before(self, x):
        return x + x // 0.7


class DivideFloor(Net):
    def before(self, x):
        return x + torch.div(x, 0.7, rounding_mode="floor")


class LogSigmoid(Net):
    def before(self, x):
        return functional.logsigmoid(x * 20)


class MinusSoftplus(Net):
    def before(self, x):
        return -functional.softplus(-x * 20)


class CosineEpsilon(Net):
    def before(self, x):
        return x * functional.cosine_similarity(x, x.flip(1), eps=5.0)[:, None]


class CosineWritten(Net):
    def before(self, x):
        a, b = functional.normalize(x, eps=5.0), functional.normalize(x.flip(1), eps=5.0)
        return x * (a * b).sum(1, keepdim=True)


class LongRows(nn.Module):
    """Cut rows to 5 columns. The example has fewer columns, so that the trace lacks the cut."""

    def forward(self, x):
        if x.shape[1] > 5:
            x = x[:, :5]
        return x * 2.0


class Cut(nn.Module):
    def forward(self, x):
        return x[:, :5] * 2.0


def rows(count: int, columns: int = WIDTH, seed: int = 0) -> torch.Tensor:
    """Return samples of shape (count, columns)."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((count, columns)).astype(np.float32))


def ids(count: int, seed: int = 0) -> torch.Tensor:
    """Return table indices of shape (count, 3)."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 12, (count, 3)))


def _plain() -> tuple[Any, ...]:
    return (rows(4),)


@dataclass(frozen=True)
class Case:
    """A model, its rewrite, and the arguments of their exports."""

    code: str
    wrong: Callable[[], nn.Module]
    right: Callable[[], nn.Module]
    strategy: str = "traced"
    example: Callable[[], tuple[Any, ...]] = _plain
    right_example: Callable[[], tuple[Any, ...]] | None = None
    """Other inputs for the rewrite."""
    inputs: dict[str, Callable[[], torch.Tensor]] = field(default_factory=lambda: {"x": samples})
    outputs: tuple[str, ...] = ("y",)
    right_outputs: tuple[str, ...] | None = None
    """Other input names for the rewrite."""
    caller: Callable[[nn.Module], nn.Module] = lambda model: model
    """A wrapper that calls the wrong model with tensors."""
    batch_size: int = 4
    verdict: Verdict = Verdict.FAIL
    """The verdict; ERROR if the model itself is random, so that nothing can be compared."""
    raises: type[Exception] | None = None
    """Whether the check can't start."""


def samples() -> torch.Tensor:
    """Return eight rows that take both branches of `If`."""
    return rows(8)


def others() -> torch.Tensor:
    """Return eight other rows."""
    return rows(8, seed=1)


def _by_name() -> tuple[Any, ...]:
    # The user's dict with its keys in another order.
    return ({"mask": rows(4, seed=2), "image": rows(4)}, {})


_IDS: dict[str, Callable[[], torch.Tensor]] = {"x": lambda: ids(8, seed=1)}


CASES = (
    Case("TRC001", NumpyMaximum, TensorMaximum),
    Case("TRC001", FloatOfTensor, ElementOfTensor),
    Case("TRC002", Item, TensorMaximum),
    Case("TRC003", ToList, FirstRow),
    Case("TRC004", IntOfShape, ShapeAsItIs),
    Case("TRC005", Length, ShapeAsItIs),
    Case("TRC006", ReadData, Detached),
    Case("TRC006", WriteData, OutOfPlace),
    Case("TRC006", WriteData, OutOfPlace, strategy="scripted"),
    Case("TRC007", InPlaceShape, NewShape),
    Case("TRC008", If, Where),
    Case("TRC008", While, Halvings),
    Case("TRC008", For, WholeBatch),
    Case("TRC009", NegativeIndices, IndicesFromTheFront),
    Case("TRC010", WriteBehindNone, WriteInPlace),
    Case("TRC010", WriteByRankTwo, WriteByRankOne),
    Case("TRC011", MaskOfRows, MaskOfElements, batch_size=WIDTH,
         example=lambda: (rows(WIDTH),), inputs={"x": lambda: rows(2 * WIDTH)}),
    Case("TRC011", BroadcastSlice, ExpandedSlice),
    Case("TRC012", TextInput, lambda: TextInInit("other"), example=lambda: (rows(4), "other"),
         right_example=_plain),
    Case("TRC012", DictInput, TwoInputs, example=_by_name, caller=ByName,
         right_example=lambda: (rows(4), rows(4, seed=2)),
         inputs={"image": samples, "mask": others}),
    Case("TRC012", TextOutput, Always, strategy="direct", raises=ModelError),
    Case("TRC012", DictOutput, TupleOutput, strategy="direct", outputs=("doubled", "scores"),
         right_outputs=("scores", "doubled")),
    Case("TRC012", TextInput, lambda: TextInInit("other"), strategy="dynamo",
         example=lambda: (rows(4), "other"), right_example=_plain),
    Case("TRC013", Dropout, DropoutInTraining, verdict=Verdict.ERROR),
    Case("TRC014", WhileTracing, Always),
    Case("TRC014", WhileScripting, Plain, strategy="scripted"),
    Case("TRC013", Dropout, DropoutInTraining, strategy="dynamo", verdict=Verdict.ERROR),
    Case("TRC014", WhileExporting, Always, strategy="dynamo"),
    Case("TRC015", RanksOfBranches, SameRank, strategy="scripted"),
    Case("TRC017", SoftplusThreshold, SoftplusWritten),
    Case("TRC017", SoftplusThreshold, SoftplusWritten, strategy="scripted"),
    Case("TRC017", SoftplusModule, SoftplusWritten),
    Case("TRC017", PoolDivisor, PoolTimes),
    Case("TRC017", PoolDivisor, PoolTimes, strategy="dynamo"),
    Case("TRC017", Manhattan, ManhattanWritten),
    Case("TRC017", PairwiseEpsilon, PairwiseWritten),
    Case("TRC017", FractionalCorrection, CorrectionWritten),
    Case("TRC017", ScatterMean, ScatterMeanWritten, strategy="dynamo"),
    Case("TRC018", Accumulate, AccumulateByScatter),
    Case("TRC018", IntegerMean, FloatMean, strategy="dynamo"),
    Case("TRC018", LogAddExp, LogSumExp, strategy="dynamo"),
    Case("TRC018", FloorDivide, DivideFloor),
    Case("TRC018", LogSigmoid, MinusSoftplus),
    Case("TRC018", LogSigmoid, MinusSoftplus, strategy="dynamo"),
    Case("TRC018", CosineEpsilon, CosineWritten),
    Case("TRC019", Limited, LimitedWritten, example=lambda: (ids(1),), inputs=_IDS),
    Case("TRC019", LimitedBag, LimitedWritten, example=lambda: (ids(1),), inputs=_IDS),
    Case("TRC019", LimitedFunction, LimitedWritten, strategy="scripted",
         example=lambda: (ids(1),), inputs=_IDS),
    Case("TRC020", IndexAdd, OneHot),
    Case("TRC020", IndexAddInPlace, OneHotOfInput),
    Case("TRC016", LongRows, Cut, example=lambda: (rows(4, 4),)),
)  # fmt: skip
