"""How each constant of a file is found among the tensors of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.parity.graph.folding import WeightLayer, folded_bias, layers, likeliest
from gate.parity.graph.formats import FORMATS, Leeway, leeway
from gate.parity.graph.layouts import arrangements, equal, same
from gate.parity.graph.lines import Lines
from gate.parity.graph.norms import Norm, norms
from gate.parity.graph.packed import packed
from gate.parity.graph.pool import Pool, Stored, Values, stored_tensors
from gate.parity.graph.suspicion import HALF, Suspicion, nearest, of_mask, telling
from gate.parity.graph.witness import Witness

_ROUNDING = 2.0**-20
"""Relative difference that another order of operations may make of a computed constant."""
_FAR = 0.01
"""A difference in units of the constant's size (rms) that no rounding makes."""


class Match(NamedTuple):
    """How a constant is the model's, and which tensors of the model it accounts for."""

    way: str
    names: tuple[str, ...]


@dataclass
class Constant:
    """A constant of the file, and what is known of it so far."""

    name: str
    values: Values | None
    """float32 or int64. None once nothing more has to be compared."""
    format: str | None = None
    """The format of fewer bits that the file keeps it in."""
    match: Match | None = None
    suspicion: Suspicion | None = None
    """What it is if it is nothing else."""
    excused: bool = False
    """It is a tensor of the model in a form that can't be compared."""

    @property
    def open(self) -> bool:
        """Nothing equal was found yet."""
        return self.match is None and self.values is not None

    def suspect(self, suspected: Suspicion | None) -> None:
        """Keep the suspicion that has the fewest differences."""
        if suspected is not None and (
            self.suspicion is None or suspected.wrong < self.suspicion.wrong
        ):
            self.suspicion = suspected


class Fold(NamedTuple):
    """A layer that one of these was folded into."""

    layer: WeightLayer
    norms: tuple[Norm, ...]


