"""The chain as one PyTorch model; inputs and outputs of each part."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from gate.data.batch_axes import axes_of_file
from gate.data.samples import SampleSet
from gate.errors import DataError, GateError, ModelError, OutputMismatch, describe_failure
from gate.model.forward_signature import Leaf, leaves
from gate.model.loading import import_user_module
from gate.records.evidence import BatchAxes, Subject
from gate.reference.torch_session import copy_model
from gate.storage.files import temporary_folder

ChainFunction = Callable[[Mapping[str, Callable[..., Any]], Mapping[str, torch.Tensor]], Any]
"""Takes the parts by name and a batch of tensors by name. Returns what a forward returns."""


class ChainModel(nn.Module):
    """Wraps `function(parts, batch)` as one module. The parts are registered as submodules, so
    that they move and copy together."""

    def __init__(
        self, function: ChainFunction, parts: Mapping[str, nn.Module], inputs: Sequence[str]
    ) -> None:
        """`inputs`: names of the batch's tensors, in the order of forward's arguments."""
        super().__init__()
        self.function = function
        self.parts = nn.ModuleDict(dict(parts))
        self.inputs = tuple(inputs)

    @classmethod
    def from_model(
        cls, model: nn.Module, *, chain: str, references: Mapping[str, str], inputs: Sequence[str]
    ) -> ChainModel:
        """Build the chain from a copy of `model` on the CPU, in eval mode.

        `chain`: `package.module:function`. `references`: the path of each part's module in the
        model. `inputs`: as in `__init__`. Raises ModelError.
        """
        copied = copy_model(model, device="cpu")
        modules = {name: module_of(copied, path, part=name) for name, path in references.items()}
        return cls(chain_function(chain), _separate(modules), inputs).eval()

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the result of the chain function.

        While the float64 reference is computed, tensors that the chain function creates in float32
        (numpy zeros, a buffer) are converted to float64 before they reach a part.
        """
        in_double = torch.get_default_dtype() == torch.float64
        with contextlib.ExitStack() as hooked:
            for part in self.parts.values() if in_double else ():
                hooked.callback(part.register_forward_pre_hook(_widened, with_kwargs=True).remove)
            return self.function(
                dict(self.parts.items()), dict(zip(self.inputs, tensors, strict=True))
            )


def _widened(module: nn.Module, args: Any, named: Any) -> Any:
    dtypes = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}
    if torch.float32 in dtypes:  # This part is not computed in double precision.
        return args, named
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.double() if tensor.dtype == torch.float32 else tensor,
        (args, named),
    )


def chain_function(named: str) -> ChainFunction:
    """Import `package.module:function`. Raises ModelError."""
    module_name, _, path = named.partition(":")
    target: Any = import_user_module(module_name, purpose=f"the chain {named}")
    for name in path.split("."):
        target = getattr(target, name, None)
    if not callable(target):
        raise ModelError(
            f"{module_name} has no function {path!r} for the chain {named}. Define "
            "function(parts, batch): it calls parts['name'](...) and returns the outputs."
        )
    function: ChainFunction = target
    return function


def module_of(model: nn.Module, path: str, *, part: str) -> nn.Module:
    """Return the submodule that is the reference of a part. Raises ModelError."""
    if ":" in path:
        raise ModelError(
            f"the reference of the part {part} is {path}, expected the path of a submodule, such "
            "as encoder, in the one model that --reference builds. Combine several factories into "
            "one that returns nn.ModuleDict({'encoder': ..., 'head': ...})."
        )
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ModelError(
            f"the model has no submodule {path!r} for the part {part}; its submodules: {children}. "
            "Correct the release file: parts: {" + part + ": {file: …, reference: PATH}}."
        ) from error


