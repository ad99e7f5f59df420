"""Write the table of CUDA kernels of the installed ONNX Runtime: `gate/decision/cuda_kernels.txt`.

    python -m benchmarks.cuda.kernels

Reads the kernels that ONNX Runtime has registered. This needs a machine on which the libraries of
the CUDA and TensorRT providers load, because ONNX Runtime queries all providers of the build.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TABLE = Path("gate/decision/cuda_kernels.txt")

_NO_LAST_OPSET = 2**31 - 1
"""Last opset of a kernel without an upper limit."""

_INTERNAL_DOMAIN = "com.ms.internal.nhwc"
"""Domain of operators that only ONNX Runtime itself inserts into a graph, with CUDA's layout."""

Row = tuple[str, str, int, int]


def main() -> None:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kernels = state.get_all_opkernel_def()
    cuda = [kernel for kernel in kernels if kernel.provider == "CUDAExecutionProvider"]
    lines = _format_table(cuda, state.get_all_operator_schema())
    TABLE.write_text("\n".join((f"# onnxruntime-gpu {onnxruntime.__version__}", *lines)) + "\n")


def _format_table(kernels: Iterable[Any], schemas: Iterable[Any]) -> list[str]:
    """Return one line for each operator and range of versions.

    A line lists the allowed types of inputs (`i0`) and outputs (`o0`) over all kernels of the
    range.
    """
    by_name: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for schema in schemas:
        by_name[_normalize_domain(schema.domain), schema.name][schema.since_version] = schema
    rows: dict[Row, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for kernel in kernels:
        if kernel.domain == _INTERNAL_DOMAIN:
            continue
        first, last = kernel.version_range
        versions = by_name[_normalize_domain(kernel.domain), kernel.op_name]
        matching_versions = [version for version in versions if first <= version <= last]
        schema = versions[
            min(matching_versions) if matching_versions else max(v for v in versions if v <= first)
        ]
        row = rows[_normalize_domain(kernel.domain), kernel.op_name, first, last]
        for constraint, types in kernel.type_constraints.items():
            for slot in _find_slots(schema, constraint):
                row[slot] |= {kind.removeprefix("tensor(").removesuffix(")") for kind in types}
    return [_format_row(key, row) for key, row in sorted(rows.items())]


def _normalize_domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _find_slots(schema: Any, constraint: str) -> list[str]:
    """Return the inputs of a type constraint, or the outputs if no input has it."""
    slots = []
    for letter, parameters in (("i", schema.inputs), ("o", schema.outputs)):
        slots = slots or [
            f"{letter}{index}"
            for index, parameter in enumerate(parameters)
            if constraint in (parameter.typeStr, parameter.name)
        ]
    return slots


def _format_row(key: Row, row: dict[str, set[str]]) -> str:
    domain, name, first, last = key
    by_types: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for slot, types in sorted(row.items()):
        by_types[tuple(sorted(types))].append(slot)
    allowed = [f"{','.join(slots)}={','.join(types)}" for types, slots in by_types.items()]
    operator = f"{domain}::{name}" if domain else name
    versions = f"{first}+" if last == _NO_LAST_OPSET else f"{first}-{last}"
    return " ".join((operator, versions, *allowed))


if __name__ == "__main__":
    main()