class ConstantMatcher:
    """Finds constants among the tensors that the model holds."""

    def __init__(self, witness: Witness) -> None:
        self.pool = Pool((*stored_tensors(witness.held()), *packed(witness.model)))
        self.folds: list[Fold] = []
        self.scaled: set[str] = set()
        """Paths of the layers that something was folded into."""
        self._lines = Lines(self.pool.all)
        self._norms = cache(lambda arithmetic: tuple(norms(witness.model, arithmetic)))
        self._layers: defaultdict[tuple[int, ...], list[WeightLayer]] = defaultdict(list)
        for layer in layers(witness.model):
            self._layers[tuple(layer.weight.shape)].append(layer)

    def exact(self, constant: Constant) -> Match | None:
        """The same elements as a tensor of the model, or as one packed for a recurrent operator;
        of integers only under the same name."""
        values, own = constant.values, self.pool.by_name.get(constant.name)
        assert values is not None
        if own is not None and equal(values, own.values):
            return Match("as it is", own.names)
        if values.dtype.kind != "f":
            way = None if own is None else same(values, own.values)
            return None if own is None or way is None else Match(way, own.names)
        if values.size == 1:
            return None
        for stored in self.pool.alike(values):
            way = same(values, stored.values)
            if way is not None:
                return Match("packed" if stored.parts else way, stored.names)
        return None

    def narrow(self, constant: Constant) -> None:
        """A constant that the file keeps in fewer bits, against the tensors rounded to these."""
        values, name = constant.values, constant.format
        if values is None or name is None:
            return
        for stored in _rounded(self.pool.of_dims(values), name):
            if any(equal(values, way) for way in arrangements(values, stored.values)):
                constant.match = Match(f"rounded to {name}", stored.names)
                return
        candidates = _rounded(self.pool.of_dims(values), name)
        constant.suspect(nearest(constant.name, values, candidates))

    def joined(self, constant: Constant) -> None:
        """A slice of a tensor, or several of them one behind the other."""
        values = constant.values
        assert values is not None
        found = self._lines.read(values)
        if found is None or not found.ordered:
            return
        wrong = values != found.expected
        if not wrong.any():
            constant.match = Match(found.way, found.names)
            return
        certain = not (wrong & found.doubtful).any() and telling(values[~wrong])
        if certain and wrong.mean() <= HALF:
            owner = found.owner(int(wrong.argmax()))
            constant.suspect(of_mask(constant.name, owner, (values, found.expected), wrong))

    def folded(self, constant: Constant) -> None:
        """The weight of a layer with a BatchNorm in it."""
        if constant.values is None:
            return
        for shape in dict.fromkeys((constant.values.shape, constant.values.shape[::-1])):
            waiting = self._layers.get(shape, [])
            for at, layer in enumerate(waiting):
                for values in _as_weight(constant.values, shape):
                    if self._fold(constant, layer, values):
                        # Files have their weights in the model's order: what is used up goes last.
                        waiting.append(waiting.pop(at))
                        return

    def _fold(self, constant: Constant, layer: WeightLayer, values: Values) -> bool:
        found, wrong = likeliest(values, layer, self._norms, format_=constant.format)
        if found is None:
            return False
        weight = f"{layer.path}.weight" if layer.path else "weight"
        self.scaled.add(layer.path)
        if not found.norms:
            sizes = {len(norm.scale) for norm in self._norms(None)}
            constant.excused = len(found.factor) in sizes
            return False
        self.folds.append(Fold(layer, found.norms))
        if wrong.any():
            constant.match = None
            constant.suspicion = of_mask(constant.name, weight, (values, found.expected), wrong)
        else:
            constant.match = Match(found.way, (weight, *(n.parameters for n in found.norms)))
            constant.suspicion = None
        return True

    def folded_bias(self, constant: Constant) -> None:
        """The bias of a layer whose weight had a BatchNorm folded in."""
        values = constant.values
        if values is None or values.ndim != 1 or values.dtype.kind != "f":
            return
        for fold in self.folds:
            for norm in self._versions(fold.norms, constant.format):
                wrong = folded_bias(values, fold.layer, norm, format_=constant.format)
                if wrong is None or (wrong.any() and wrong.mean() > HALF):
                    continue
                prefix = f"{fold.layer.path}." if fold.layer.path else ""
                if not wrong.any():
                    names = (f"{prefix}bias", norm.parameters)
                    constant.match, constant.suspicion = Match(norm.way, names), None
                    return
                if telling(values[~wrong]):
                    expected = norm.offset(fold.layer.offset())
                    constant.match = None
                    constant.suspect(
                        of_mask(constant.name, f"{prefix}bias", (values, expected), wrong)
                    )

    def _versions(self, own: Sequence[Norm], format_: str | None) -> Iterator[Norm]:
        """These norms, and the same in every arithmetic that may have made a constant."""
        yield from own
        paths = {norm.path for norm in own if norm.way == "folded"}
        for arithmetic in dict.fromkeys((None, format_)):
            alike = (norm for norm in self._norms(arithmetic) if norm.path in paths)
            yield from (norm for norm in alike if norm.arithmetic != own[0].arithmetic)

    def may_be_folded(self, constant: Constant, matched: set[str]) -> bool:
        """True for a bias that a BatchNorm may be folded into: the weight beside it is nowhere in
        the file, as where it was quantized after folding, so nothing says whether."""
        values, (path, _, name) = constant.values, constant.name.rpartition(".")
        if values is None or name != "bias" or f"{path}.weight" in matched:
            return False
        layer = any(one.path == path for group in self._layers.values() for one in group)
        return layer and any(one.scale.shape == values.shape for one in self._norms(None))

    def computed(self, constant: Constant, pool: Pool) -> None:
        """What forward computes without the inputs, exactly or as far as float32 rounds."""
        values = constant.values
        assert values is not None
        for stored in pool.alike(values):
            if same(values, stored.values) is not None:
                constant.match = Match("computed", ())
                return
        for stored in pool.of_dims(values):
            for arranged in arrangements(values, stored.values):
                wrong = _far(values, arranged, kept=leeway(constant.format))
                if wrong is None:
                    continue
                if not wrong.any():
                    constant.match = Match("computed", ())
                    return
                if telling(values[~wrong]):
                    name = f"what {stored.name} gives in forward"
                    constant.suspect(of_mask(constant.name, name, (values, arranged), wrong))


def _far(values: Values, arranged: Values, *, kept: Leeway) -> NDArray[np.bool_] | None:
    """Where a constant is not what forward computes; None if it is something else altogether.

    Exporters compute it with other roundings than PyTorch, which may add up. So it is the same
    only where all elements are either within these or far beyond, and at least half within.
    """
    with np.errstate(all="ignore"):
        apart = np.abs(values.astype(np.float64) - arranged)
        size = np.sqrt(np.mean(arranged.astype(np.float64) ** 2))
        rounding = (_ROUNDING + kept.relative) * np.abs(arranged) + kept.absolute
    near = (apart <= rounding) | (values == arranged)
    near |= np.isnan(values) & np.isnan(arranged)
    far = ~near & ~(apart <= _FAR * size)
    return far if (near | far).all() and near.mean() >= HALF else None


def _as_weight(values: Values, shape: tuple[int, ...]) -> Iterable[Values]:
    """A constant in the shape of a weight: as it is, or transposed where that has two axes."""
    if values.shape == shape:
        yield values
    if len(shape) == 2 and values.T.shape == shape:
        yield values.T


def _rounded(stored: Iterable[Stored], name: str) -> Iterable[Stored]:
    for tensor in stored:
        values = FORMATS[name](tensor.values)
        yield Stored(tensor.names, lambda values=values: values, tensor.shape)  # type: ignore[misc]
