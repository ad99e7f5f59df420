"""What each part was given and gave back while the chain ran: what its samples are, and in which
form it answers."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gate.errors import DataError, GateError, ModelError, describe_failure
from gate.model.call import Leaf, leaves
from gate.parity.arrays.samples import Samples
from gate.parts.chain import ChainedModel
from gate.storage.temporary import temporary_folder

Array = NDArray[Any]


@dataclass
class PartCalls:
    """Of one part. Its inputs go to the disk, call by call; the first call says how they are."""

    folder: Path
    names: tuple[str, ...]
    """Of the tensors of its first call, by the arguments that they were given as; dotted for what
    was inside of one (`gate.model.call`)."""
    form: Any = None
    """What its first call returned, for who must return the same kind of thing."""
    example: list[Array] = field(default_factory=list)
    """The inputs of its first call."""
    rows: int = 0
    left_out: int = 0
    """Calls with inputs of other shapes than the first one: steps of a loop that grow."""

    @property
    def named_example(self) -> dict[str, Array]:
        """The inputs of its first call, by `names`."""
        return dict(zip(self.names, self.example, strict=True))

    def add(self, inputs: list[Array], returned: Any) -> None:
        """Note one call."""
        if self.form is None:
            self.form, self.example = returned, inputs
        if [_form(array) for array in inputs] != [_form(array) for array in self.example]:
            self.left_out += 1
            return
        for place, array in enumerate(inputs):
            with (self.folder / f"{place}.bin").open("ab") as stream:
                stream.write(np.ascontiguousarray(array).tobytes())
        self.rows += len(inputs[0])

    def samples(self, names: tuple[str, ...]) -> Samples:
        """What it was given, by the names of its file's inputs."""
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
        """Run the chain on a batch, and give its outputs. Raises ModelError where it breaks,
        DataError where a part is given what has no axis of samples."""
        with contextlib.ExitStack() as hooked, torch.no_grad():
            for name, module in chain.parts.items():
                hooked.enter_context(self._hooked(name, module))
            tensors = [torch.from_numpy(np.array(batch[name])) for name in chain.inputs]
            try:
                return leaves(chain(*tensors))
            except GateError:
                raise
            except Exception as error:
                raise ModelError(
                    f"the chain breaks with the modules: {describe_failure(error)}. Its batch has "
                    f"{', '.join(chain.inputs)} (a .npy is 'input'), its parts are "
                    f"{', '.join(chain.parts)}. Mend the function, or give it other samples."
                ) from error

    @contextlib.contextmanager
    def _hooked(self, name: str, module: torch.nn.Module) -> Iterator[None]:
        def note(
            called: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any], returned: Any
        ) -> None:
            found = leaves(_arguments(called, given, named))
            if name not in self.by_part:
                folder = self._folder / name
                folder.mkdir()
                self.by_part[name] = PartCalls(folder, tuple(leaf.name for leaf in found))
            inputs = [leaf.tensor.detach().cpu().numpy().copy() for leaf in found]
            _check_axis(inputs, part=name)
            self.by_part[name].add(inputs, returned)

        handle = module.register_forward_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _arguments(
    module: torch.nn.Module, given: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """What forward was given, by the names of its parameters: `input_1` for one without a name."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_place = [parameter.name for parameter in parameters if parameter.kind in kinds]
    names = [*by_place[: len(given)], *(f"input_{at}" for at in range(len(by_place), len(given)))]
    return {**dict(zip(names, given, strict=True)), **named}


def _check_axis(inputs: list[Array], *, part: str) -> None:
    sizes = {array.shape[:1] for array in inputs}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(str(array.shape) for array in inputs) or "nothing"
        raise DataError(
            f"the chain gives the part {part} {shapes}, which have no common axis of samples. Give "
            f"it samples of its own: parts: {{{part}: {{file: …, inputs: FILE.npz}}}}."
        )


def _form(array: Array) -> tuple[Any, tuple[int, ...]]:
    return array.dtype, array.shape[1:]
