"""Random small faults that show: a wrapper of the model, or a copy with another setting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.nets.net import Drawn
from benchmarks.nets.pair import Outputs, run
from benchmarks.nets.proof import joined

FLOORS = 20.0
"""So many rounding errors of its own column a fault must be, to count as one that shows."""
_MISMATCHES = 3
"""So many integers must differ, beyond those at a tie."""

Change = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Fault:
    """A model to export instead."""

    name: str
    drawn: Drawn
    """The net; where the fault leaves out a part, with that part."""
    model: nn.Module

    def hidden(self, r32: list[Outputs], c: list[Outputs], r64: list[Outputs]) -> str:
        """Why the fault shows nowhere; empty: it shows. `c`: of the correct file."""
        faulty = run(self.model, self.drawn.samples, self.drawn.batch_size, double=True)
        most = 0.0
        for one, file, true, other in zip(r32, c, r64, faulty, strict=True):
            if one[0].dtype.kind != "f":
                differ = sum(int((a != b).sum()) for a, b in zip(true, other, strict=True))
                most = max(most, FLOORS if differ >= _MISMATCHES else 0.0)
                continue
            true_, effect = joined(true), np.abs(joined(other) - joined(true))
            own = np.maximum(np.abs(joined(one) - true_), np.abs(joined(file) - true_))
            own, effect = np.nan_to_num(own), np.nan_to_num(effect)
            scale = np.sqrt(np.square(np.nan_to_num(true_, posinf=0.0, neginf=0.0)).mean(axis=0))
            floor = np.maximum(own.max(axis=0), 2.0**-24 * scale)
            most = max(most, float((effect / np.maximum(floor, 1e-38)).max()))
        return "" if most >= FLOORS else f"the fault is {most:.2g} floors"


class Changed(nn.Module):
    """The net, with outputs changed."""

    def __init__(self, net: nn.Module, change: Change) -> None:
        super().__init__()
        self.net, self.change = net, change

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> Any:
        returned = self.net(first, second)
        if isinstance(returned, dict):
            return dict(zip(returned, self.change(list(returned.values())), strict=True))
        if isinstance(returned, torch.Tensor):
            return self.change([returned])[0]
        return tuple(self.change(list(returned)))


def draw_fault(drawn: Drawn) -> Fault:
    """The fault of a seed."""
    rng = np.random.default_rng([drawn.seed, 10])
    kinds = (_column, _column, _bias, _half, _epsilon, _shifted, _late, _unclamped)
    return kinds[rng.integers(len(kinds))](drawn, rng)


def _column(drawn: Drawn, rng: np.random.Generator) -> Fault:
    """One column of one output negated or scaled."""
    factor = -1.0 if rng.random() < 0.3 else float(1.0 + 10.0 ** rng.uniform(-5.0, -2.0))
    which = _floats(drawn, rng)
    share = rng.random()

    def change(made: list[torch.Tensor]) -> list[torch.Tensor]:
        one = made[which]
        if one.ndim < 2:
            made[which] = one * factor
        else:
            factors = torch.ones_like(one[:1])
            factors[..., int(share * one.shape[-1])] = factor
            made[which] = one * factors
        return made

    return Fault(f"column of out{which} by {factor:.6g}", drawn, Changed(drawn.model, change))


def _bias(drawn: Drawn, rng: np.random.Generator) -> Fault:
    """One bias of a head by a hundred-thousandth to a hundredth of the scale."""
    model: Any = copy.deepcopy(drawn.model)
    place = int(rng.integers(len(model.heads)))
    linear = model.heads[place].linear
    with torch.no_grad():
        unit = int(rng.integers(linear.out_features))
        part = float(10.0 ** rng.uniform(-5.0, -2.0))
        linear.bias[unit] += part * linear.weight.norm(dim=1).mean()
    return Fault(f"bias of head {place} by {part:.2g} of its scale", drawn, model)


def _half(drawn: Drawn, rng: np.random.Generator) -> Fault:
    """One row of one weight rounded to float16."""
    model = copy.deepcopy(drawn.model)
    weights = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    name, weight = weights[rng.integers(len(weights))]
    with torch.no_grad():
        row = weight[int(rng.integers(len(weight)))]
        row.copy_(row.half().float())
    return Fault(f"a row of {name} as float16", drawn, model)


def _epsilon(drawn: Drawn, rng: np.random.Generator) -> Fault:
    """Another eps in one normalisation; of nets without one, a column."""
    model = copy.deepcopy(drawn.model)
    norms = [(name, m) for name, m in model.named_modules() if hasattr(m, "eps")]
    if not norms:
        return _column(drawn, rng)
    name, norm = norms[rng.integers(len(norms))]
    norm.eps = float(norm.eps) * float(rng.choice([0.01, 10.0, 100.0]))
    return Fault(f"eps of {name} {norm.eps:g}", drawn, model)


def _shifted(drawn: Drawn, rng: np.random.Generator) -> Fault:
    """An output of integers off by one where its largest are; of nets without one, a column."""
    places = [p for p, one in enumerate(_example(drawn)) if one.dtype.kind in "iu"]
    if not places:
        return _column(drawn, rng)
    which = places[int(rng.integers(len(places)))]

    def change(made: list[torch.Tensor]) -> list[torch.Tensor]:
        one = made[which]
        made[which] = torch.where(one > one.float().mean().to(one.dtype), one - 1, one)
        return made

    return Fault(f"out{which} off by one above its mean", drawn, Changed(drawn.model, change))


def _late(drawn: Drawn, rng: np.random.Generator) -> Fault:
    """One sample of the last half wrong by a little: the one whose output is beyond all others."""
    which = _floats(drawn, rng)
    values = np.concatenate(
        [
            a.reshape(len(a), -1)[:, 0] if a.ndim else a.reshape(1)
            for a in run(drawn.model, drawn.samples, drawn.batch_size)[which]
        ]
    )
    early, late = values[: len(values) // 2], values[len(values) // 2 :]
    if not len(late) or not np.isfinite(values).all() or late.max() <= early.max():
        return _column(drawn, rng)
    edge, factor = (
        float((early.max() + late.max()) / 2),
        float(1.0 + 10.0 ** rng.uniform(-4.0, -2.0)),
    )

    def change(made: list[torch.Tensor]) -> list[torch.Tensor]:
        one = made[which]
        made[which] = torch.where(one > edge, one * factor, one)
        return made

    return Fault(
        f"out{which} by {factor:.6g} above {edge:.3g}", drawn, Changed(drawn.model, change)
    )


def _unclamped(drawn: Drawn, rng: np.random.Generator) -> Fault:
    """The reference clamps one output within the range of the samples; the file does not."""
    which = _floats(drawn, rng)
    values = np.concatenate([a.reshape(-1) for a in _batches(drawn, which)])
    values = values[np.isfinite(values)]
    limit = float(np.quantile(values, rng.choice([0.9, 0.99]))) if len(values) else 0.0

    def change(made: list[torch.Tensor]) -> list[torch.Tensor]:
        made[which] = made[which].clamp(max=limit)
        return made

    clamped = replace(drawn, model=Changed(drawn.model, change))
    return Fault(f"no clamp of out{which} at {limit:.3g}", clamped, drawn.model)


def _floats(drawn: Drawn, rng: np.random.Generator) -> int:
    """One of the outputs of floats, or the first output."""
    places = [p for p, one in enumerate(_example(drawn)) if one.dtype.kind == "f"] or [0]
    return places[int(rng.integers(len(places)))]


def _example(drawn: Drawn) -> Outputs:
    first = {name: array[:2] for name, array in drawn.samples.items()}
    return [batches[0] for batches in run(drawn.model, first, 2)]


def _batches(drawn: Drawn, which: int) -> Outputs:
    return run(drawn.model, drawn.samples, drawn.batch_size)[which]
