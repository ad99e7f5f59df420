"""Random heads, which compute the outputs of a net."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from benchmarks.nets.head import Design, Function, Tensors
from gate.policy.sections import Role


def _logits(rng: np.random.Generator) -> Design:
    width = int(rng.choice([2, 2, 3, 5, 10, 40, 200]))
    gain = 10.0 ** rng.uniform(-6.0, 6.0) if rng.random() < 0.4 else rng.uniform(0.5, 8.0)
    return Design(width, lambda y, _: (y,), gain=gain, classes=True, roles=("logits",))


def _softmax(rng: np.random.Generator) -> Design:
    width, gain = int(rng.choice([2, 3, 10, 60])), rng.uniform(0.3, 6.0)
    if rng.random() < 0.5:
        roles: tuple[Role, ...] = ("probabilities",)
        return Design(
            width, lambda y, _: (torch.softmax(y, -1),), gain=gain, classes=True, roles=roles
        )
    return Design(width, lambda y, _: (functional.log_softmax(y, -1),), gain=gain, classes=True)


def _sigmoid(rng: np.random.Generator) -> Design:
    width, bias = int(rng.choice([1, 2, 5, 30])), rng.uniform(-9.0, 1.0)
    gain = rng.uniform(0.3, 2.0)
    return Design(width, lambda y, _: (torch.sigmoid(y),), gain=gain, bias=bias, roles=("scores",))


def _mixed_units(rng: np.random.Generator) -> Design:
    """Draw a head with columns in different units and a probability."""
    units = 10.0 ** rng.uniform(-6.0, 9.0, int(rng.integers(1, 7)))

    def columns(y: torch.Tensor, t: torch.Tensor) -> Tensors:
        return (torch.cat([y[:, :-1] * t, torch.sigmoid(y[:, -1:])], 1),)

    return Design(len(units) + 1, columns, table=units.tolist())


def _boxes(rng: np.random.Generator) -> Design:
    prior = rng.uniform(-5.0, 0.0)

    def boxes(y: torch.Tensor, t: torch.Tensor) -> Tensors:
        center, size = torch.sigmoid(y[:, :2]) * 640.0, torch.exp(y[:, 2:4].clamp(max=4.0)) * 32.0
        corners = torch.cat([center - size / 2, center + size / 2], 1).clamp(0.0, 640.0)
        return corners, torch.sigmoid(y[:, 4:] + t)

    return Design(
        4 + int(rng.choice([1, 3])), boxes, table=[float(prior)], roles=("boxes", "scores")
    )


def _heavy_tail(rng: np.random.Generator) -> Design:
    gain = rng.uniform(0.5, 3.0)
    return Design(int(rng.integers(1, 5)), lambda y, _: (torch.exp(y),), gain=gain)


def _softplus(rng: np.random.Generator) -> Design:
    bias = rng.uniform(-8.0, 2.0)
    return Design(int(rng.integers(1, 5)), lambda y, _: (functional.softplus(y),), bias=bias)


def _cumsum(rng: np.random.Generator) -> Design:
    width = int(rng.choice([8, 64, 512]))
    return Design(width, lambda y, _: (functional.softplus(y).cumsum(1),))


def _sums(rng: np.random.Generator) -> Design:
    kinds: list[Function] = [
        lambda y, _: (y.sum(1),),
        lambda y, _: (torch.linalg.vector_norm(y, dim=1, keepdim=True),),
        lambda y, _: (torch.logsumexp(y, 1),),
        lambda y, _: (y.std(1),),
        lambda y, _: (y.pow(2).mean(1).sqrt(),),
    ]
    return Design(int(rng.choice([4, 32, 128])), kinds[rng.integers(len(kinds))])


def _embedding(rng: np.random.Generator) -> Design:
    width, bias = int(rng.choice([8, 32])), float(rng.choice([0.0, 2.0]))
    kinds: list[Function] = [
        lambda y, _: (functional.normalize(y, dim=1),),
        lambda y, _: (functional.normalize(y, dim=1) @ functional.normalize(y, dim=1).t(),),
        lambda y, t: (functional.cosine_similarity(y, t.expand_as(y), dim=1),),
        lambda y, t: (y, y @ y.t() * t.mean()),
    ]
    table = rng.normal(0.0, 1.0, width).tolist()
    kind_index = int(rng.integers(len(kinds)))
    roles: tuple[Role, ...] = ("embedding",) if kind_index in (0, 3) else ()
    return Design(width, kinds[kind_index], bias=bias, table=table, roles=roles)


def _ranked(rng: np.random.Generator) -> Design:
    k = int(rng.integers(1, 5))
    kinds: list[Function] = [
        lambda y, _: tuple(torch.topk(y, k, dim=1)),
        lambda y, _: (torch.sort(y, dim=1)[0],),
        lambda y, _: (torch.sort(y, dim=1, descending=True)[0], y.argmax(1)),
        lambda y, _: tuple(y.max(1)),
    ]
    return Design(int(rng.choice([5, 9, 40])), kinds[rng.integers(len(kinds))])


def _integers(rng: np.random.Generator) -> Design:
    kinds: list[Function] = [
        lambda y, _: (torch.round(y * 20.0).to(torch.int64),),
        lambda y, _: ((y * 30.0 + 128.0).clamp(0.0, 255.0).round().to(torch.uint8),),
        lambda y, _: (functional.one_hot(y.argmax(1), y.shape[1]),),
        lambda y, _: (y > 0.0, y),
        lambda y, _: (torch.floor(y * 10.0), y.abs()),
        lambda y, _: (y.argmax(1).to(torch.int32), torch.softmax(y, 1)),
    ]
    return Design(int(rng.integers(2, 8)), kinds[rng.integers(len(kinds))])


def _masked(rng: np.random.Generator) -> Design:
    """Draw a head whose scores are the lowest value for masked tokens, fixed or by sample."""
    width = int(rng.choice([6, 20]))
    lowest = float(rng.choice([-1e9, torch.finfo(torch.float32).min, -np.inf]))
    table = (rng.random(width) < rng.uniform(0.1, 0.7)).astype(float)
    table[:2] = 0.0
    is_fixed = rng.random() < 0.6

    def masked(y: torch.Tensor, t: torch.Tensor) -> Tensors:
        if is_fixed:
            return (y.masked_fill(t > 0.5, lowest),)
        return (y.masked_fill((y < -0.7) & (t > 0.5), lowest),)

    return Design(width, masked, table=table.tolist(), classes=True)


def _constant(rng: np.random.Generator) -> Design:
    """Draw a head with scores and an output that is the same for all samples."""
    kinds: list[Function] = [
        lambda y, t: (y, t.exp()),
        lambda y, _: (y, torch.arange(y.shape[1], device=y.device).expand(y.shape[0], -1)),
        lambda y, _: (y, torch.zeros_like(y[:, 0])),
        lambda y, _: (y, torch.ones_like(y[:, :3], dtype=torch.bool)),
        lambda y, t: (t.expand(y.shape[0], -1) * 1.0, y),
        lambda y, _: (y, y.mean()),
        lambda y, _: (y, y.new_zeros(())),
        lambda y, t: (y, t.unsqueeze(0) * 2.0),
    ]
    table = [float(rng.normal(2.0, 1.0))]
    return Design(int(rng.integers(3, 9)), kinds[rng.integers(len(kinds))], table=table)


def _quantiles(rng: np.random.Generator) -> Design:
    gain = 10.0 ** rng.uniform(-3.0, 4.0)

    def sorted_steps(y: torch.Tensor, _: torch.Tensor) -> Tensors:
        return (torch.cat([y[:, :1], y[:, :1] + functional.softplus(y[:, 1:]).cumsum(1)], 1),)

    return Design(int(rng.choice([3, 9])), sorted_steps, gain=gain)


def _coordinates(rng: np.random.Generator) -> Design:
    """Draw a head for latitude and longitude around a town."""
    table = [rng.uniform(-60.0, 60.0), rng.uniform(-170.0, 170.0)]
    reach = 10.0 ** rng.uniform(-3.0, 0.5)
    return Design(2, lambda y, t: (t + reach * torch.tanh(y),), table=table)


def _mixture(rng: np.random.Generator) -> Design:
    """Draw a head that returns the output of a mixture of experts and its weights."""
    count = int(rng.integers(2, 5))

    def mixture(y: torch.Tensor, _: torch.Tensor) -> Tensors:
        weights = torch.softmax(y[:, :count] * 2.0, 1)
        return (weights * y[:, count:]).sum(1, keepdim=True), weights

    return Design(2 * count, mixture)


def _spread(rng: np.random.Generator) -> Design:
    """Draw a head with outputs for each pixel or time step."""
    kinds: list[Function] = [
        lambda y, _: (y,),
        lambda y, _: (y.argmax(1),),
        lambda y, _: (torch.sigmoid(y - 3.0),),
        lambda y, _: (torch.softmax(y, -1),),
        lambda y, _: ((y * 40.0 + 120.0).clamp(0.0, 255.0).round().to(torch.uint8),),
        lambda y, _: (y, y.amax(-1)),
    ]
    gain = 10.0 ** rng.uniform(-2.0, 2.0)
    kind = kinds[rng.integers(len(kinds))]
    return Design(int(rng.integers(2, 6)), kind, gain=gain, source="spread")


def _states(rng: np.random.Generator) -> Design:
    return Design(int(rng.integers(2, 6)), lambda y, _: (y,), source="state")


KINDS: dict[str, Callable[[np.random.Generator], Design]] = {
    "logits": _logits,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "units": _mixed_units,
    "boxes": _boxes,
    "heavy": _heavy_tail,
    "softplus": _softplus,
    "cumsum": _cumsum,
    "sums": _sums,
    "embedding": _embedding,
    "ranked": _ranked,
    "integers": _integers,
    "masked": _masked,
    "constant": _constant,
    "quantiles": _quantiles,
    "places": _coordinates,
    "mixed": _mixture,
    "spread": _spread,
    "states": _states,
}
WEIGHTS = np.array([5 if kind == "logits" else 1 for kind in KINDS]) / (len(KINDS) + 4)
