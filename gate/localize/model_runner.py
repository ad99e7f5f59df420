"""Run the model with hooks: intermediate values and their float64 reference."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from gate.data.input_binding import InputBinding
from gate.errors import EvidenceError, GateError, ModelError, first_line
from gate.localize.file_graph import FileGraph
from gate.measure.context import ReferencePass
from gate.policy.policy import Policy
from gate.reference.float64 import double_copy, in_double
from gate.reference.onnx_operators import is_text
from gate.reference.onnx_reference import OnnxNode
from gate.reference.random_rounding import RandomRounding
from gate.reference.torch_reference import TorchReference
from gate.reference.torch_session import DispatchMode, TorchSession
from gate.reference.validity import difference, is_near, is_valid
from gate.storage.arrays import Batch, OutputArray, text_digests
from gate.weights.model_tensors import DerivedConstants, ReferenceObserver, to_float64


@dataclass(frozen=True)
class HookEvent:
    """A tensor that enters or leaves a module call."""

    number: int
    """Index of the event in the forward pass."""
    path: str
    """Path of the module; empty for the model itself."""
    kind: str
    """Kind of the module (`kind_of`)."""
    call: int
    """Index of the module's call in the forward pass."""
    side: Literal["in", "out"]
    caller: str
    """Path of the module whose forward made the call; the model's own for the model."""
    composite: bool
    """True if modules were already called inside this call."""


HookCallback = Callable[[HookEvent, torch.Tensor], torch.Tensor | None]
"""Returns a tensor that replaces that of the event, or None."""


@contextmanager
def hooked(model: nn.Module, callback: HookCallback) -> Iterator[None]:
    """Call `callback` for every tensor that enters or leaves a module, in order of execution.

    All hooks are removed afterwards. A node of an ONNX file with subgraphs counts as a whole,
    because its inner values belong to no graph and may be computed any number of times.
    """
    hook = Hook(callback)
    handles = []
    modules = dict(model.named_modules())
    bodies = tuple(
        f"{path}." for path, node in modules.items() if isinstance(node, OnnxNode) and node.bodies
    )
    try:
        for path, module in modules.items():
            if path.startswith(bodies):
                continue
            enter, leave = partial(hook.enter, path), partial(hook.leave, path)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Call:
    path: str
    number: int
    composite: bool = False


class Hook:
    """Observes every tensor that enters or leaves a module, and may replace it."""

    def __init__(self, callback: HookCallback) -> None:
        self._callback = callback
        self._events = 0
        self._counts: Counter[str] = Counter()
        self._open: list[_Call] = []

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with which the module is called."""
        if self._open:
            self._open[-1].composite = True
        self._open.append(_Call(path, self._counts[path]))
        self._counts[path] += 1
        return self._apply_callback(module, (args, kwargs), "in")

    def leave(self, _path: str, module: nn.Module, _args: Any, output: Any) -> Any:
        """Return the output of the module."""
        returned = self._apply_callback(module, output, "out")
        self._open.pop()
        return returned

    def _apply_callback(self, module: nn.Module, tensors: Any, side: Literal["in", "out"]) -> Any:
        """Return the tensors with replacements by `callback`; None if there are none."""
        leaves, structure = pytree.tree_flatten(tensors)
        call = self._open[-1]
        caller = self._open[-2].path if len(self._open) > 1 else call.path
        is_replaced = False
        for index, value in enumerate(leaves):
            is_digest = side == "out" and isinstance(module, OnnxNode) and is_text(value)
            leaf = torch.from_numpy(text_digests(value)) if is_digest else value
            if not _is_plain(leaf):
                continue
            event = HookEvent(
                self._events, call.path, kind_of(module), call.number, side, caller, call.composite
            )
            replacement = self._callback(event, leaf)
            self._events += 1
            if replacement is not None and not is_digest:
                leaves[index], is_replaced = replacement, True
        return pytree.tree_unflatten(leaves, structure) if is_replaced else None


def kind_of(module: nn.Module) -> str:
    """Return the name of the PyTorch layer class of a module or its base class, else its own class.

    For a node of an ONNX file, return its operator.
    """
    for kind in type(module).__mro__:
        package, _, name = kind.__module__.rpartition(".")
        if package == "torch.nn.modules" and name not in ("module", "container"):
            return kind.__name__.lstrip("_")
    return class_name(module)


def class_name(module: nn.Module) -> str:
    """Return the module's class name; for a node of an ONNX file, its operator."""
    return module.call.operator if isinstance(module, OnnxNode) else type(module).__name__


