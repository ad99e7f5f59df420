"""Reduce a failed check to the smallest graph that shows it, with real tensors as inputs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from gate.errors import EvidenceError, GateError, describe_failure, first_line
from gate.localize.file_graph import FileGraph, Piece, SubgraphSession, reference_name
from gate.localize.layer_deviations import Deviation, DeviationLimits, LayerDeviations
from gate.localize.locate import LayerComparison
from gate.localize.model_runner import Float64Values, ForwardPathChanged
from gate.localize.standalone import Standalone, fewest_nodes, latest, node_count
from gate.localize.value_matching import returned_values
from gate.measure.job import MeasurementJob
from gate.onnx_file.reading import add_outputs, replace_messages
from gate.onnx_file.sessions import open_session, session_options
from gate.policy.runtime_options import OrtSetup, ort_setup
from gate.records.evidence import Evidence
from gate.storage.arrays import Batch, OutputArray

Kind = Literal["exporter", "runtime", "optimizer"]
"""`exporter`: the file's nodes differ from PyTorch. `runtime`: a kernel of ONNX Runtime differs
from the ONNX reference evaluator. `optimizer`: ONNX Runtime differs with and without
optimizations."""

MAX_BYTES = 256 << 20
"""Largest size of one sample's tensors for which optimizers and kernels are reduced, in bytes."""

_MIN_FOLDED_NODES = 12
"""Number of nodes above which arithmetic on shapes is replaced by its results."""

_MAX_SHAPE_SIZE = 16
"""Number of elements from which an integer tensor may be a weight; smaller ones are shapes and
axes."""

_steps = logging.getLogger("gate.steps")


class NotReproduced(EvidenceError):
    """Raised if no standalone graph shows the failure."""


@dataclass(frozen=True)
class RoundingBound:
    """How much an output may differ by rounding. 0 for integers and bools."""

    rms: float
    largest: float


@dataclass(frozen=True)
class ReducedFailure:
    """A standalone graph that shows the failure."""

    kind: Kind
    model: onnx.ModelProto
    inputs: Mapping[str, OutputArray]
    expected: Mapping[str, OutputArray]
    """Expected values of the outputs, by their names in the graph."""
    tolerances: Mapping[str, RoundingBound]
    setup: OrtSetup
    tensors: Mapping[str, str]
    """Tensors of the file, by output of the graph."""
    layer: str | None = None
    """Path of the module that computes the expected values from the inputs; None: no single module
    does."""
    arguments: tuple[str, ...] | None = None
    """Names of the inputs in the order of that module's arguments."""
    raises: str | None = None
    """The error that ONNX Runtime raises; None: it returns different values."""
    excluded: tuple[str, ...] = ()
    """Causes that measurements exclude: codes of `gate.localize.reproducer`."""
    constant_inputs: tuple[str, ...] = ()
    """Inputs that the file computes only from its weights."""
    accepted_batches: tuple[int, ...] = ()
    """Batch sizes that the file accepts; the inputs have another one. Empty: all."""
    random_weights: bool = False
    random_inputs: bool = False

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return node_count(self.model)

    def shows(self) -> bool:
        """Return True if a session of the unchanged graph shows the failure."""
        try:
            actual = run(self.model, self.inputs, self.setup)
        except Exception as error:  # ONNX Runtime's errors have no common base
            return self.raises is not None and _kind_of(error) == self.raises
        if self.raises is not None:
            return False
        return any(
            is_beyond(actual[name], value, self.tolerances[name])
            for name, value in self.expected.items()
        )


def run(
    model: onnx.ModelProto, inputs: Mapping[str, OutputArray], setup: OrtSetup
) -> dict[str, OutputArray]:
    """Return the outputs of a session by name. Raises any error of ONNX Runtime."""
    options = session_options(setup, threads=1, deterministic=False)
    session = open_session(model.SerializeToString(), options, setup)
    names = [value.name for value in model.graph.output]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def is_beyond(actual: OutputArray, expected: OutputArray, tolerance: RoundingBound) -> bool:
    """Return True if shapes differ, or values by more than rounding, as a reproducer's script
    does."""
    if actual.shape != expected.shape:
        return True
    rms, largest = distance(actual, expected)
    return not (rms <= tolerance.rms and largest <= tolerance.largest)


