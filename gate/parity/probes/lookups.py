"""The tables that a model looks its integers up in: how far an integer may go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from gate.errors import GateError
from gate.parity.rounding.dispatch import DispatchMode
from gate.parity.stand import Stand
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch

_EMBEDDINGS = {
    "aten::embedding", "aten::embedding_bag", "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
}  # fmt: skip
_ALONG = {"aten::index_select", "aten::gather"}
_INDEXED = {"aten::index", "aten::_unsafe_index"}


class Lookup(NamedTuple):
    """One reading of a table."""

    size: int
    """Rows of the table."""
    indices: Array
    """Which of them were read, flat."""


class Lookups(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the readings of tables while a model runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Lookup] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        for size, indices in _readings(name, args):
            flat = indices.detach().cpu().numpy().ravel()
            self.found.append(Lookup(size, flat.astype(np.int64)))
        return func(*args, **(kwargs or {}))


def lookups(stand: Stand, batch: Batch) -> list[Lookup]:
    """What the reference reads from tables for this batch; empty if it can't be computed so."""
    watch = Lookups()
    try:
        with watch:
            stand.reference.run(batch)
    except GateError:
        return []
    return watch.found


def _readings(name: str, args: tuple[Any, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    if name in _EMBEDDINGS:
        yield args[0].shape[0], args[1]
    elif name in _ALONG:
        table, axis, indices = args[:3]
        if table.ndim:
            yield table.shape[axis], indices
    elif name in _INDEXED:
        table, places = args[:2]
        for axis, indices in enumerate(places):
            if indices is not None and axis < table.ndim and not _is_choice(indices):
                yield table.shape[axis], indices


def _is_choice(indices: torch.Tensor) -> bool:
    return indices.dtype in (torch.bool, torch.uint8) or indices.is_floating_point()