def _separate(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Copy modules that are shared between parts or nested in one another, so that the hooks of
    `CallRecorder` can tell their calls apart."""
    separate: dict[str, nn.Module] = {}
    for name, module in modules.items():
        is_shared = any(
            module in [*existing.modules()] or existing in [*module.modules()]
            for existing in separate.values()
        )
        separate[name] = copy_model(module, device="cpu") if is_shared else module
    return separate


def restore_structure(form: Any, outputs: Sequence[torch.Tensor], *, part: str) -> Any:
    """Return `outputs` nested in the tuples, lists, dicts, dataclasses and named tuples of `form`.

    outputs: in the order of `gate.model.forward_signature.leaves`. Values of `form` that are None
    stay None. Raises OutputMismatch if the number of tensors differs.
    """
    names = [leaf.name for leaf in leaves(form)]
    if len(names) != len(outputs):
        raise OutputMismatch(
            f"the file of the part {part} has {len(outputs)} outputs, its module returns "
            f"{len(names)}: {', '.join(names)}. Export exactly these outputs."
        )
    return _filled(form, iter(outputs))


def _filled(form: Any, outputs: Iterator[torch.Tensor]) -> Any:
    if form is None:
        return None
    if isinstance(form, torch.Tensor):
        return next(outputs)
    if isinstance(form, Mapping):
        named = {key: _filled(value, outputs) for key, value in form.items()}
        # The ModelOutput of transformers is a mapping and a dataclass; it takes keyword arguments.
        return named if type(form) is dict else type(form)(**named)
    if dataclasses.is_dataclass(form) and not isinstance(form, type):
        fields = dataclasses.fields(form)
        return dataclasses.replace(
            form, **{field.name: _filled(getattr(form, field.name), outputs) for field in fields}
        )
    items = [_filled(value, outputs) for value in form]
    if hasattr(form, "_fields"):
        return type(form)(*items)
    return items if isinstance(form, list) else tuple(items)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Parameters:
    """Names of the parameters of a module's forward."""

    positional: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    """All names, in the order of the signature."""

    @classmethod
    def from_module(cls, module: nn.Module) -> Parameters:
        """Read the names from the signature; empty if the signature can't be read."""
        try:
            parameters = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            return cls()
        positional = tuple(each.name for each in parameters if each.kind in _POSITIONAL)
        return cls(positional, tuple(each.name for each in parameters))

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, part: str) -> list[Leaf]:
        """Return the tensors passed to the part, in forward's order, named after their arguments
        (`input_1` for one without a name). Raises ModelError for other values."""
        count = len(self.positional)
        extra = (f"input_{index}" for index in range(count, len(args)))
        keywords = sorted(kwargs, key=self._position)
        arguments = dict(zip([*self.positional[: len(args)], *extra], args, strict=True))
        arguments |= {name: kwargs[name] for name in keywords}
        for name, value in arguments.items():
            try:
                leaves(value)
            except ModelError as error:
                raise ModelError(
                    f"the chain passes {_describe(value)} as {name!r} to the part {part}. An ONNX "
                    "file takes only tensors, in tuples, lists or dicts: convert the value to a "
                    "tensor, or set it inside the exported module."
                ) from error
        return leaves(arguments)

    def _position(self, name: str) -> int:
        return self.all.index(name) if name in self.all else len(self.all)


@dataclass(frozen=True)
class PartInterface:
    """The inputs and outputs of a part's module."""

    parameters: Parameters
    form: Any
    """The value that the first call of the module returned."""


def match_inputs(names: Sequence[str], inputs: Sequence[str]) -> list[int]:
    """Return the index in `names` of the tensor for each input of a file: by name if `names` has
    all of `inputs` (and perhaps tensors that only the module takes), else by position."""
    if inputs and set(inputs) <= set(names):
        return [list(names).index(name) for name in inputs]
    return list(range(len(names)))


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 else type(value).__name__


Array = NDArray[Any]


@dataclass
class PartCalls:
    """The calls of one part.

    The inputs of each call are appended to files. The first call defines their names and shapes.
    """

    folder: Path
    parameters: Parameters
    names: tuple[str, ...]
    """Names of the tensors of the first call, after the arguments; dotted for nested tensors
    (`gate.model.forward_signature`)."""
    form: Any = None
    """The value that the first call returned."""
    example: list[Array] = field(default_factory=list)
    """The inputs of the first call."""
    rows: int = 0
    left_out: int = 0
    """Number of calls whose arguments or shapes differ from those of the first call, such as loop
    steps with growing inputs."""
    axes: BatchAxes | None = None
    """Batch axes of the part's file. None: axis 0 of all inputs."""
    input_names: tuple[str, ...] = ()
    """Names of the file's inputs."""
    overwritten: str | None = None
    """An input that the module modifies in place, which an ONNX file never does."""

    @property
    def interface(self) -> PartInterface:
        """Return the inputs and outputs that the part's file must have."""
        return PartInterface(self.parameters, self.form)

    @property
    def named_example(self) -> dict[str, Array]:
        """The inputs of the first call, by `names`."""
        return dict(zip(self.names, self.example, strict=True))

    def add(self, names: tuple[str, ...], inputs: list[Array]) -> None:
        """Record the inputs of one call."""
        if not self.example:
            self.example = inputs
        rows, example = self._rows(inputs), self._rows(self.example)
        is_same_kind = list(map(_kind, rows)) == list(map(_kind, example))
        if names != self.names or not is_same_kind or not _have_samples(rows):
            self.left_out += 1
            return
        for index, array in enumerate(rows):
            with (self.folder / f"{index}.bin").open("ab") as stream:
                stream.write(np.ascontiguousarray(array).tobytes())
        self.rows += len(rows[0])

    def _rows(self, inputs: list[Array]) -> list[Array]:
        """Return the arrays with their batch axis moved to axis 0."""
        if self.axes is None:
            return inputs
        if self.axes.is_unbatched:
            return [array[None] for array in inputs]
        axes: list[int | None] = [0] * len(inputs)  # Axis 0 for tensors that only the module takes.
        indices = match_inputs(self.names, self.input_names)
        for name, index in zip(self.input_names, indices, strict=False):
            axes[index] = self.axes.inputs[name]
        sizes = {
            array.shape[axis]
            for array, axis in zip(inputs, axes, strict=True)
            if axis is not None and axis < array.ndim
        }
        return [
            np.broadcast_to(array, (max(sizes, default=1), *array.shape))
            if axis is None
            else np.moveaxis(array, axis, 0)
            if axis < array.ndim
            else array
            for array, axis in zip(inputs, axes, strict=True)
        ]

    def example_for(self, input_names: Sequence[str]) -> list[Array]:
        """Return the tensors of the first call for a file with these inputs."""
        return [self.example[index] for index in match_inputs(self.names, input_names)]

    def samples(self, names: tuple[str, ...], *, part: str) -> SampleSet:
        """Return the recorded inputs under these names.

        Raises DataError if the inputs share no batch axis.
        """
        if not self.rows:
            shapes = ", ".join(str(array.shape) for array in self.example) or "nothing"
            raise DataError(
                f"the chain passes tensors of shapes {shapes} to the part {part}: they share no "
                "batch axis. Create constant tensors (a mask, a scale) inside the part's module, "
                f"or name samples for it: parts: {{{part}: {{file: …, inputs: FILE.npz}}}}."
            )
        samples = SampleSet.from_arrays(
            {
                name: np.memmap(
                    self.folder / f"{index}.bin",
                    example.dtype,
                    mode="r",
                    shape=(self.rows, *example.shape[1:]),
                )
                for index, (name, example) in enumerate(
                    zip(names, self._rows(self.example), strict=True)
                )
            }
        )
        if self.axes is None:
            return samples
        return samples.rearranged(dict.fromkeys(names, 0), self.axes)


