"""A random correct small net from a seed: model, samples, export and policy."""

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
"""The policy: the default, an explicit task, or a role for each output."""
MIN_SAMPLES, MAX_SAMPLES = 16, 2000
"""Smallest and largest number of samples."""
_CALIBRATION = 256


class Net(nn.Module):
    """A trunk with one to four heads, which returns a tensor, a tuple or a dict."""

    def __init__(self, trunk: Trunk, head_modules: nn.ModuleList, *, returns_dict: bool) -> None:
        super().__init__()
        self.trunk, self.heads, self.returns_dict = trunk, head_modules, returns_dict

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> Any:
        features = self.trunk(first, second)
        outputs = [tensor for head in self.heads for tensor in head(features)]
        if self.returns_dict:
            return {f"out{index}": tensor for index, tensor in enumerate(outputs)}
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


@dataclass(frozen=True)
class RandomNet:
    """A net with its samples, export recipe and policy."""

    seed: int
    model: nn.Module
    samples: Arrays
    kinds: tuple[str, ...]
    """Kinds of the heads, in order."""
    outputs: int
    recipe: Recipe
    task: Task
    logits: str | None
    """The output with the class scores, for the task `classification`."""
    roles: dict[str, Role]
    """The role of each output, for the task `roles`."""
    batch_size: int

    @property
    def summary(self) -> str:
        """Return a summary such as `image 312 traced-13 tensors: logits, sums`."""
        count = len(next(iter(self.samples.values())))
        first = next(iter(self.samples))
        return f"{first} {count} {self.recipe.name} {self.task}: {', '.join(self.kinds)}"


def draw(seed: int) -> RandomNet:
    """Draw the net of a seed, independently of global random states."""
    rng = np.random.default_rng([seed, 9])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        count = round(float(np.exp(rng.uniform(np.log(MIN_SAMPLES), np.log(MAX_SAMPLES + 0.4)))))
        drawn_inputs = inputs.draw(rng, count)
        trunk = trunks.draw(rng, drawn_inputs)
        _scale_weights(trunk, rng)
        tensors = [torch.from_numpy(a[:_CALIBRATION].copy()) for a in drawn_inputs.arrays.values()]
        _calibrate(trunk, tensors, standard=bool(rng.random() < 0.8))
        features = trunk(*tensors)
        kinds = rng.choice(
            list(heads.KINDS), int(rng.choice([1, 1, 2, 3, 4])), p=heads.WEIGHTS, replace=False
        )
        designs = [heads.KINDS[kind](rng) for kind in kinds]
        head_modules = nn.ModuleList(_build_head(design, features) for design in designs)
        model = Net(trunk, head_modules, returns_dict=bool(rng.random() < 0.3)).eval()
        outputs = flatten_outputs(model(*tensors))
        class_output = _find_class_output(model, features, designs)
        task = str(rng.choice(["default", "default", "tensors", "classification", "roles"]))
        if task == "classification" and class_output is None:
            task = "default"
        recipe = Recipe("dynamo", 18)
        if rng.random() < 0.85:
            exporter = "direct" if model.returns_dict else str(rng.choice(["direct", "traced"]))
            recipe = Recipe(exporter, int(rng.integers(14, 18)))
        return RandomNet(
            seed=seed,
            model=model,
            samples=drawn_inputs.arrays,
            kinds=tuple(map(str, kinds)),
            outputs=len(outputs),
            recipe=recipe,
            task=task,  # type: ignore[arg-type]
            logits=f"out{class_output}" if task == "classification" else None,
            roles=_assign_roles(model, features, designs) if task == "roles" else {},
            batch_size=int(rng.choice([8, 32, 32])),
        )


def flatten_outputs(outputs: Any) -> list[torch.Tensor]:
    """Return the outputs of a net in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return list(outputs.values() if isinstance(outputs, dict) else outputs)


def _build_head(design: Design, features: trunks.Features) -> Head:
    values = getattr(features, design.source)
    spatial = values.ndim == 4
    return Head(design, values.shape[1 if spatial else -1], spatial=spatial)


def _scale_weights(trunk: Trunk, rng: np.random.Generator) -> None:
    """Multiply the weights of each layer, in some nets each row, by a random factor."""
    scale_rows = rng.random() < 0.3
    for parameter in trunk.parameters():
        if parameter.ndim > 1:
            parameter.mul_(float(10.0 ** rng.uniform(-0.4, 0.6)))
            if scale_rows:
                factors = 10.0 ** rng.normal(0.0, 0.5, parameter.shape[0])
                shape = (-1, *[1] * (parameter.ndim - 1))
                parameter.mul_(torch.from_numpy(factors).to(parameter.dtype).view(shape))


def _calibrate(trunk: Trunk, tensors: list[torch.Tensor], *, standard: bool) -> None:
    """Set the BatchNorm statistics to those of the samples. `standard`: standardize features
    too.
    """
    with _collect_statistics(trunk):
        features = trunk(*tensors)
    if standard:
        width = features.vector.shape[1]
        trunk.standard = nn.BatchNorm1d(width, affine=False)
        with _collect_statistics(trunk):
            trunk(*tensors)


@contextmanager
def _collect_statistics(trunk: Trunk) -> Iterator[None]:
    norms = [m for m in trunk.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    trunk.eval()
    for norm in norms:
        norm.momentum, norm.training = None, True
        norm.reset_running_stats()
    yield
    trunk.eval()


def _find_class_output(model: Net, features: trunks.Features, designs: list[Design]) -> int | None:
    """Return the index of the first output whose top-1 class varies over the samples, or None."""
    output_index = 0
    for head, design in zip(model.heads, designs, strict=True):
        outputs = head(features)
        if design.classes and len(outputs[0].argmax(1).unique()) > 1:
            return output_index
        output_index += len(outputs)
    return None


def _assign_roles(model: Net, features: trunks.Features, designs: list[Design]) -> dict[str, Role]:
    """Return the role that a careful user would assign to each output.

    Logits and probabilities of a single class are tensors.
    """
    roles: dict[str, Role] = {}
    for head, design in zip(model.heads, designs, strict=True):
        for index, output in enumerate(head(features)):
            role: Role = "tensor"
            if output.dtype == torch.bool:
                role = "mask"
            elif not output.is_floating_point():
                role = "indices" if output.dtype in (torch.int32, torch.int64) else "tensor"
            elif index < len(design.roles):
                role = design.roles[index]
            is_single_class = (
                role in ("logits", "probabilities") and len(output.argmax(1).unique()) < 2
            )
            roles[f"out{len(roles)}"] = "tensor" if is_single_class else role
    return roles