def _is_plain(leaf: object) -> bool:
    """Return True for a dense tensor of bools, integers or real floats."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and not leaf.is_complex()
        and not leaf.is_quantized
        and not leaf.is_nested
    )


ELEMENTS = 8192
"""Number of elements of a sketch: enough to include each of hundreds of channels, few enough that
hundreds of layers cost little."""


@dataclass(frozen=True)
class ComputedValue:
    """A tensor that a module call or code between calls computes on the first batch.

    An in-place operation creates another value.
    """

    number: int
    path: str
    """Path of the module whose forward computed it; empty for the model itself."""
    kind: str
    """Class name of that module; empty for functional values."""
    call: int
    before: str | None
    """Path of the module that received or returned a functional value."""
    inputs: tuple[int, ...]
    """Indices of the values that the module received; none for functional values."""
    shape: tuple[int, ...]
    sketch: OutputArray
    """Some of its elements, at the same positions for every value of this size."""
    repeats: int | None
    """Index of an earlier equal value, for example before Dropout in eval mode."""

    @property
    def nbytes(self) -> int:
        """Return the size of the whole value in bytes."""
        return math.prod(self.shape) * self.sketch.itemsize

    @property
    def functional(self) -> bool:
        """Return True if code in the forward of `path` computed it, and not a module called
        there."""
        return self.before is not None


@dataclass(frozen=True)
class Overwriting:
    """An in-place operation."""

    number: int
    """Index of the resulting value."""
    path: str
    """Path of the module that performed it, or in whose forward it was performed."""
    kind: str
    """Class name of the module; empty if code between modules performed it."""

    @property
    def text(self) -> str:
        """Return a description of the module or code that overwrote the value."""
        if self.kind:
            return f"{self.path} ({self.kind})"
        return f"code in the forward of {self.path}" if self.path else "the model's own forward"


class ValueSurvey:
    """Records the values of one forward pass.

    Call the model outside inference mode, because tensor versions are needed.
    """

    def __init__(self) -> None:
        self.values: list[ComputedValue] = []
        self.event_values: list[int] = []
        """Index of the value at each event."""
        self.paths: list[str] = []
        """Path of the module at each event."""
        self.inputs: tuple[int, ...] = ()
        """Indices of the model's inputs, in the order of its arguments."""
        self.outputs: tuple[int, ...] = ()
        """Indices of the model's outputs, flattened."""
        self.overwritten: dict[int, Overwriting] = {}
        """In-place operation that overwrote the memory of a value, by value index."""
        self._latest: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._by_identity: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], int]] = {}
        self._received: dict[tuple[str, int], tuple[int, ...]] = {}
        self._first: dict[tuple[tuple[int, ...], str, bytes], int] = {}

    def handle(self, event: HookEvent, tensor: torch.Tensor) -> None:
        """Record the tensor of an event."""
        key = (id(tensor), tensor._version)
        previous, number = self._by_identity.get(key, (None, -1))
        is_same = previous is not None and previous() is tensor  # ids are reused
        # A value that a leaf module returns unchanged may be another tensor in the file.
        is_leaf_output = event.side == "out" and not event.composite
        if not is_same or is_leaf_output:
            number = len(self.values)
            self.values.append(self._value(event, tensor))
            self._by_identity[key] = (weakref.ref(tensor), number)
            self._note_overwriting(event, tensor, same=is_same)
        self.event_values.append(number)
        self.paths.append(event.path)
        call = (event.path, event.call)
        if event.side == "in":
            self._received[call] = (*self._received.get(call, ()), number)
        if event.path == "" and event.side == "in":
            self.inputs, self.outputs = (*self.inputs, number), ()
        elif event.path == "":
            self.outputs = (*self.outputs, number)

    def _note_overwriting(self, event: HookEvent, tensor: torch.Tensor, *, same: bool) -> None:
        reference, earlier = self._latest.get(id(tensor), (None, -1))
        number = len(self.values) - 1
        if reference is not None and reference() is tensor and not same:
            by_module = event.side == "out" and not event.composite
            path = event.path if event.side == "out" else event.caller
            self.overwritten[earlier] = Overwriting(number, path, event.kind if by_module else "")
        self._latest[id(tensor)] = (weakref.ref(tensor), number)

    def received(self, path: str) -> tuple[int, ...]:
        """Return the indices of the values that the first call of a module received."""
        return self._received.get((path, 0), ())

    def _value(self, event: HookEvent, tensor: torch.Tensor) -> ComputedValue:
        entering = event.side == "in"
        functional = (entering or event.composite) and not (entering and event.path == "")
        got = () if functional else self._received.get((event.path, event.call), ())
        sketched = sketch_of(tensor)
        shape, number = tuple(tensor.shape), len(self.values)
        first = self._first.setdefault((shape, sketched.dtype.str, sketched.tobytes()), number)
        return ComputedValue(
            number=number,
            path=event.caller if entering else event.path,
            kind="" if functional else event.kind,
            call=0 if entering else event.call,
            before=event.path if functional else None,
            inputs=got,
            shape=shape,
            sketch=sketched,
            repeats=None if first == number else first,
        )


