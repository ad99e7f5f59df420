"""What each part was given and gave back while the chain ran: what its samples are, and in which
form it answers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.errors import DataError, GateError, ModelError, describe_failure
from gate.model.call import Leaf, leaves
from gate.parity.arrays.samples import Samples
from gate.parts.chain import ChainedModel
from gate.parts.interface import Interface, Parameters, bound
from gate.storage.temporary import temporary_folder

Array = NDArray[Any]


@dataclass
class PartCalls:
    """Of one part. Its inputs go to the disk, call by call; the first call says how they are."""

    folder: Path
    parameters: Parameters
    names: tuple[str, ...]
    """Of the tensors of its first call, by the arguments that they were given as; dotted for what
    was inside of one (`gate.model.call`)."""
    form: Any = None
    """What its first call returned, for who must return the same kind of thing."""
    example: list[Array] = field(default_factory=list)
    """The inputs of its first call."""
    rows: int = 0
    left_out: int = 0
    """Calls with other arguments than the first one, or of other shapes: steps of a loop that
    grow."""
    overwritten: str | None = None
    """An input into which the module writes: a file leaves what it is given as it is."""

    @property
    def interface(self) -> Interface:
        """What its file has to take and to give."""
        return Interface(self.parameters, self.form)

    @property
    def named_example(self) -> dict[str, Array]:
        """The inputs of its first call, by `names`."""
        return dict(zip(self.names, self.example, strict=True))

    def add(self, names: tuple[str, ...], inputs: list[Array]) -> None:
        """Note what one call was given."""
        if not self.example:
            self.example = inputs
        alike = list(map(_kind, inputs)) == list(map(_kind, self.example))
        if names != self.names or not alike or not _have_samples(inputs):
            self.left_out += 1
            return
        for place, array in enumerate(inputs):
            with (self.folder / f"{place}.bin").open("ab") as stream:
                stream.write(np.ascontiguousarray(array).tobytes())
        self.rows += len(inputs[0])

    def taken(self, wanted: Sequence[str]) -> list[Array]:
        """Of the first call, what a file with these inputs takes."""
        return [self.example[place] for place in bound(self.names, wanted)]

    def samples(self, names: tuple[str, ...], *, part: str) -> Samples:
        """What it was given, by these names of its tensors. Raises DataError where that has no axis
        of samples."""
        if not self.rows:
            shapes = ", ".join(str(array.shape) for array in self.example) or "nothing"
            raise DataError(
                f"the chain gives the part {part} {shapes}, which have no common axis of samples. "
                "Let its module make what is the same for all (a mask, a scale), or give it "
                f"samples of its own: parts: {{{part}: {{file: …, inputs: FILE.npz}}}}."
            )
        return Samples.of(
            {
                name: np.memmap(
                    self.folder / f"{place}.bin",
                    example.dtype,
                    mode="r",
                    shape=(self.rows, *example.shape[1:]),
                )
                for place, (name, example) in enumerate(zip(names, self.example, strict=True))
            }
        )


class Calls:
    """Of all parts, in a folder that goes with this object."""

    def __init__(self) -> None:
        held = contextlib.ExitStack()
        self._folder = held.enter_context(temporary_folder())
        weakref.finalize(self, held.close)
        self.by_part: dict[str, PartCalls] = {}

    def of(self, part: str) -> PartCalls:
        """Of one part. Raises ModelError where the chain never called it."""
        if part not in self.by_part:
            raise ModelError(
                f"the chain never calls the part {part}. Let it run parts[{part!r}](...), or take "
                "the part out of the release file."
            )
        return self.by_part[part]

    def record(self, chain: ChainedModel, batch: Mapping[str, Array]) -> list[Leaf]:
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

    @contextlib.contextmanager
    def _hooked(self, name: str, module: nn.Module) -> Iterator[None]:
        parameters, given = Parameters.of(module), list[tuple[Leaf, Array]]()

        def before(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            """Noted here: a module may write into what it is given."""
            found = parameters.tensors(args, named, part=name)
            given[:] = [(leaf, leaf.tensor.detach().cpu().numpy().copy()) for leaf in found]
            names = tuple(leaf.name for leaf in found)
            if name not in self.by_part:
                folder = self._folder / name
                folder.mkdir()
                self.by_part[name] = PartCalls(folder, parameters, names)
            self.by_part[name].add(names, [array for _, array in given])

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
