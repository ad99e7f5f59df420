"""The runtime tract, an inference engine in Rust."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from gate.errors import EvidenceError, OutputMismatch
from gate.records.runtime import PROVIDERS, RuntimeName
from gate.runtimes.ort import private_copy
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch, RuntimeArray

_ENGINE = "default"
"""tract's name of the CPU engine."""

_MAX_SHAPES = 4
"""Largest number of prepared models that are kept."""

_BACKTRACE = "Stack backtrace:"

_LOWER = {"F16": "float16", "BF16": "bfloat16"}

Shapes = tuple[tuple[int, ...], ...]


class _Refusal(EvidenceError):
    """An exception of tract in one line."""


class TractSession(Session):
    """A file in tract."""

    def __init__(self, file: RunnableFile, example: Batch) -> None:
        """Prepare the file. Raises DigestMismatch, OutputMismatch, EvidenceError if tract fails."""
        self._file = file
        self._by_shape: OrderedDict[Shapes, _Prepared] = OrderedDict()
        self._symbolic: _Prepared | None = None
        self._why_not = ""
        try:
            self._symbolic = self._prepare(None)
            self._symbolic.run(example)
        except _Refusal as error:
            self._disable_symbolic_batch(error)
            self._run_shape(example)

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Run a batch. Raises EvidenceError if tract fails."""
        if self._symbolic is not None:
            try:
                return self._symbolic.run(batch)
            except _Refusal as error:
                self._disable_symbolic_batch(error)
        return self._run_shape(batch)

    def proof(self) -> Proof:
        """Return tract's description of the engine that prepared the model, and of its types."""
        prepared = self._symbolic or next(reversed(self._by_shape.values()))
        types = prepared.types()
        sizes = "symbolic" if self._symbolic else f"one model a shape: {self._why_not}"
        return Proof(
            providers_active=(f"tract {prepared.engine}",),
            session_options={"sizes": sizes, "types": ", ".join(types)},
            device=prepared.engine,
            precision=next((name for low, name in _LOWER.items() if low in types), "float32"),
        )

    def _disable_symbolic_batch(self, error: _Refusal) -> None:
        self._symbolic = None
        self._why_not = str(error)[:200]

    def _run_shape(self, batch: Batch) -> list[RuntimeArray]:
        shapes = tuple(np.shape(batch[spec.name]) for spec in self._file.subject.inputs)
        prepared = self._by_shape.get(shapes)
        if prepared is None:
            try:
                prepared = self._prepare(batch)
            except _Refusal as error:
                raise EvidenceError(
                    f"{error}. With symbolic sizes: {self._why_not}. tract can't run this file."
                ) from error
            while len(self._by_shape) >= _MAX_SHAPES:
                self._by_shape.popitem(last=False)
        self._by_shape[shapes] = prepared
        self._by_shape.move_to_end(shapes)
        return prepared.run(batch)

    def _prepare(self, batch: Batch | None) -> _Prepared:
        """Prepare the model for the shapes of `batch`; None: with symbolic sizes."""
        with private_copy(self._file) as path:
            return _Prepared(str(path), self._file, batch)


class _Prepared:
    """A model that is ready to run."""

    def __init__(self, path: str, file: RunnableFile, batch: Batch | None) -> None:
        import tract

        with _shortened_errors():
            model = tract.onnx().load(path)
            self._inputs = [model.input_name(index) for index in range(model.input_count())]
            _check_names(self._inputs, model.output_count(), file)
            for index, name in enumerate(self._inputs):
                if batch is not None:
                    model.set_input_fact(index, _format_fact(batch[name]))
            runtime = tract.runtime_for_name(_ENGINE)
            self._runnable = runtime.prepare(model.into_model())
            self.engine = str(runtime.name())

    def run(self, batch: Batch) -> list[RuntimeArray]:
        with _shortened_errors():
            outputs = self._runnable.run([batch[name] for name in self._inputs])
            return [output.to_numpy() for output in outputs]

    def types(self) -> list[str]:
        """Return the types of the computation, of the inputs and of the outputs."""
        import tract

        with _shortened_errors():
            model = self._runnable
            facts = [model.input_fact(index) for index in range(model.input_count())]
            facts += [model.output_fact(index) for index in range(model.output_count())]
            costs = json.loads(model.profile_json(None))["nodes"]
        names = {str(tract.DatumType(fact.datum_type())) for fact in facts}
        return sorted(names | set(_cost_types(costs)))


class TractRuntime(Runtime):
    """The package `tract` on the CPU with one thread."""

    name: ClassVar[RuntimeName] = "tract"
    promises = Promises(PROVIDERS["tract"])

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - it has no options
        """Return why the package is missing."""
        if find_spec("tract") is not None:
            return None
        return "the package tract is not installed: pip install 'parity-gate[tract]'."

    def versions(self) -> dict[str, str]:
        """Return the version of the imported library."""
        import tract

        return {"tract": str(tract.version())}

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,  # noqa: ARG002 - it has no options
        conditions: Conditions,  # noqa: ARG002 - it has one thread
        example: Batch,
    ) -> Session:
        """Open the file. Raises DigestMismatch, OutputMismatch, EvidenceError if tract fails."""
        return TractSession(file, example)


@contextlib.contextmanager
def _shortened_errors() -> Iterator[None]:
    """Convert tract's exceptions to EvidenceError, without a backtrace."""
    import tract

    try:
        yield
    except tract.TractError as error:
        text = str(error).partition(_BACKTRACE)[0].replace("Caused by:", "because")
        raise _Refusal(f"tract: {' '.join(text.split())}") from None


def _check_names(inputs: list[str], outputs: int, file: RunnableFile) -> None:
    """Raise OutputMismatch unless inputs have the file's names, and the number of outputs matches.

    tract names outputs after their nodes, in the file's order.
    """
    expected = {spec.name for spec in file.subject.inputs}
    if set(inputs) != expected or outputs != len(file.subject.outputs):
        raise OutputMismatch(
            f"tract reads the inputs {inputs} and {outputs} outputs from the file, expected "
            f"{sorted(expected)} and {len(file.subject.outputs)}. Give the export plain names."
        )


def _format_fact(array: RuntimeArray) -> str:
    """Return tract's notation of a shape and type, for example `8,3,12,12,f32`."""
    kind = array.dtype
    name = "bool" if kind.kind == "b" else f"{kind.kind}{8 * kind.itemsize}"
    return ",".join([*map(str, array.shape), name])


def _cost_types(nodes: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the types of the nodes' costs: `FMA(F32)` has the type F32."""
    for node in nodes:
        for cost in node.get("cost", {}):
            yield cost.partition("(")[2].rstrip(")")
