"""External data: whether the tensors read from it what they should."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import TensorProto

from gate.onnxfile.walk import tensors_of
from gate.parity.graph.contents import size_of
from gate.records.instruments import GraphFinding


class _Region(NamedTuple):
    """Bytes of a data file that a tensor reads."""

    start: int
    end: int
    tensor: str


def external_data(model: onnx.ModelProto, folder: Path) -> Iterator[GraphFinding]:
    """Tensors that state another length than they have, that read half of another tensor's bytes,
    or whose data file has not the checksum that the model states.

    Equal regions are tied weights, a region inside another is a slice; bytes that no tensor
    reads may be padding, or belong to another model that shares the file.
    """
    regions: dict[str, list[_Region]] = defaultdict(list)
    checksums: dict[str, set[str]] = defaultdict(set)
    for tensor in tensors_of(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file, start = entries.get("location", ""), int(entries.get("offset") or 0)
        needed = size_of(tensor)
        stated = int(entries.get("length") or needed)
        if stated != needed:
            detail = f"states {stated} bytes in {file}, its shape needs {needed}"
            yield _finding(tensor.name, detail)
        if needed:
            regions[file].append(_Region(start, start + needed, tensor.name))
        if entries.get("checksum"):
            checksums[file].add(entries["checksum"].lower())
    for file, parts in regions.items():
        yield from _overlaps(file, sorted(parts))
    for file, stated_sums in checksums.items():
        yield from _changed(folder / file, file, stated_sums)


def _overlaps(file: str, parts: list[_Region]) -> Iterator[GraphFinding]:
    far = parts[0]
    for part in parts[1:]:
        if far.start < part.start < far.end < part.end:
            detail = f"reads {far.end - part.start} bytes of {far.tensor} in {file}"
            yield _finding(part.tensor, detail)
        if part.end > far.end:
            far = part


def _changed(path: Path, file: str, stated: set[str]) -> Iterator[GraphFinding]:
    """The format's own checksum is SHA-1; it guards against accidents only."""
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha1").hexdigest()
    if stated != {actual}:
        yield _finding(file, f"its SHA-1 is {actual}, the model states {', '.join(sorted(stated))}")


def _finding(place: str, detail: str) -> GraphFinding:
    return GraphFinding(code="external_data", place=place, detail=detail)
