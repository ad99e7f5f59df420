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
from gate.model.loading import imported
from gate.records.evidence import BatchAxes, Subject
from gate.reference.torch_session import copy_model
from gate.storage.files import temporary_folder

ChainFunction = Callable[[Mapping[str, Callable[..., Any]], Mapping[str, torch.Tensor]], Any]
"""Parts by name and a batch of tensors by name in; what a forward returns out."""


class ChainModel(nn.Module):
    """`function(parts, batch)` as a module, so that all that is done with a model can be done with
    it. Parts are registered: they move and copy as one."""

    def __init__(
        self, function: ChainFunction, parts: Mapping[str, nn.Module], inputs: Sequence[str]
    ) -> None:
        """`inputs`: names of the batch, in the order in which forward gets the tensors."""
        super().__init__()
        self.function = function
        self.parts = nn.ModuleDict(dict(parts))
        self.inputs = tuple(inputs)

    @classmethod
    def from_model(
        cls, model: nn.Module, *, chain: str, references: Mapping[str, str], inputs: Sequence[str]
    ) -> ChainModel:
        """Build the chain from a copy of `model` on the CPU, in eval mode.

        `chain`: `package.module:function`; `references`: by part the module's path in the model;
        `inputs`: as in `__init__`. Raises ModelError.
        """
        copied = copy_model(model, device="cpu")
        modules = {name: module_of(copied, path, part=name) for name, path in references.items()}
        return cls(chain_function(chain), _apart(modules), inputs).eval()

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the result of the chain function.

        While the float64 reference is computed, a part may receive in double precision what the
        code before it made in float32 (numpy zeros, a buffer of its own); that is rounded on both
        sides.
        """
        in_double = torch.get_default_dtype() == torch.float64
        with contextlib.ExitStack() as hooked:
            for part in self.parts.values() if in_double else ():
                hooked.callback(part.register_forward_pre_hook(_widened, with_kwargs=True).remove)
            return self.function(
                dict(self.parts.items()), dict(zip(self.inputs, tensors, strict=True))
            )


def _widened(module: nn.Module, args: Any, named: Any) -> Any:
    own = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}
    if torch.float32 in own:  # it is not the part that is computed in double precision
        return args, named
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.double() if tensor.dtype == torch.float32 else tensor,
        (args, named),
    )


def chain_function(named: str) -> ChainFunction:
    """Import `package.module:function`. Raises ModelError."""
    module_name, _, path = named.partition(":")
    found: Any = imported(module_name, wanted=f"the chain {named}")
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ModelError(
            f"{module_name} has no function {path!r} for the chain {named}. Expected "
            "function(parts, batch), which calls parts['name'](...) and returns the outputs."
        )
    function: ChainFunction = found
    return function


def module_of(model: nn.Module, path: str, *, part: str) -> nn.Module:
    """The submodule that a part must compute like. Raises ModelError."""
    if ":" in path:
        raise ModelError(
            f"the reference of the part {part} is {path}, expected the path of a module in the one "
            "model that --reference builds, such as encoder: checkpoint, code and digest are of "
            "one model. Of two factories make one: return nn.ModuleDict({'encoder': ..., 'head': "
            "...})."
        )
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        offered = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ModelError(
            f"the model has no submodule {path!r} for the part {part}: it has {offered}. Name it "
            "in the release file: parts: {" + part + ": {file: …, reference: PATH}}."
        ) from error


def _apart(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Two parts may be one module (two files of other sizes), or one a module of the other: a copy
    each, so that what the chain gives to one is not taken for the other's."""
    own: dict[str, nn.Module] = {}
    for name, module in modules.items():
        again = any(
            module in [*other.modules()] or other in [*module.modules()] for other in own.values()
        )
        own[name] = copy_model(module, device="cpu") if again else module
    return own


def restore_structure(form: Any, outputs: Sequence[torch.Tensor], *, part: str) -> Any:
    """`outputs` in the order of `gate.model.forward_signature.leaves`, in the tuples, lists,
    dicts, dataclasses and named tuples of `form`; None stays where it is.

    Raises OutputMismatch for another number of tensors.
    """
    names = [leaf.name for leaf in leaves(form)]
    if len(names) != len(outputs):
        raise OutputMismatch(
            f"the file of the part {part} gives {len(outputs)} outputs, the module "
            f"{len(names)}: {', '.join(names)}. Export these, and no others."
        )
    return _filled(form, iter(outputs))


