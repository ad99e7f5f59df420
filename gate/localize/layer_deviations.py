"""The measurement of all layers on all samples, in the runtime that is asked about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gate.errors import GateError, ModelError, describe_failure
from gate.localisation.bench import Bench
from gate.localisation.layout import Layout
from gate.localisation.listeners import AnotherWay
from gate.localisation.rows import Deviation
from gate.localisation.runs import PieceSession
from gate.localisation.sides import Truths
from gate.localisation.values import Survey
from gate.parity.stand import length
from gate.parity.statistics.output import Array
from gate.policy.ort_options import OrtSetup
from gate.runtimes.runtime import Batch

Level = Literal["ORT_ENABLE_ALL", "ORT_DISABLE_ALL"]
LEVELS: tuple[Level, ...] = ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL")
OFF: Level = "ORT_DISABLE_ALL"


@dataclass
class LayerDeviations:
    """One value in both runs: through the whole file, and alone, from right inputs."""

    through: Deviation = field(default_factory=Deviation)
    alone: Deviation = field(default_factory=Deviation)


@dataclass
class Measured:
    """What was measured of a file."""

    layers: dict[int, LayerDeviations]
    """By the numbers of values."""
    marked: dict[str, Deviation] = field(default_factory=dict)
    """The file's outputs, with the tensors of all layers as outputs beside them."""
    whole: dict[Level, dict[str, Deviation]] = field(default_factory=dict)
    """The same of the file as it is, by level of optimisation: ORT_ENABLE_ALL stands for that of
    the runtime, where it has any on."""
    samples: int = 0
    noise_unmeasured: str | None = None


@dataclass(frozen=True)
class _View:
    """A run, and which of its tensors is compared with which value, in what."""

    run: PieceSession
    pairs: Sequence[tuple[int, str, Deviation]]
    references: Layout | None = None
    """Where the file is cut."""
    doubted: bool = False
    """True if it is a result that it can't run."""


class Measuring:
    """Runs all batches, in parts of the layers that fit the budget."""

    def __init__(
        self, bench: Bench, survey: Survey, layout: Layout, setup: OrtSetup, *, optimised: OrtSetup
    ) -> None:
        """`setup`: of the layers; `optimised`: of the file as it is, with optimisations on."""
        self._optimised = optimised
        self._bench = bench
        self._survey = survey
        self._layout = layout
        self._setup = setup
        producer = bench.graph.producer
        self._names = {n: name for n, name in layout.names.items() if name in producer}
        self._returned = dict(zip(bench.graph.outputs, survey.outputs, strict=False))

    def run(self) -> Measured:
        """Raises EvidenceError, and what ONNX Runtime raises."""
        measured = Measured({number: LayerDeviations() for number in self._names})
        size = 2 * sum(self._survey.values[number].nbytes for number in self._names)
        parts = list(self._bench.parts(list(self._names), size=size)) or [()]
        for place, part in enumerate(parts):
            views = self._layers(part, measured)
            if place == 0:
                views = [*views, *self._outputs(measured)]
            self._compare(views, measured)
        return measured

    def _layers(self, part: Sequence[int], measured: Measured) -> list[_View]:
        """Both runs of some layers; the outputs of the marked file with the first of them."""
        graph = self._bench.graph
        names = {number: self._names[number] for number in part}
        tensors = list(dict.fromkeys(names.values()))
        layers = measured.layers
        through = [(n, name, layers[n].through) for n, name in names.items()]
        alone = [(n, name, layers[n].alone) for n, name in names.items()]
        if not measured.marked:
            measured.marked = {name: Deviation() for name in self._returned}
            through += [(n, o, measured.marked[o]) for o, n in self._returned.items()]
        return [
            _View(PieceSession(graph.marked(tensors), self._setup), through),
            _View(
                PieceSession(graph.cut(tensors, self._layout.cuts), self._setup),
                alone,
                self._layout,
            ),
        ]

    def _outputs(self, measured: Measured) -> Iterator[_View]:
        """The file as it is, with the runtime's optimisations and without any.

        Without optimisations marking changes nothing. That it can't run with them is a result.
        """
        for level in LEVELS:
            doubted = level != OFF
            if level == self._setup.optimization == OFF:
                measured.whole[level] = measured.marked
                continue
            whole = measured.whole[level] = {name: Deviation() for name in self._returned}
            setup = self._optimised if doubted else self._setup.plain
            try:
                run = PieceSession(self._bench.graph.marked(()), setup)
            except GateError:
                raise
            except Exception as error:  # of ONNX Runtime, without a common base
                if not doubted:
                    raise
                _fail(whole.values(), error)
                continue
            pairs = [(n, o, whole[o]) for o, n in self._returned.items()]
            yield _View(run, pairs, doubted=doubted)

    def _compare(self, views: Sequence[_View], measured: Measured) -> None:
        layout = self._layout
        needed = {number for view in views for number, _, _ in view.pairs}
        needed |= {layout.put_in[cut] for view in views for cut in view.run.cuts}
        done = 0
        for batch, values in self._values(needed):
            truths = None if done else self._truths(batch, values, measured)
            for view in views:
                self._look(view, (batch, values), truths, first=not done)
            done += length(batch)
        measured.samples = done

    def _look(
        self,
        view: _View,
        computed: tuple[Batch, Mapping[int, Array]],
        truths: Truths | None,
        *,
        first: bool,
    ) -> None:
        batch, values = computed
        cuts = self._layout.references(view.run.cuts, values)
        only = list(dict.fromkeys(name for _, name, _ in view.pairs))
        try:
            arrays = view.run(self._bench.feed(batch), cuts, only=only)
        except Exception as error:  # of ONNX Runtime, without a common base
            if not view.doubted:
                raise
            _fail((deviation for _, _, deviation in view.pairs), error)
            return
        true = truths and (truths.through if view.references is None else truths.alone)
        for number, name, deviation in view.pairs:
            deviation.update(values[number], arrays[name])
            if first:
                deviation.update_noise(values[number], arrays[name], true[number] if true else None)

    def _values(self, needed: set[int]) -> Iterator[tuple[Batch, dict[int, Array]]]:
        """All batches whose forward takes the way of the first one."""
        for place, batch in enumerate(self._bench.batches):
            try:
                yield batch, self._bench.side.values(batch, self._survey, needed)
            except AnotherWay:
                if place == 0:
                    raise

    def _truths(
        self, batch: Batch, values: Mapping[int, Array], measured: Measured
    ) -> Truths | None:
        try:
            return self._bench.side.truths(batch, self._survey, values)
        except ModelError as error:
            measured.noise_unmeasured = str(error)
            return None


def _fail(deviations: Iterable[Deviation], error: Exception) -> None:
    for deviation in deviations:
        deviation.fail(describe_failure(error))
