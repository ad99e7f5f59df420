"""Write the table of CUDA kernels of the installed ONNX Runtime: `gate/decision/cuda_kernels.txt`.

    python -m benchmarks.cuda.kernels

It asks the build for its registered kernels, so it needs a machine on which the CUDA provider's
library loads, and, because ONNX Runtime asks all providers of the build, that of TensorRT, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TABLE = Path("gate/decision/cuda_kernels.txt")

_OPEN = 2**31 - 1
"""The last opset of a kernel that has none."""

_INTERNAL = "com.ms.internal.nhwc"
"""Operators that only ONNX Runtime itself puts into a graph, with the layout of CUDA."""

Row = tuple[str, str, int, int]


def main() -> None:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kernels = state.get_all_opkernel_def()
    cuda = [each for each in kernels if each.provider == "CUDAExecutionProvider"]
    lines = _lines(cuda, state.get_all_operator_schema())
    TABLE.write_text("\n".join((f"# onnxruntime-gpu {onnxruntime.__version__}", *lines)) + "\n")


def _lines(kernels: Iterable[Any], schemas: Iterable[Any]) -> list[str]:
    """One line for an operator and range of its versions: which types which inputs (`i0`) and
    outputs (`o0`) may have, over all kernels of the range."""
    by_name: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for schema in schemas:
        by_name[_domain(schema.domain), schema.name][schema.since_version] = schema
    rows: dict[Row, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for kernel in kernels:
        if kernel.domain == _INTERNAL:
            continue
        first, last = kernel.version_range
        versions = by_name[_domain(kernel.domain), kernel.op_name]
        inside = [version for version in versions if first <= version <= last]
        schema = versions[min(inside) if inside else max(v for v in versions if v <= first)]
        row = rows[_domain(kernel.domain), kernel.op_name, first, last]
        for constraint, types in kernel.type_constraints.items():
            for slot in _slots(schema, constraint):
                row[slot] |= {kind.removeprefix("tensor(").removesuffix(")") for kind in types}
    return [_line(key, row) for key, row in sorted(rows.items())]


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _slots(schema: Any, constraint: str) -> list[str]:
    """The inputs of a constraint; where it has none, the outputs."""
    found = []
    for letter, parameters in (("i", schema.inputs), ("o", schema.outputs)):
        found = found or [
            f"{letter}{place}"
            for place, parameter in enumerate(parameters)
            if constraint in (parameter.typeStr, parameter.name)
        ]
    return found


def _line(key: Row, row: dict[str, set[str]]) -> str:
    domain, name, first, last = key
    by_types: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for slot, types in sorted(row.items()):
        by_types[tuple(sorted(types))].append(slot)
    allowed = [f"{','.join(slots)}={','.join(types)}" for types, slots in by_types.items()]
    operator = f"{domain}::{name}" if domain else name
    versions = f"{first}+" if last == _OPEN else f"{first}-{last}"
    return " ".join((operator, versions, *allowed))


if __name__ == "__main__":
    main()