@lru_cache(maxsize=512)
def sampled_indices(size: int) -> NDArray[np.int64]:
    """Return at most `ELEMENTS` sorted random indices below `size`.

    They are random because a fixed step could select the same channels only.
    """
    if size <= ELEMENTS:
        return np.arange(size)
    return np.sort(np.random.default_rng(size).integers(0, size, ELEMENTS))


def sketch(array: OutputArray) -> OutputArray:
    """Return a copy of the sampled elements of `array`, shape (at most `ELEMENTS`,)."""
    sampled: OutputArray = array.reshape(-1)[sampled_indices(array.size)]
    return sampled


def sketch_of(tensor: torch.Tensor) -> OutputArray:
    """Return the `sketch` of a tensor."""
    flat = tensor.detach().reshape(-1)[torch.from_numpy(sampled_indices(tensor.numel()))]
    return _to_numpy(flat)


def _to_numpy(tensor: torch.Tensor) -> OutputArray:
    """Return the tensor as an array. NumPy has neither gradients nor bfloat16."""
    plain = tensor.detach()
    array: OutputArray = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


class CaptureOutputs:
    """Keeps copies of some values, or only sketches of them.

    Copies are needed because an in-place operation may overwrite the tensor later.
    """

    def __init__(self, survey: ValueSurvey, numbers: Container[int], *, complete: bool) -> None:
        self.captured: dict[int, OutputArray] = {}
        self._survey = survey
        self._numbers = numbers
        self._complete = complete

    def handle(self, event: HookEvent, tensor: torch.Tensor) -> None:
        """Keep the value if its number is requested and new. Raises EvidenceError."""
        number = number_at(self._survey, event, tensor)
        if number in self._numbers and number not in self.captured:
            complete = self._complete
            self.captured[number] = _to_numpy(tensor).copy() if complete else sketch_of(tensor)


class ReplaceOutputs:
    """Replaces values with `references`, so that no error propagates between modules.

    Keeps sketches of the values computed from the references.
    """

    def __init__(self, survey: ValueSurvey, references: Mapping[int, OutputArray]) -> None:
        self.captured: dict[int, OutputArray] = {}
        self._survey = survey
        self._references = references
        writers = {overwriting.number for overwriting in survey.overwritten.values()}
        self._in_place = survey.overwritten.keys() | writers

    def handle(self, event: HookEvent, tensor: torch.Tensor) -> torch.Tensor | None:
        """Keep the sketch and return the reference. Raises EvidenceError."""
        number = number_at(self._survey, event, tensor)
        if number not in self._references:
            return None
        if number not in self.captured:
            self.captured[number] = sketch_of(tensor)
        reference = torch.from_numpy(np.array(self._references[number])).to(tensor.dtype)
        if number in self._in_place:
            tensor.copy_(reference)  # in place, because other code may hold the same tensor
            return None
        return reference


