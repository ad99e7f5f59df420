"""Probes next to the thresholds of the model's code.

If the file's threshold lies elsewhere in the gap between two samples (`score > 0.501` instead of
`score > 0.5`), both return the same for all samples. The probes narrow the gap: two inputs on a
line between two others for which the comparison differs, each next to the threshold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gate.measure.context import MeasurementContext
from gate.probes.probe import Probe, SampleProfile
from gate.probes.value_probes import within
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch

_Sides = tuple[torch.Tensor, torch.Tensor]


def _nearest_boundary(x: torch.Tensor, boundaries: torch.Tensor) -> _Sides:
    return x, boundaries[(x.unsqueeze(-1) - boundaries).abs().argmin(-1)]


_SIDES: dict[str, Callable[..., _Sides]] = {
    **dict.fromkeys(["aten::lt", "aten::le", "aten::gt", "aten::ge"], lambda x, y: (x, y)),
    **dict.fromkeys(["aten::sign", "aten::heaviside"], lambda x, *_: (x, torch.zeros_like(x))),
    **dict.fromkeys(["aten::floor", "aten::ceil", "aten::trunc"], lambda x, *_: (x, x.round())),
    "aten::round": lambda x, *_: (x, x.floor() + 0.5),
    "aten::bucketize": _nearest_boundary,
    "aten::searchsorted": lambda boundaries, x: _nearest_boundary(x, boundaries),
}
"""The operand of each step function and its nearest threshold, from the function's arguments."""

_MAX_ELEMENTS = 2**12
"""Larger step functions are left out: the samples come near to their thresholds anyway."""

_MAX_STEPS = 3
"""Largest number of step functions that get probes."""

_NEAR = 2.5e-4
"""Distance from a threshold that is near, in units of the larger operand: thousands of roundings
of float32."""

_MIN_NEAR = 2.0**-16
"""Smallest distance that is near, in units of the larger operand at the far end of a line: hundreds
of roundings."""

_MAX_BISECTIONS = 20


class StepValues(NamedTuple):
    """Result and operands of one step function, element by element."""

    levels: NDArray[np.float64]
    """The results."""
    distances: NDArray[np.float64]
    """Distance of the operand from the nearest threshold."""
    scales: NDArray[np.float64]
    """Magnitude of the operand or the threshold, whichever is larger."""


class StepFunctions(DispatchMode):
    """Records comparisons of floats and other functions with steps while a model runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[StepValues] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        sides = _SIDES.get(func._schema.name)
        if sides and any(map(_is_float, args[:2])) and returned.numel() <= _MAX_ELEMENTS:
            operand, threshold = sides(*(torch.as_tensor(arg).double() for arg in args[:2]))
            scale = torch.maximum(operand.abs(), threshold.abs())
            arrays = (returned.double(), (operand - threshold).abs(), scale)
            self.steps.append(StepValues(*(a.expand(returned.shape).cpu().numpy() for a in arrays)))
        return returned

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each result."""
        return [step.levels.shape for step in self.steps]


def _is_float(side: Any) -> bool:
    return isinstance(side, torch.Tensor) and side.is_floating_point()


class _Run(NamedTuple):
    batch: Batch
    steps: list[StepValues]


def threshold_probes(
    context: MeasurementContext, profile: SampleProfile, computed: Sequence[Probe]
) -> Iterator[Probe]:
    """Yield two inputs for each threshold that samples and `computed` reach on both sides, unless
    they are near already.

    None for a precision that moves the operands farther than the probes are from the threshold.
    """
    if context.policy.precision == "exact":
        yield from islice(_Search(context, profile, computed).probes(), 2 * _MAX_STEPS)


class _Search:
    """Runs inputs until both sides of a step are near."""

    def __init__(
        self, context: MeasurementContext, profile: SampleProfile, computed: Sequence[Probe]
    ) -> None:
        self._context = context
        self._profile = profile
        self._computed = computed
        self._shapes: list[tuple[int, ...]] | None = None

    def probes(self) -> Iterator[Probe]:
        """Yield the probes of each step function, those of the fewest elements first."""
        first = self._run(self._profile.batch(self._profile.small))
        if first is None or not first.steps:
            return
        runs = [first, *filter(None, map(self._run, self._further_inputs()))]
        for index in sorted(range(len(first.steps)), key=lambda i: first.steps[i].levels.size):
            for number, batch in enumerate(self._inputs_near_step(index, runs)):
                title = f"threshold_{index}_{number}"
                build: Callable[[], Batch] = partial(copy.copy, batch)
                yield Probe(title, "value", self._profile.small, build)

    def _run(self, batch: Batch) -> _Run | None:
        """Run the model; None if its step functions have other shapes than for the first input."""
        mode = self._context.watch(batch, StepFunctions)
        self._shapes = self._shapes or mode.shapes
        return _Run(batch, mode.steps) if mode.shapes == self._shapes else None

    def _further_inputs(self) -> Iterator[Batch]:
        """Yield the other samples, then the probes of the same shapes."""
        profile = self._profile
        count = len(next(iter(profile.rows.values())))
        for start in range(profile.small, count, profile.small):
            yield profile.batch(profile.small, start=start)
        shapes = {name: array.shape for name, array in profile.batch(profile.small).items()}
        for probe in self._computed:
            is_small = probe.kind == "value" and probe.size == profile.small
            if is_small and {name: a.shape for name, a in probe.batch.items()} == shapes:
                yield probe.batch

    def _inputs_near_step(self, index: int, runs: Sequence[_Run]) -> Sequence[Batch]:
        """Return an input near a threshold on either side; none if the runs are near on both
        sides, all on one side, or if no line between them leads to the threshold."""
        steps = [run.steps[index] for run in runs]
        has_integers = any(array.dtype.kind != "f" for array in runs[0].batch.values())
        if len(set(chain.from_iterable(map(_near_levels, steps)))) > 1:
            return ()
        for run in runs[1:]:
            last = self._run(_mix(run.batch, runs[0].batch, 1.0)) if has_integers else run
            if last is None:
                continue
            step = last.steps[index]
            flips = (step.levels != steps[0].levels) & np.isfinite(step.scales + steps[0].scales)
            if flips.any():
                distances = np.where(flips, step.distances + steps[0].distances, -1.0)
                return self._bisect(index, int(distances.argmax()), (runs[0], last))
        return ()

    def _bisect(self, index: int, element: int, ends: tuple[_Run, _Run]) -> Sequence[Batch]:
        """Return two inputs between `ends` next to a threshold of one element."""

        def value(run: _Run, field: str) -> float:
            return float(getattr(run.steps[index], field).flat[element])

        scales = [value(run, "scales") for run in ends]
        near = max(_NEAR * min(scales), _MIN_NEAR * max(scales))
        low, high = ends
        for _ in range(_MAX_BISECTIONS):
            if max(value(low, "distances"), value(high, "distances")) <= near:
                return low.batch, high.batch
            middle = self._run(_mix(low.batch, high.batch, 0.5))
            if middle is None:
                return ()
            is_low = value(middle, "levels") == value(low, "levels")
            low, high = (middle, high) if is_low else (low, middle)
        return ()


def _near_levels(step: StepValues) -> Iterator[float]:
    """Yield the results of the elements that are near to a threshold."""
    yield from np.unique(step.levels[step.distances <= _NEAR * step.scales])


def _mix(first: Batch, second: Batch, share: float) -> Batch:
    """Return floats between two inputs, and the other values of the second."""
    return {
        name: within(share * array.astype(np.float64) + (1.0 - share) * second[name], array)
        if array.dtype.kind == "f"
        else second[name]
        for name, array in first.items()
    }
