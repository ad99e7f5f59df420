"""Look up whether ONNX Runtime has a CUDA kernel for an operator."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gate.records.runtime import CpuNode

# The table lists the kernels that a build of ONNX Runtime has registered: `operator first-last
# i0,i1=types`, an open range as `first+`. `benchmarks/cuda/kernels.py` writes it.

_TABLE = Path(__file__).with_name("cuda_kernels.txt")

_NUMBER = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True)
class _Kernel:
    """A range of versions of an operator with the supported types."""

    first: int
    last: int
    types: Mapping[str, frozenset[str]]
    """Types by input (`i0`) or output (`o0`)."""

    def runs(self, since_version: int, inputs: tuple[str, ...]) -> bool:
        """Return whether the kernel may run this version and types. An unknown type matches."""
        return self.first <= since_version <= self.last and all(
            not kind or kind in self.types.get(f"i{index}", (kind,))
            for index, kind in enumerate(inputs)
        )


@dataclass(frozen=True)
class KernelTable:
    """The CUDA kernels of one version of ONNX Runtime."""

    version: str
    kernels: Mapping[str, list[_Kernel]]
    """Kernels by operator: `ArgMax`, `com.microsoft::Attention`."""

    def lacks_kernel(self, node: CpuNode, version: str | None) -> bool:
        """Return whether ONNX Runtime `version` lacks a CUDA kernel for a node's type and opset.

        False if the table has no entry: for a later version, which may have more kernels, and for
        operators of other domains.
        """
        domain = node.operator.rpartition("::")[0]
        if domain not in ("", "ai.onnx.ml", "com.microsoft") or node.since_version is None:
            return False
        if version is None or _number(version) > _number(self.version):
            return False
        rows = self.kernels.get(node.operator, ())
        return not any(kernel.runs(node.since_version, node.inputs) for kernel in rows)


def _number(version: str) -> tuple[int, ...]:
    match = _NUMBER.match(version)
    return tuple(map(int, match.groups())) if match else (1 << 30,)


@functools.cache
def cuda_kernels() -> KernelTable:
    """Return the table of the package."""
    head, *lines = _TABLE.read_text(encoding="utf-8").splitlines()
    kernels = defaultdict[str, list[_Kernel]](list)
    for line in lines:
        operator, versions, *allowed = line.split()
        first, _, last = versions.rstrip("+").partition("-")
        types = {
            slot: frozenset(kinds.split(","))
            for slots, _, kinds in (each.partition("=") for each in allowed)
            for slot in slots.split(",")
        }
        # An open range covers only the first version of the operator.
        kernels[operator].append(_Kernel(int(first), int(last or first), types))
    return KernelTable(head.split()[-1], kernels)