def distance(actual: OutputArray, expected: OutputArray) -> tuple[float, float]:
    """Return the RMS and the maximum of |actual - expected|; infinite if only one is finite."""
    with np.errstate(all="ignore"):
        a, b = actual.astype(np.float64), expected.astype(np.float64)
        # Different integers are at least 1 apart, also beyond 2**53, where float64 rounds them.
        least = np.maximum(np.abs(a - b), float(actual.dtype.kind in "iu"))
        error = np.where((actual == expected) | (np.isnan(a) & np.isnan(b)), 0.0, least)
    error = np.nan_to_num(error, nan=np.inf, posinf=np.inf)
    return (float(np.sqrt(np.mean(error**2))), float(error.max())) if error.size else (0.0, 0.0)


_NAMES = re.compile(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|[\w/.:]*\d[\w/.:]*")


def _kind_of(error: Exception) -> str:
    """Return the class and the message without names and numbers, which depend on the graph."""
    text = _NAMES.sub("…", first_line(error))
    return f"{type(error).__name__}: {text[:120]}"


def reduce_failure(comparison: LayerComparison) -> ReducedFailure:
    """Return the smallest graph that shows the failure. Raises NotReproduced."""
    record = comparison.localization
    finder = _Reducer(comparison)
    with comparison.switched():
        for attempt in finder.attempts():
            _steps.debug("reducing the graph")
            try:
                reduced = attempt()
            except GateError:
                continue
            except Exception as error:  # errors of ONNX Runtime and onnx have no common base
                _steps.debug(f"not reduced: {describe_failure(error)}")
                continue
            if reduced is not None and reduced.shows():
                return reduced
    where = record.first_divergence or "any layer"
    raise NotReproduced(
        f"no standalone graph shows the difference of {where} in {record.runtime}: from correct "
        "inputs it computes the expected values, up to rounding. Pass the samples of the check, or "
        "examine the layers with gate locate."
    )


def reduce_refusal(job: MeasurementJob, evidence: Evidence) -> ReducedFailure | None:
    """Return the first node that a runtime refuses, or the nodes up to it; else None.

    It is for a file that fails on every batch, so that its layers can't be compared.
    """
    graph, binding = FileGraph(job.candidate), job.bind()
    feed = binding.by_input(next(job.inputs.batches(binding.batch_size)))
    for runtime in evidence.runtimes:
        setup = ort_setup(job.policy, runtime.runtime)
        if runtime.failure is None or setup is None:
            continue
        for piece, fed in _refused_pieces(graph, feed, setup):
            standalone = Standalone.from_piece(piece, fed)
            model, inputs = standalone.model, standalone.inputs
            try:
                run(model, inputs, setup)
            except Exception as error:  # ONNX Runtime's errors have no common base
                raises = _kind_of(error)
            else:
                continue
            names = list(standalone.outputs.values())
            expected: dict[str, OutputArray] = {}
            with contextlib.suppress(Exception), np.errstate(all="ignore"):
                arrays = ReferenceEvaluator(model).run(names, dict(inputs))
                expected = {n: np.asarray(a) for n, a in zip(names, arrays, strict=True)}
            return ReducedFailure(
                kind="runtime" if expected else "exporter",
                model=model,
                inputs=inputs,
                expected=expected,
                tolerances={name: RoundingBound(0.0, 0.0) for name in expected},
                setup=setup,
                tensors={new: name for name, new in standalone.outputs.items()},
                raises=raises,
                constant_inputs=_constant_inputs(graph, standalone),
            )
    return None


def _constant_inputs(graph: FileGraph, standalone: Standalone) -> tuple[str, ...]:
    """Return the inputs that the file computes only from its weights."""
    return tuple(n for n, tensor in standalone.sources.items() if graph.is_constant(tensor))


def _refused_pieces(
    graph: FileGraph, feed: Mapping[str, OutputArray], setup: OrtSetup
) -> Iterator[tuple[Piece, Mapping[str, OutputArray]]]:
    """Yield the first node that fails, then the nodes up to it, with their inputs."""
    outputs = [[name for name in node.output if name] for node in graph.nodes]

    def runs(count: int) -> bool:
        try:
            piece = graph.cut(itertools.chain.from_iterable(outputs[:count]), {})
            SubgraphSession(piece, setup)(feed, only=outputs[count - 1])
        except Exception:  # ONNX Runtime's errors have no common base
            return False
        return True

    index = latest(len(outputs) + 1, runs)
    if index == len(outputs):
        return
    _, read = graph.segment(outputs[index][0], {*graph.tensors, *feed})
    computed = [name for name in read if name in graph.producer]
    values = dict(feed)
    if computed:
        values |= SubgraphSession(graph.cut(computed, {}), setup)(feed)
    dtypes = {name: array.dtype for name, array in values.items()}
    alone = graph.part([index], {**dict.fromkeys(outputs[index], np.dtype(np.float32)), **dtypes})
    if alone is not None:
        yield alone, {reference_name(name): values[name] for name in alone.cuts}
    yield graph.cut(outputs[index], {}), feed


class _Reducer:
    """Tries to reduce the failure of one comparison."""

    def __init__(self, comparison: LayerComparison) -> None:
        self._comparison = comparison
        self._context, self._findings = comparison.context, comparison.findings
        self._graph, self._layout = comparison.findings.graph, comparison.findings.layout
        self._limits, self._survey = comparison.limits, comparison.findings.survey
        self._rounding_limits = replace(comparison.limits, float64=False)
        """Limits without float64, because the expected values come from ONNX graphs."""

    def attempts(self) -> Iterator[Callable[[], ReducedFailure | None]]:
        """Yield the attempts to reduce the graph, most specific first."""
        localization, limits = self._comparison.localization, self._limits
        if self._comparison.accepted_batches:
            yield self._refused_batch
        if localization.optimiser or localization.blame is not None:
            yield self._optimizer
        layers = self._findings.measured.layers
        for number in sorted(n for n, layer in layers.items() if limits.is_source(layer)):
            yield lambda number=number: self._layer(number)  # type: ignore[misc]
        outputs = returned_values(self._graph.outputs, self._survey, self._layout.names)
        for name, number in outputs.items():
            yield lambda name=name, number=number: self._output(name, number)  # type: ignore[misc]

    def arguments(self, number: int, sources: Mapping[str, str]) -> tuple[str, ...] | None:
        """Return the inputs of a value's module in the order of its arguments.

        None if some arguments or inputs are other values. `sources`: tensors by input.
        """
        values, suspect = self._survey.values, self._findings.suspect(number)
        layer = suspect.value
        if layer.functional or suspect.folded is not None:
            return None
        inputs = dict(zip(self._context.tensor_inputs, self._survey.inputs, strict=False))
        numbers = {**inputs, **self._layout.value_at_cut}

        def first(number: int) -> int:
            repeats = values[number].repeats
            return number if repeats is None else first(repeats)

        names = {
            first(numbers[tensor]): name for name, tensor in sources.items() if tensor in numbers
        }
        if {first(n) for n in layer.inputs} != names.keys() or len(names) != len(sources):
            return None
        return tuple(names[first(n)] for n in layer.inputs)

    def path(self, number: int) -> str:
        """Return the path of the module that computes a value."""
        return self._survey.values[number].path

    def _batches(self) -> Iterator[Batch]:
        """Yield batches, single samples first because their arrays are the smallest."""
        first = self._context.batches[0]
        if not self._context.binding.fixed:
            for row in range(len(next(iter(first.values())))):
                yield {name: array[row : row + 1] for name, array in first.items()}
        yield from self._context.batches

    def _layer(self, number: int) -> ReducedFailure | None:
        """Reduce to the nodes from the nearest correct values to the value of one layer."""
        tensor = self._layout.names[number]
        piece = self._graph.cut([tensor], self._layout.cuts)
        for batch in self._batches():
            with contextlib.suppress(ForwardPathChanged):
                measured = self._measure(piece, tensor, number, batch=batch, alone=True)
                if measured is not None and measured.is_off:
                    return self._with_cause(measured)
        return None

    def _output(self, name: str, number: int) -> ReducedFailure | None:
        """Reduce to the nodes from the latest values from which an output still differs."""
        cuts = list(self._layout.cuts.items())

        def measure(count: int, batch: Batch) -> _MeasuredPiece | None:
            piece = self._graph.cut([name], dict(cuts[:count]))
            return self._measure(piece, name, number, batch=batch, alone=False)

        for batch in self._batches():
            with contextlib.suppress(ForwardPathChanged):
                uncut = measure(0, batch)
                if uncut is None or not uncut.is_off:
                    continue

                def is_off_after(count: int, batch: Batch = batch) -> bool:
                    trial = measure(count, batch)
                    return trial is not None and trial.is_off

                last = measure(latest(len(cuts) + 1, is_off_after), batch)
                return None if last is None else self._with_cause(last)
        return None

    def _refused_batch(self) -> ReducedFailure | None:
        """Reduce to the nodes of the first layer that raises an error for another batch size."""
        accepted, layout = self._comparison.accepted_batches, self._layout
        size = next(size for size in itertools.count(1) if size not in accepted)
        first = self._context.batches[0]
        batch = {name: np.resize(array, (size, *array.shape[1:])) for name, array in first.items()}
        values = self._context.runner.values(batch, self._survey, layout.names)
        for number, tensor in layout.names.items():
            if number in self._survey.inputs or number not in values:
                continue
            piece = self._graph.cut([tensor], layout.cuts)
            if not {layout.value_at_cut[cut] for cut in piece.cuts} <= values.keys():
                continue
            references = layout.references(piece.cuts, values)
            session = SubgraphSession(piece, self._limits.setup)
            fed = {**self._context.feed(batch), **session.cut_inputs(references)}
            standalone = Standalone.from_piece(piece, fed, {tensor: values[number]})
            declared = {value.name: value.type for value in piece.model.graph.input}
            for value in standalone.model.graph.input:  # its batch axis may be fixed
                value.type.CopyFrom(declared.get(standalone.sources[value.name], value.type))
            try:
                run(standalone.model, standalone.inputs, self._limits.setup)
            except Exception as error:  # ONNX Runtime's errors have no common base
                name = standalone.outputs[tensor]
                return ReducedFailure(
                    kind="exporter",
                    model=standalone.model,
                    inputs=standalone.inputs,
                    expected={name: values[number]},
                    tolerances={name: RoundingBound(0.0, 0.0)},
                    setup=self._limits.setup,
                    tensors={name: tensor},
                    raises=_kind_of(error),
                    constant_inputs=_constant_inputs(self._graph, standalone),
                    accepted_batches=accepted,
                )
        return None

    def _measure(
        self, piece: Piece, tensor: str, number: int, *, batch: Batch, alone: bool
    ) -> _MeasuredPiece | None:
        """Run the piece from the model's values. `alone`: whether its inputs are those of a
        layer."""
        layout, context = self._layout, self._context
        needed = {number, *(layout.value_at_cut[cut] for cut in piece.cuts)}
        values = context.runner.values(batch, self._survey, needed)
        if not needed <= values.keys():
            return None
        session = SubgraphSession(piece, self._limits.setup)
        references = layout.references(piece.cuts, values)
        fed = {**context.feed(batch), **session.cut_inputs(references)}
        actual = session(context.feed(batch), references, only=[tensor])[tensor]
        truth, rounding = self._truth(batch, values, number, alone=alone)
        expected = values[number]
        deviation = deviation_of(expected, actual, truth, rounding)
        limits = (
            self._limits if truth is not None or rounding is not None else self._rounding_limits
        )
        return _MeasuredPiece(
            piece, tensor, number, fed, references, expected, actual, deviation, limits, alone
        )

    def _truth(
        self, batch: Batch, values: Mapping[int, OutputArray], number: int, *, alone: bool
    ) -> tuple[OutputArray | None, OutputArray | None]:
        if not self._limits.float64:
            return None, None
        try:
            truths: Float64Values = self._context.runner.float64_values(batch, self._survey, values)
        except GateError:
            return None, None
        true = truths.alone if alone else truths.through
        return true.get(number), truths.rounding[int(alone)].get(number)

    def _with_cause(self, measured: _MeasuredPiece) -> ReducedFailure | None:
        """Distinguish a fault of the file from one of the runtime.

        The same nodes are computed without optimizations and by the ONNX reference evaluator.
        """
        setup = self._limits.setup
        plain = self._compute_tensor(measured, setup.plain)
        if plain is not None and setup != setup.plain and not measured.differs(plain):
            return self._optimizer(measured.node_indices(self._graph))
        excluded = ["runtime"] if plain is not None and setup != setup.plain else []
        evaluated = self._evaluate_reference(measured)
        if evaluated is not None and not measured.differs(evaluated[measured.tensor]):
            return self._runtime(measured, evaluated) or measured.to_failure(self, ())
        if evaluated is not None and not is_beyond(
            evaluated[measured.tensor], measured.actual, measured.tolerance
        ):
            excluded.append("evaluator")
        return measured.to_failure(self, tuple(excluded))

    def _compute_tensor(self, measured: _MeasuredPiece, setup: OrtSetup) -> OutputArray | None:
        try:
            session = SubgraphSession(measured.piece, setup)
            return session(measured.feed, measured.references, only=[measured.tensor])[
                measured.tensor
            ]
        except Exception:  # ONNX Runtime's errors have no common base
            return None

    def _evaluate_reference(self, measured: _MeasuredPiece) -> dict[str, OutputArray] | None:
        """Return all tensors of the piece by the ONNX reference evaluator; None if it fails."""
        if sum(array.nbytes for array in measured.references.values()) > MAX_BYTES // 16:
            return None
        standalone = Standalone.from_piece(measured.piece, measured.fed)
        model = standalone.model
        inner = [n for node in model.graph.node for n in node.output if n]
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        try:
            with np.errstate(all="ignore"):
                arrays = ReferenceEvaluator(model).run(inner, dict(standalone.inputs))
        except Exception:  # the evaluator lacks operators and checks little
            return None
        tensors = {renamed: name for name, renamed in standalone.outputs.items()}
        return {
            tensors.get(name, name): array
            for name, array in zip(inner, arrays, strict=True)
            if isinstance(array, np.ndarray)
        }

    def _runtime(
        self, measured: _MeasuredPiece, evaluated: Mapping[str, OutputArray]
    ) -> ReducedFailure | None:
        """Reduce to the fewest nodes for which a kernel differs from the reference evaluator."""
        varying = set(self._graph.tensors)  # others contain weights, which stay in the graph
        computed = {name: array for name, array in evaluated.items() if name in varying}
        values = {**measured.inputs_by_tensor(), **computed}
        return self._fewest(
            "runtime",
            measured.node_indices(self._graph),
            values,
            setup=self._limits.setup,
            first=(),
        )

    def _optimizer(self, indices: Sequence[int] | None = None) -> ReducedFailure | None:
        """Reduce to the fewest nodes that optimizations change."""
        setup = self._limits.setup.optimized
        for batch in self._batches():
            values = self._plain_values(batch, setup.plain)
            if values is None:
                return None
            nodes = enumerate(self._graph.nodes)
            computing = [i for i, node in nodes if any(name in values for name in node.output)]
            reduced = self._fewest(
                "optimizer",
                computing if indices is None else indices,
                values,
                setup=setup,
                first=self._replaced_nodes(),
            )
            if reduced is not None:
                return reduced
        return None

    def _plain_values(self, batch: Batch, plain: OrtSetup) -> dict[str, OutputArray] | None:
        """Return the file's inputs and all tensors without optimizations; None if too large."""
        feed = dict(self._context.feed(batch))
        session = SubgraphSession(self._graph.marked(self._graph.tensors), plain)
        values = {**session(feed), **feed}
        return values if sum(v.nbytes for v in values.values()) <= MAX_BYTES else None

    def _replaced_nodes(self) -> tuple[int, ...]:
        """Return the indices of the file's nodes that the optimizer at fault replaces."""
        blame = self._comparison.localization.blame
        named = set() if blame is None else set(blame.before)
        return tuple(
            index
            for index, node in enumerate(self._graph.nodes)
            if f"{node.op_type} {node.name}".strip() in named
        )

    def _fewest(
        self,
        kind: Kind,
        indices: Sequence[int],
        values: Mapping[str, OutputArray],
        *,
        setup: OrtSetup,
        first: tuple[int, ...],
    ) -> ReducedFailure | None:
        dtypes = {name: array.dtype for name, array in values.items()}
        blame = self._comparison.localization.blame
        names = blame.names if kind == "optimizer" and blame is not None else ()
        all_nodes = self._graph.part(indices, dtypes)
        raises = None if all_nodes is None else self._compare_piece(all_nodes, values, setup)[0]

        def differs(candidate: tuple[int, ...]) -> bool:
            piece = self._graph.part(candidate, dtypes)
            if piece is None:
                return False
            raised, differing = self._compare_piece(piece, values, setup)
            if raised != raises or not (differing or raised):
                return False
            return kind != "optimizer" or self._is_right(piece, values, setup, without=names)

        start = tuple(indices)
        if not differs(start):
            return None
        if first and differs(first):
            start = first
        piece = self._graph.part(fewest_nodes(start, differs), dtypes)
        if piece is None:
            return None
        _, differing = self._compare_piece(piece, values, setup)
        piece = self._with_single_output(piece, differing, values, setup)
        return self._failure_of(kind, piece, values, setup=setup, raises=raises)

    def _with_single_output(
        self,
        piece: Piece,
        differing: Sequence[str],
        values: Mapping[str, OutputArray],
        setup: OrtSetup,
    ) -> Piece:
        """Return the piece with only the first differing output, if it still differs alone."""
        if len(piece.outputs) < 2 or not differing:
            return piece
        model = copy.deepcopy(piece.model)
        del model.graph.output[:]
        model.graph.output.append(onnx.ValueInfoProto(name=differing[0]))
        alone = replace(piece, model=model, outputs=(differing[0],))
        _, differing_alone = self._compare_piece(alone, values, setup)
        return alone if differing_alone else piece

    def _compare_piece(
        self, piece: Piece, values: Mapping[str, OutputArray], setup: OrtSetup
    ) -> tuple[str | None, list[str]]:
        """Return the error of a session and the outputs that differ from `values`."""
        try:
            session = SubgraphSession(piece, setup)
            feed = {v.name: values[v.name] for v in piece.model.graph.input if v.name in values}
            names = [name for name in piece.outputs if name in session.outputs]
            actual = session(feed, values, only=names)
        except Exception as error:  # ONNX Runtime's errors have no common base
            return _kind_of(error), []
        return None, [
            name
            for name in names
            if is_beyond(actual[name], values[name], self._tolerance(values[name]))
        ]

    def _is_right(
        self,
        piece: Piece,
        values: Mapping[str, OutputArray],
        setup: OrtSetup,
        *,
        without: Sequence[str],
    ) -> bool:
        """Return True if the piece is correct without optimizations, and without the faulty
        optimizers.

        Then it shows the same failure as the file.
        """
        if self._compare_piece(piece, values, setup.plain) != (None, []):
            return False
        if not without:
            return True
        disabled = tuple({*setup.settings.disabled_optimizers, *without})
        settings = setup.settings.model_copy(update={"disabled_optimizers": disabled})
        return self._compare_piece(piece, values, replace(setup, settings=settings)) == (None, [])

    def _tolerance(self, expected: OutputArray) -> RoundingBound:
        """Return how much two ways to compute a graph may differ, without a float64 reference."""
        return tolerance_of(
            deviation_of(expected, expected, None, None), self._rounding_limits.output_bounds
        )

    def _failure_of(
        self,
        kind: Kind,
        piece: Piece,
        values: Mapping[str, OutputArray],
        *,
        setup: OrtSetup,
        raises: str | None,
    ) -> ReducedFailure:
        fed = {reference_name(name): values[name] for name in piece.cuts}
        fed |= {v.name: values[v.name] for v in piece.model.graph.input if v.name in values}
        standalone = Standalone.from_piece(piece, fed, values)
        new = standalone.outputs
        return ReducedFailure(
            kind=kind,
            model=standalone.model,
            inputs=standalone.inputs,
            expected={new[name]: values[name] for name in piece.outputs},
            tolerances={new[name]: self._tolerance(values[name]) for name in piece.outputs},
            setup=setup,
            tensors={renamed: name for name, renamed in new.items()},
            raises=raises,
            excluded=("unoptimized",) if kind == "optimizer" else ("exporter",),
            constant_inputs=_constant_inputs(self._graph, standalone),
        )


@dataclass(frozen=True)
class _MeasuredPiece:
    """One piece of the file, computed from the model's values."""

    piece: Piece
    tensor: str
    number: int
    fed: Mapping[str, OutputArray]
    references: Mapping[str, OutputArray]
    expected: OutputArray
    actual: OutputArray
    deviation: Deviation
    limits: DeviationLimits
    alone: bool

    @property
    def bounds(self) -> tuple[float, float]:
        return self.limits.layer_bounds if self.alone else self.limits.output_bounds

    @property
    def tolerance(self) -> RoundingBound:
        return tolerance_of(self.deviation, self.bounds)

    @property
    def is_off(self) -> bool:
        """Return True if it deviates by the limits of a localization and by those of the script."""
        if self.alone:
            is_beyond_limits = self.limits.is_source(LayerDeviations(alone=self.deviation))
        else:
            is_beyond_limits = not self.limits.agrees({self.tensor: self.deviation})
        return is_beyond_limits and self.differs(self.actual)

    def differs(self, actual: OutputArray) -> bool:
        return is_beyond(actual, self.expected, self.tolerance)

    def node_indices(self, graph: Any) -> list[int]:
        """Return the indices of its nodes that depend on its inputs."""
        names = {name for node in self.piece.model.graph.node for name in node.output if name}
        return sorted({graph.producer[name] for name in names & set(graph.tensors)})

    def inputs_by_tensor(self) -> dict[str, OutputArray]:
        by_cut = {cut: self.fed[reference_name(cut)] for cut in self.piece.cuts}
        return {**self.feed, **by_cut}

    @property
    def feed(self) -> dict[str, OutputArray]:
        """Return the inputs of the file."""
        cut = set(map(reference_name, self.piece.cuts))
        return {name: array for name, array in self.fed.items() if name not in cut}

    def to_failure(self, finder: _Reducer, excluded: tuple[str, ...]) -> ReducedFailure:
        """Return the piece as a standalone failure."""
        standalone = Standalone.from_piece(self.piece, self.fed, {self.tensor: self.actual})
        model, name = standalone.model, standalone.outputs[self.tensor]
        if node_count(model) > _MIN_FOLDED_NODES:
            model = _fold_shapes(model, standalone.inputs, self.limits.setup)
        arguments = finder.arguments(self.number, standalone.sources) if self.alone else None
        return ReducedFailure(
            kind="exporter",
            model=model,
            inputs=standalone.inputs,
            expected={name: self.expected},
            tolerances={name: self.tolerance},
            setup=self.limits.setup,
            tensors={name: self.tensor},
            layer=None if arguments is None else finder.path(self.number),
            arguments=arguments,
            excluded=excluded,
            constant_inputs=_constant_inputs(finder._graph, standalone),
        )


def deviation_of(
    expected: OutputArray,
    actual: OutputArray,
    truth: OutputArray | None,
    rounding: OutputArray | None,
) -> Deviation:
    """Return the deviation of a tensor from the expected value.

    truth: sketch of the float64 values. rounding: sketch of the error by random rounding.
    """
    deviation = Deviation()
    deviation.update(expected, actual)
    deviation.update_noise(expected, actual, truth, rounding)
    return deviation


def tolerance_of(deviation: Deviation, bounds: tuple[float, float]) -> RoundingBound:
    """Return how much the tensor may differ within these bounds on `ratio` and `peak`."""
    return RoundingBound(*deviation.tolerances(bounds))


def _fold_shapes(
    model: onnx.ModelProto, inputs: Mapping[str, OutputArray], setup: OrtSetup
) -> onnx.ModelProto:
    """Return the model with arithmetic on shapes replaced by its results."""
    constant = {tensor.name for tensor in model.graph.initializer}
    folded = []
    for node in model.graph.node:
        sized = node.op_type in ("Shape", "Size")
        if sized or (all(n in constant or not n for n in node.input) and node.input):
            constant.update(node.output)
            folded.append(node)
    outputs = {value.name for value in model.graph.output}
    names = [n for node in folded for n in node.output if n and n not in outputs]
    if not names:
        return model
    marked = copy.deepcopy(model)
    add_outputs(marked.graph, names)
    arrays = run(marked, inputs, setup.plain)
    integers = {
        n for n in names if arrays[n].dtype.kind in "iu" and arrays[n].size <= _MAX_SHAPE_SIZE
    }
    smaller = copy.deepcopy(model)
    kept = [node for node in smaller.graph.node if not set(node.output) <= integers]
    kept = _needed_nodes(kept, outputs)
    read = {name for node in kept for name in node.input}
    replace_messages(smaller.graph.node, kept)
    smaller.graph.initializer.extend(
        numpy_helper.from_array(arrays[name], name) for name in sorted(integers & read)
    )
    return smaller


def _needed_nodes(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """Return the nodes that compute the outputs; all nodes if some have subgraphs."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed & set(node.output) or any(a.HasField("g") for a in node.attribute):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]
