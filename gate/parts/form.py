"""What a module returned, with other tensors in it: so a chain takes a file's outputs alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gate.errors import OutputMismatch
from gate.model.call import leaves


def reformed(form: Any, outputs: Sequence[torch.Tensor], *, part: str) -> Any:
    """`outputs` in the order of `gate.model.call.leaves`, in the tuples, lists, dicts, dataclasses
    and named tuples of `form`; None stays where it is.

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