class CallRecorder:
    """Records the calls of all parts in a folder that is removed with this object."""

    def __init__(self, subjects: Mapping[str, Subject] | None = None) -> None:
        """`subjects`: the parts' files, which define the batch axes. Without them the batch axis is
        axis 0."""
        self._subjects = subjects or {}
        stack = contextlib.ExitStack()
        self._folder = stack.enter_context(temporary_folder())
        weakref.finalize(self, stack.close)
        self.by_part: dict[str, PartCalls] = {}

    def for_part(self, part: str) -> PartCalls:
        """Return the calls of one part. Raises ModelError if the chain never called it."""
        if part not in self.by_part:
            raise ModelError(
                f"the chain never calls the part {part}. Call parts[{part!r}](...) in the chain "
                "function, or remove the part from the release file."
            )
        return self.by_part[part]

    def record(self, chain: ChainModel, batch: Mapping[str, Array]) -> list[Leaf]:
        """Run the chain on a batch, record the calls of its parts, and return its outputs. Raises
        ModelError if the chain fails, or passes or returns something other than tensors."""
        with contextlib.ExitStack() as hooks, torch.no_grad():
            for name, module in chain.parts.items():
                hooks.enter_context(self._record_calls(name, module))
            tensors = [torch.from_numpy(np.array(batch[name])) for name in chain.inputs]
            try:
                return leaves(chain(*tensors), by="the chain")
            except GateError:
                raise
            except Exception as error:
                raise ModelError(
                    f"the chain fails with the PyTorch modules: {describe_failure(error)}. Its "
                    f"batch has {', '.join(chain.inputs)} (the array of a .npy file is 'input'), "
                    f"its parts are {', '.join(chain.parts)}. Fix the chain function or the "
                    "samples."
                ) from error

    def _axes(self, part: str, inputs: list[Array]) -> dict[str, Any]:
        subject = self._subjects.get(part)
        if subject is None:
            return {}
        axes = axes_of_file(subject.inputs, subject.outputs, even=_have_samples(inputs))
        if axes is not None and set(axes.inputs.values()) == {0, None}:
            shared = [spec for spec in subject.inputs if axes.inputs[spec.name] is None]
            if any(spec.shape for spec in shared):  # A mask may differ between calls.
                axes = None
        return {"axes": axes, "input_names": tuple(spec.name for spec in subject.inputs)}

    @contextlib.contextmanager
    def _record_calls(self, name: str, module: nn.Module) -> Iterator[None]:
        parameters, received = Parameters.from_module(module), list[tuple[Leaf, Array]]()

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Copy the inputs before the call: a module may modify them in place."""
            tensors = parameters.tensors(args, kwargs, part=name)
            received[:] = [(leaf, leaf.tensor.detach().cpu().numpy().copy()) for leaf in tensors]
            names, inputs = tuple(leaf.name for leaf in tensors), [array for _, array in received]
            if name not in self.by_part:
                folder = self._folder / name
                folder.mkdir()
                self.by_part[name] = PartCalls(
                    folder, parameters, names, **self._axes(name, inputs)
                )
            self.by_part[name].add(names, inputs)

        def after(_module: nn.Module, _args: tuple[Any, ...], returned: Any) -> None:
            calls = self.by_part[name]
            calls.form = returned if calls.form is None else calls.form
            for leaf, array in received:
                if not np.array_equal(leaf.tensor.numpy(force=True), array, equal_nan=True):
                    calls.overwritten = leaf.name

        handles = (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _have_samples(inputs: list[Array]) -> bool:
    """Return whether all arrays have the same length on axis 0."""
    sizes = {array.shape[:1] for array in inputs}
    return len(sizes) == 1 and () not in sizes


def _kind(array: Array) -> tuple[Any, tuple[int, ...]]:
    return array.dtype, array.shape[1:]