class DisturbOutput(ReplaceOutputs):
    """Changes one value and replaces others with references.

    Only values that depend on it without a reference in between change.
    """

    def __init__(
        self, survey: ValueSurvey, references: Mapping[int, OutputArray], disturbed: int | None
    ) -> None:
        super().__init__(survey, references)
        self._disturbed = disturbed
        # Code between modules continues with the original tensor, of which a module gets a copy.
        self._in_place |= {value.number for value in survey.values if value.functional}

    def handle(self, event: HookEvent, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the changed tensor or the reference. Raises EvidenceError."""
        number = number_at(self._survey, event, tensor)
        if number != self._disturbed:
            return super().handle(event, tensor)
        changed = tensor.flip(tuple(range(tensor.dim())))
        if tensor.is_floating_point():
            changed = 1.5 * changed + 0.25
        if number in self._in_place:
            tensor.copy_(changed)
            return None
        return changed


class _NumberRecorder(DispatchMode):
    """Records the floats that are arguments of operators, and integers in the place of floats."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: dict[float, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {a.name: str(a.type) for a in func._schema.arguments}
        passed = dict(zip(arguments, args, strict=False)) | (kwargs or {})
        for name, value in passed.items():
            is_size = "int" in arguments[name].lower()
            if isinstance(value, int | float) and not isinstance(value, bool) and not is_size:
                self.numbers[float(value)] = None
        return func(*args, **(kwargs or {}))


class ForwardPathChanged(EvidenceError):
    """Raised if the forward pass makes other calls than the surveyed one."""


def number_at(survey: ValueSurvey, event: HookEvent, tensor: torch.Tensor) -> int:
    """Return the number of the value at this event. Raises ForwardPathChanged."""
    if event.number < len(survey.event_values):
        number = survey.event_values[event.number]
        value = survey.values[number]
        if survey.paths[event.number] == event.path and len(value.shape) == tensor.dim():
            return number
    raise ForwardPathChanged(
        f"the forward pass of these samples differs from that of the first ones at module "
        f"'{event.path}'. Pass samples that take the same branches."
    )


@dataclass(frozen=True)
class Float64Values:
    """Sketches of the float64 reference values, by value index."""

    through: Mapping[int, OutputArray]
    """Values of one complete float64 forward pass."""
    alone: Mapping[int, OutputArray]
    """Each value computed from the model's float32 values before it."""
    rounding: tuple[Mapping[int, OutputArray], Mapping[int, OutputArray]] = ({}, {})
    """sqrt(2) (run - null) of random rounding, for values whose float64 is another function, in a
    complete pass and from float32 values. Their errors are measured against float32."""


class ModelRunner:
    """A private copy of the model. Call it outside inference mode and without gradients."""

    def __init__(self, model: nn.Module, binding: InputBinding, *, original: nn.Module) -> None:
        """`original`: the model that `model` was copied from."""
        self.model = model
        self._binding = binding
        self._reference = ReferencePass(TorchReference(model, original).session(binding))

    def survey(self, batch: Batch) -> ValueSurvey:
        """Record the values of a forward pass. Raises EvidenceError."""
        self._reference.run(batch)  # the first run of a session may start forward twice
        survey = ValueSurvey()
        self._run(batch, survey.handle)
        return survey

    def values(
        self, batch: Batch, survey: ValueSurvey, numbers: Container[int]
    ) -> dict[int, OutputArray]:
        """Return complete values of a forward pass. Raises ForwardPathChanged, EvidenceError."""
        capture = CaptureOutputs(survey, numbers, complete=True)
        self._run(batch, capture.handle)
        return capture.captured

    def constants(self, batch: Batch, survey: ValueSurvey) -> frozenset[int]:
        """Return the values that are equal for all samples, for example window masks and position
        tables.

        They are found by running the samples in another order; none are found if all samples are
        equal. Raises the exceptions of `values`.
        """
        turned = CaptureOutputs(survey, range(len(survey.values)), complete=False)
        self._run({name: array[::-1].copy() for name, array in batch.items()}, turned.handle)
        unchanged = {
            value.number
            for value in survey.values
            if np.array_equal(turned.captured.get(value.number, ()), value.sketch, equal_nan=True)
        }
        inputs = set(survey.inputs)
        return frozenset() if inputs <= unchanged else frozenset(unchanged - inputs)

    def computed_constants(self, batch: Batch) -> Iterator[NDArray[np.float64]]:
        """Yield the float tensors that forward computes from the model's tensors alone.

        An exporter may write them into the file, such as the softmax of a parameter.
        """
        observer = ReferenceObserver(self.model, run=self._reference.run, batch=batch)
        derived = DerivedConstants(observer.all_tensors())
        try:
            with derived:
                self._reference.run(batch)
        except Exception:  # the model's own code, under a mode that it may not know
            return
        for _, tensor in derived.results():
            yield to_float64(tensor)

    def numbers(self, batch: Batch) -> list[float]:
        """Return the numbers that forward passes to PyTorch's operators."""
        recorder = _NumberRecorder()
        try:
            with recorder:
                self._reference.run(batch)
        except Exception:  # the model's own code, under a mode that it may not know
            return []
        return list(recorder.numbers)

    def disturbed(
        self,
        batch: Batch,
        survey: ValueSurvey,
        references: Mapping[int, OutputArray],
        value: int | None,
    ) -> Mapping[int, OutputArray]:
        """Return sketches of the values computed from `references` with one `value` changed.

        None changes nothing. Empty if the model can't run with the changed value.
        """
        run = DisturbOutput(survey, references, value)
        try:
            self._run(batch, run.handle)
        except Exception:  # the model's code may check its values
            return {}
        return run.captured

    def float64_values(
        self, batch: Batch, survey: ValueSurvey, references: Mapping[int, OutputArray]
    ) -> Float64Values:
        """Compute the float64 reference of the values in `references`.

        Raises ModelError if the model can't run in float64.
        """
        in_float64 = double_copy(self.model)
        runner = TorchSession(
            in_float64, self._binding, device="cpu", dtype=torch.float64, original=self.model
        )
        through = CaptureOutputs(survey, references, complete=False)
        alone = ReplaceOutputs(survey, references)
        try:
            with in_double():
                runner.run(batch)  # the first run of a session may start forward twice
                for callback in (through.handle, alone.handle):
                    with hooked(in_float64, callback):
                        runner.run(batch)
        except Exception as error:
            raise ModelError(
                f"the model can't run in float64: {type(error).__name__}: {first_line(error)}"
            ) from error
        return self._replace_invalid(batch, survey, references, (through.captured, alone.captured))

    def rounded(
        self, batch: Batch, survey: ValueSurvey, references: Mapping[int, OutputArray], *, draw: int
    ) -> tuple[Mapping[int, OutputArray], Mapping[int, OutputArray]]:
        """Return sketches of the values in `references` with random rounding, seeded by `draw`.

        One of a complete pass, one of each value computed from the references before it. Raises
        EvidenceError.
        """
        through = CaptureOutputs(survey, references, complete=False)
        alone = ReplaceOutputs(survey, references)
        for callback in (through.handle, alone.handle):
            with RandomRounding(draw):
                self._run(batch, callback)
        return through.captured, alone.captured

    def _replace_invalid(
        self,
        batch: Batch,
        survey: ValueSurvey,
        references: Mapping[int, OutputArray],
        kept: tuple[dict[int, OutputArray], dict[int, OutputArray]],
    ) -> Float64Values:
        """Return the values without those for which float64 computes another function.

        One run with random rounding, made only where float64 is far off, distinguishes these from
        amplified rounding.
        """
        wrong = {
            number
            for values in kept
            for number, r64 in values.items()
            if not is_near(r64, sketch(references[number]))
        }
        if not wrong:
            return Float64Values(*kept)
        shifts: tuple[dict[int, OutputArray], dict[int, OutputArray]] = ({}, {})
        null = CaptureOutputs(survey, wrong, complete=False)
        run = CaptureOutputs(survey, wrong, complete=False)
        try:
            for scale, capture in ((0.0, null), (1.0, run)):
                with RandomRounding(0, scale=scale):
                    self._run(batch, capture.handle)
        except GateError:
            return Float64Values(*kept)
        for number in wrong & null.captured.keys() & run.captured.keys():
            r = sketch(references[number])
            shift = difference(run.captured[number], null.captured[number])
            references64 = [np.add(r, shift, dtype=np.float64)]
            for values, shifted in zip(kept, shifts, strict=True):
                if number in values and not is_valid(values[number], r, references64):
                    shifted[number] = math.sqrt(2.0) * shift
        return Float64Values(*kept, shifts)

    def _run(self, batch: Batch, callback: HookCallback) -> None:
        with hooked(self.model, callback):
            self._reference.run(batch)


Item = TypeVar("Item")

BUDGET = 1 << 28
"""Bytes of tensors that are held at a time for each of model and file."""


@dataclass(frozen=True)
class LocalizationContext:
    """The model and the file with their values."""

    runner: ModelRunner
    graph: FileGraph
    batches: Sequence[Batch]
    """The first batch is small; values are matched and float64 is computed on it."""
    binding: InputBinding
    policy: Policy
    budget: int = BUDGET

    @property
    def tensor_inputs(self) -> list[str]:
        """The file's inputs that are tensors of the model, without strings."""
        batch = self.batches[0]
        return [name for name, sample in self.binding.pairs if batch[sample].dtype.kind != "U"]

    def feed(self, batch: Batch) -> Mapping[str, OutputArray]:
        """Return the inputs of the file."""
        return self.binding.by_input(batch)

    def parts(self, items: Sequence[Item], *, size: int) -> Iterator[Sequence[Item]]:
        """Yield `items` in parts that fit the budget; `size` is their total in bytes."""
        count = max(1, -(-size // self.budget))
        step = max(1, -(-len(items) // count))
        for start in range(0, len(items), step):
            yield items[start : start + step]