def _filled(form: Any, outputs: Iterator[torch.Tensor]) -> Any:
    if form is None:
        return None
    if isinstance(form, torch.Tensor):
        return next(outputs)
    if isinstance(form, Mapping):
        named = {key: _filled(value, outputs) for key, value in form.items()}
        # Those of transformers take fields by name, and are dataclasses, too.
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
    """In the order of the signature."""

    @classmethod
    def from_module(cls, module: nn.Module) -> Parameters:
        """None where the signature can't be read."""
        try:
            found = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            return cls()
        positional = tuple(one.name for one in found if one.kind in _POSITIONAL)
        return cls(positional, tuple(one.name for one in found))

    def tensors(self, given: Sequence[Any], named: Mapping[str, Any], *, part: str) -> list[Leaf]:
        """Return the tensors that a chain passes to the part, by argument name (`input_1` for one
        without a name), in forward's order. Raises ModelError for anything that is not a tensor."""
        count = len(self.positional)
        own = [*self.positional[: len(given)], *(f"input_{at}" for at in range(count, len(given)))]
        keywords = sorted(named, key=self._position)
        arguments = dict(zip(own, given, strict=True)) | {name: named[name] for name in keywords}
        for name, value in arguments.items():
            try:
                leaves(value)
            except ModelError as error:
                raise ModelError(
                    f"the chain gives the part {part} {_shown(value)} as {name!r}: a file takes "
                    "tensors alone, in tuples, lists and dicts. Settle it in the module that is "
                    "exported, or make a tensor of it."
                ) from error
        return leaves(arguments)

    def _position(self, name: str) -> int:
        return self.all.index(name) if name in self.all else len(self.all)


@dataclass(frozen=True)
class PartInterface:
    """The inputs and outputs of a part, as its module has them."""

    parameters: Parameters
    form: Any
    """What the module returned to its first call."""


