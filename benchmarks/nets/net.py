"""A random correct small net from a seed: model, samples, export, policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.corpus.exporters import Recipe
from benchmarks.corpus.samples import Arrays
from benchmarks.nets import heads, inputs, trunks
from benchmarks.nets.head import Design, Head
from benchmarks.nets.trunks import Trunk
from gate.policy.sections import Role

Task = Literal["default", "tensors", "classification", "roles"]
"""The policy: none, an explicit task, or what each output is."""
LEAST, MOST = 16, 2000
"""Samples."""
_CALIBRATION = 256


class Net(nn.Module):
    """A trunk and one to four heads; returns a tensor, a tuple or a dict."""

    def __init__(self, trunk: Trunk, chosen: nn.ModuleList, *, named: bool) -> None:
        super().__init__()
        self.trunk, self.heads, self.named = trunk, chosen, named

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> Any:
        features = self.trunk(first, second)
        made = [tensor for head in self.heads for tensor in head(features)]
        if self.named:
            return {f"out{place}": tensor for place, tensor in enumerate(made)}
        return made[0] if len(made) == 1 else tuple(made)


@dataclass(frozen=True)
class Drawn:
    """What a seed gives."""

    seed: int
    model: nn.Module
    samples: Arrays
    kinds: tuple[str, ...]
    """Of the heads, in order."""
    outputs: int
    recipe: Recipe
    task: Task
    logits: str | None
    """The output that holds the classes, with the task `classification`."""
    roles: dict[str, Role]
    """What each output is, with the task `roles`."""
    batch_size: int

    @property
    def summary(self) -> str:
        """`image 312 traced-13 tensors: logits, sums`."""
        count = len(next(iter(self.samples.values())))
        first = next(iter(self.samples))
        return f"{first} {count} {self.recipe.name} {self.task}: {', '.join(self.kinds)}"


def draw(seed: int) -> Drawn:
    """The net of a seed. Always the same, whatever was drawn before."""
    rng = np.random.default_rng([seed, 9])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        count = round(float(np.exp(rng.uniform(np.log(LEAST), np.log(MOST + 0.4)))))
        given = inputs.draw(rng, count)
        trunk = trunks.draw(rng, given)
        _weigh(trunk, rng)
        tensors = [torch.from_numpy(a[:_CALIBRATION].copy()) for a in given.arrays.values()]
        _calibrate(trunk, tensors, standard=bool(rng.random() < 0.8))
        features = trunk(*tensors)
        kinds = rng.choice(
            list(heads.KINDS), int(rng.choice([1, 1, 2, 3, 4])), p=heads.WEIGHTS, replace=False
        )
        designs = [heads.KINDS[kind](rng) for kind in kinds]
        chosen = nn.ModuleList(_head(design, features) for design in designs)
        model = Net(trunk, chosen, named=bool(rng.random() < 0.3)).eval()
        answers = tensors_of(model(*tensors))
        place = _classes(model, features, designs)
        task = str(rng.choice(["default", "default", "tensors", "classification", "roles"]))
        if task == "classification" and place is None:
            task = "default"
        recipe = Recipe("dynamo", 18)
        if rng.random() < 0.85:
            exporter = "direct" if model.named else str(rng.choice(["direct", "traced"]))
            recipe = Recipe(exporter, int(rng.integers(14, 18)))
        return Drawn(
            seed=seed,
            model=model,
            samples=given.arrays,
            kinds=tuple(map(str, kinds)),
            outputs=len(answers),
            recipe=recipe,
            task=task,  # type: ignore[arg-type]
            logits=f"out{place}" if task == "classification" else None,
            roles=_roles(model, features, designs) if task == "roles" else {},
            batch_size=int(rng.choice([8, 32, 32])),
        )


def tensors_of(returned: Any) -> list[torch.Tensor]:
    """The outputs of a net in order."""
    if isinstance(returned, torch.Tensor):
        return [returned]
    return list(returned.values() if isinstance(returned, dict) else returned)


def _head(design: Design, features: trunks.Features) -> Head:
    read = getattr(features, design.source)
    spatial = read.ndim == 4
    return Head(design, read.shape[1 if spatial else -1], spatial=spatial)


def _weigh(trunk: Trunk, rng: np.random.Generator) -> None:
    """Scale the weights of each layer, in some nets each row of them, by a factor of its own."""
    wild = rng.random() < 0.3
    for parameter in trunk.parameters():
        if parameter.ndim > 1:
            parameter.mul_(float(10.0 ** rng.uniform(-0.4, 0.6)))
            if wild:
                factors = 10.0 ** rng.normal(0.0, 0.5, parameter.shape[0])
                shape = (-1, *[1] * (parameter.ndim - 1))
                parameter.mul_(torch.from_numpy(factors).to(parameter.dtype).view(shape))


def _calibrate(trunk: Trunk, tensors: list[torch.Tensor], *, standard: bool) -> None:
    """BatchNorms take the statistics of the samples; `standard`: so do the features."""
    with _learning(trunk):
        features = trunk(*tensors)
    if standard:
        width = features.vector.shape[1]
        trunk.standard = nn.BatchNorm1d(width, affine=False)
        with _learning(trunk):
            trunk(*tensors)


@contextmanager
def _learning(trunk: Trunk) -> Iterator[None]:
    norms = [m for m in trunk.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    trunk.eval()
    for norm in norms:
        norm.momentum, norm.training = None, True
        norm.reset_running_stats()
    yield
    trunk.eval()


def _classes(model: Net, features: trunks.Features, designs: list[Design]) -> int | None:
    """The first output whose winning class varies over the samples of a classifier."""
    place = 0
    for head, design in zip(model.heads, designs, strict=True):
        made = head(features)
        if design.classes and len(made[0].argmax(1).unique()) > 1:
            return place
        place += len(made)
    return None


def _roles(model: Net, features: trunks.Features, designs: list[Design]) -> dict[str, Role]:
    """What a careful user would say of each output: logits and probabilities of one class are
    tensors."""
    found: dict[str, Role] = {}
    for head, design in zip(model.heads, designs, strict=True):
        for place, made in enumerate(head(features)):
            role: Role = "tensor"
            if made.dtype == torch.bool:
                role = "mask"
            elif not made.is_floating_point():
                role = "indices" if made.dtype in (torch.int32, torch.int64) else "tensor"
            elif place < len(design.roles):
                role = design.roles[place]
            one = role in ("logits", "probabilities") and len(made.argmax(1).unique()) < 2
            found[f"out{len(found)}"] = "tensor" if one else role
    return found
