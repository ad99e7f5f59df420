"""Modules that can't be exported: one for each frequent reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.export.custom_example import ShiftedSwish


class Eigenvalues(nn.Module):
    """No exporter writes eigenvalues. (batch, 4, 4), as everything here. tanh keeps the values
    finite: LAPACK crashes on others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.linalg.eigvals(x).real.sum().tanh()


class GridSample(nn.Module):
    """In the TorchScript-based exporter since opset 16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.zeros(x.shape[0], 4, 4, 2)
        return nn.functional.grid_sample(x[:, None], grid, align_corners=False)[:, 0]


class Attention(nn.Module):
    """Fused where torch may take its fast path, else since opset 14."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(x, x, x, need_weights=False)[0]
        return mixed


class Antialias(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x[:, None], (3, 3), mode="bilinear", antialias=True)


class Fourier(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft2(x).abs()


class OddPool(nn.Module):
    """4 into 3 cells: the operator is known, this use of it is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(x[:, None], (3, 3))


class Median(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.median(-1)[0]


class DictInput(nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return x["image"] * 2


class TextInput(nn.Module):
    def forward(self, x: torch.Tensor, mode: Any) -> torch.Tensor:
        return x * 2 if mode == "double" else x


class DictOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"double": x * 2}


class TextOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, "cat"


class Branch(nn.Module):
    """A Python `if` on data, which torch.export refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class Sorted(nn.Module):
    """TorchScript has no lambda."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sorted(x, key=lambda row: float(row.sum()))[0]


class LoopedEigenvalues(nn.Module):
    """The operator stands in a branch in a loop of a scripted module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[0]):
            if bool(x.sum() > 0):
                x = x + torch.linalg.eigvals(x).real.sum().tanh()
        return x


class Conditional(nn.Module):
    """The operator stands in a subgraph of torch.cond."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def decomposed(y: torch.Tensor) -> torch.Tensor:
            return y * torch.linalg.eigvals(y).real.sum().tanh()

        return torch.cond(x.sum() > 0, decomposed, lambda y: y * 2, (x,))


class WithoutFake(nn.Module):
    """A custom operator that can't say its shape: torch.export needs that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.parity_gate_tests.without_fake(x)


class Swap(nn.Module):
    """Resolved by the exporter's own trace, not in a traced submodule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.swapaxes(x, 1, 2)


class NeedsShape(nn.Module):
    """The exporter needs the type of what `Swap` returns, which a trace does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Swap()
        self.second = Swap()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.first(x) + 1).mean((-2, -1), keepdim=True) * 2 - x
        return self.second(nn.functional.layer_norm(x, (4,)))


class Structured(nn.Module):
    """Keyword inputs and a dict of outputs around what can't be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Eigenvalues()
        self.head = GridSample()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> Any:
        return {"scaled": self.head(self.block(x)) * scale, "given": x}


class Twins(nn.Module):
    """Two lists whose modules have the same names: a trace tells only those."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Sequential(Eigenvalues())])
        self.decoder = nn.ModuleList([nn.Sequential(Eigenvalues())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder[0](self.encoder[0](x))


class Several(nn.Module):
    """Several operators in several submodules, lists and sequences of them."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.left = nn.ModuleList([nn.Sequential(nn.ReLU(), Eigenvalues()) for _ in range(blocks)])
        self.right = nn.ModuleDict({"odd": ShiftedSwish(), "even": nn.Sequential(Eigenvalues())})
        self.head = GridSample()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.left:
            x = block(x)
        for block in self.right.values():
            x = block(x)
        return self.head(x)


@torch.library.custom_op("parity_gate_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def register_without_lowering(symbolics: Any) -> None:
    """A symbolic function that writes an operator which no runtime has."""

    def write(g: Any, x: Any, shift: Any) -> Any:
        return g.op("mydomain::ShiftedSwish", x, shift).setType(x.type())

    symbolics.legacy("example::shifted_swish", write)