def bound(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Return, for each input of a file, the index of its tensor among `names`: by name if all are
    there, which skips what only the module takes, else in order."""
    if wanted and set(wanted) <= set(names):
        return [list(names).index(name) for name in wanted]
    return list(range(len(names)))


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 else type(value).__name__


Array = NDArray[Any]


@dataclass
class PartCalls:
    """The calls of one part.

    Its inputs are written to disk call by call; the first call defines their form.
    """

    folder: Path
    parameters: Parameters
    names: tuple[str, ...]
    """Of the tensors of its first call, by the arguments that they were given as; dotted for what
    was inside of one (`gate.model.forward_signature`)."""
    form: Any = None
    """What its first call returned, for who must return the same kind of thing."""
    example: list[Array] = field(default_factory=list)
    """The inputs of its first call."""
    rows: int = 0
    left_out: int = 0
    """Calls with other arguments than the first one, or of other shapes: steps of a loop that
    grow."""
    axes: BatchAxes | None = None
    """Of its file; None: axis 0 of all inputs is the samples."""
    wanted: tuple[str, ...] = ()
    """The file's inputs."""
    overwritten: str | None = None
    """An input into which the module writes: a file leaves what it is given as it is."""

    @property
    def interface(self) -> PartInterface:
        """Return the inputs and outputs that its file must have."""
        return PartInterface(self.parameters, self.form)

    @property
    def named_example(self) -> dict[str, Array]:
        """The inputs of its first call, by `names`."""
        return dict(zip(self.names, self.example, strict=True))

    def add(self, names: tuple[str, ...], inputs: list[Array]) -> None:
        """Note what one call was given."""
        if not self.example:
            self.example = inputs
        rows, example = self._rows(inputs), self._rows(self.example)
        alike = list(map(_kind, rows)) == list(map(_kind, example))
        if names != self.names or not alike or not _have_samples(rows):
            self.left_out += 1
            return
        for place, array in enumerate(rows):
            with (self.folder / f"{place}.bin").open("ab") as stream:
                stream.write(np.ascontiguousarray(array).tobytes())
        self.rows += len(rows[0])

    def _rows(self, inputs: list[Array]) -> list[Array]:
        """Return the arrays with the samples on axis 0 of each, by the batch axes of the file."""
        if self.axes is None:
            return inputs
        if self.axes.is_unbatched:
            return [array[None] for array in inputs]
        axes: list[int | None] = [0] * len(inputs)  # of what only the module takes
        for name, place in zip(self.wanted, bound(self.names, self.wanted), strict=False):
            axes[place] = self.axes.inputs[name]
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

    def taken(self, wanted: Sequence[str]) -> list[Array]:
        """Return what a file with these inputs takes of the first call."""
        return [self.example[place] for place in bound(self.names, wanted)]

    def samples(self, names: tuple[str, ...], *, part: str) -> SampleSet:
        """Return the recorded inputs by these names of its tensors.

        Raises DataError if one has no axis of samples.
        """
        if not self.rows:
            shapes = ", ".join(str(array.shape) for array in self.example) or "nothing"
            raise DataError(
                f"the chain gives the part {part} {shapes}, which have no common axis of samples. "
                "Let its module make what is the same for all (a mask, a scale), or give it "
                f"samples of its own: parts: {{{part}: {{file: …, inputs: FILE.npz}}}}."
            )
        samples = SampleSet.from_arrays(
            {
                name: np.memmap(
                    self.folder / f"{place}.bin",
                    example.dtype,
                    mode="r",
                    shape=(self.rows, *example.shape[1:]),
                )
                for place, (name, example) in enumerate(
                    zip(names, self._rows(self.example), strict=True)
                )
            }
        )
        if self.axes is None:
            return samples
        return samples.rearranged(dict.fromkeys(names, 0), self.axes)


class CallRecorder:
    """The calls of all parts, in a folder that is removed with this object."""

    def __init__(self, subjects: Mapping[str, Subject] | None = None) -> None:
        """`subjects`: of the parts' files, which say where the samples are in what a part gets;
        without them they are on axis 0."""
        self._subjects = subjects or {}
        held = contextlib.ExitStack()
        self._folder = held.enter_context(temporary_folder())
        weakref.finalize(self, held.close)
        self.by_part: dict[str, PartCalls] = {}

    def of(self, part: str) -> PartCalls:
        """Return the calls of one part. Raises ModelError if the chain never called it."""
        if part not in self.by_part:
            raise ModelError(
                f"the chain never calls the part {part}. Let it run parts[{part!r}](...), or take "
                "the part out of the release file."
            )
        return self.by_part[part]

    def record(self, chain: ChainModel, batch: Mapping[str, Array]) -> list[Leaf]:
        """Run the chain on a batch, and give its outputs. Raises ModelError where it breaks, or
        gives or takes what is no tensor."""
        with contextlib.ExitStack() as hooked, torch.no_grad():
            for name, module in chain.parts.items():
                hooked.enter_context(self._hooked(name, module))
            tensors = [torch.from_numpy(np.array(batch[name])) for name in chain.inputs]
            try:
                return leaves(chain(*tensors), by="the chain")
            except GateError:
                raise
            except Exception as error:
                raise ModelError(
                    f"the chain breaks with the modules: {describe_failure(error)}. Its batch has "
                    f"{', '.join(chain.inputs)} (a .npy is 'input'), its parts are "
                    f"{', '.join(chain.parts)}. Mend the function, or give it other samples."
                ) from error

    def _axes(self, part: str, inputs: list[Array]) -> dict[str, Any]:
        subject = self._subjects.get(part)
        if subject is None:
            return {}
        axes = axes_of_file(subject.inputs, subject.outputs, even=_have_samples(inputs))
        if axes is not None and set(axes.inputs.values()) == {0, None}:
            shared = [spec for spec in subject.inputs if axes.inputs[spec.name] is None]
            if any(spec.shape for spec in shared):  # a mask may differ between calls
                axes = None
        return {"axes": axes, "wanted": tuple(spec.name for spec in subject.inputs)}

    @contextlib.contextmanager
    def _hooked(self, name: str, module: nn.Module) -> Iterator[None]:
        parameters, given = Parameters.from_module(module), list[tuple[Leaf, Array]]()

        def before(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            """Noted here: a module may write into what it is given."""
            found = parameters.tensors(args, named, part=name)
            given[:] = [(leaf, leaf.tensor.detach().cpu().numpy().copy()) for leaf in found]
            names, inputs = tuple(leaf.name for leaf in found), [array for _, array in given]
            if name not in self.by_part:
                folder = self._folder / name
                folder.mkdir()
                self.by_part[name] = PartCalls(
                    folder, parameters, names, **self._axes(name, inputs)
                )
            self.by_part[name].add(names, inputs)

        def after(_module: nn.Module, _args: tuple[Any, ...], returned: Any) -> None:
            of_part = self.by_part[name]
            of_part.form = returned if of_part.form is None else of_part.form
            for leaf, array in given:
                if not np.array_equal(leaf.tensor.numpy(force=True), array, equal_nan=True):
                    of_part.overwritten = leaf.name

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
    """Whether all of them have axis 0 in common."""
    sizes = {array.shape[:1] for array in inputs}
    return len(sizes) == 1 and () not in sizes


def _kind(array: Array) -> tuple[Any, tuple[int, ...]]:
    return array.dtype, array.shape[1:]
