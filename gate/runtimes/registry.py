"""Which runtimes there are: the gate's own, and those of installed packages. Nothing is imported
before it is used.

A package names its runtimes in the entry points of the group `parity_gate.runtimes`. One that takes
a name of the gate's, or of another package, is refused with both: nobody answers for somebody else.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from gate.errors import EvidenceError, PolicyError
from gate.records.runtime import RuntimeName
from gate.runtimes.runtime import Runtime

GROUP = "parity_gate.runtimes"
BUILTIN: dict[RuntimeName, str] = {
    "torch-cuda": "gate.runtimes.torch_cuda:TorchCuda",
    "ort-cpu": "gate.runtimes.ort:OrtCpu",
    "ort-cpu-optimized": "gate.runtimes.ort:OrtCpuOptimized",
    "ort-cuda": "gate.runtimes.ort:OrtCuda",
    "ort-cuda-optimized": "gate.runtimes.ort:OrtCudaOptimized",
    "ort": "gate.runtimes.ort:Ort",
    "browser-wasm": "gate.runtimes.browser.runtimes:BrowserWasm",
    "browser-webgpu": "gate.runtimes.browser.runtimes:BrowserWebGpu",
    "openvino": "gate.runtimes.openvino:OpenVino",
    "tract": "gate.runtimes.tract:Tract",
    "recorded": "gate.runtimes.recorded:Recorded",
}
"""The gate's own, also where the package's metadata is older than the code."""
_OURS = "parity-gate"


@dataclass(frozen=True)
class Entry:
    """One runtime that is installed."""

    name: RuntimeName
    place: str
    """`module:class`."""
    package: str = ""
    """Distribution and version; empty: the gate itself."""

    @property
    def builtin(self) -> bool:
        """True if it is the gate's own."""
        return not self.package


def entries() -> dict[RuntimeName, tuple[Entry, ...]]:
    """All that are installed, by name, the gate's own first, then by package. More than one of a
    name is a conflict, which `find` refuses."""
    found = {name: [Entry(name, place)] for name, place in BUILTIN.items()}
    for point in metadata.entry_points(group=GROUP):
        package = "" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        if package.partition(" ")[0] == _OURS and BUILTIN.get(point.name) == point.value:
            continue
        entry = Entry(point.name, point.value, package or "an unnamed package")
        if entry not in found.setdefault(point.name, []):
            found[point.name].append(entry)
    return {
        name: tuple(sorted(rivals, key=lambda entry: entry.package))
        for name, rivals in found.items()
    }


def find(kind: RuntimeName, installed: Mapping[RuntimeName, tuple[Entry, ...]]) -> Entry:
    """The runtime of this name among the `entries`. Raises PolicyError where there is none, or
    more than one."""
    rivals = installed.get(kind, ())
    if len(rivals) == 1:
        return rivals[0]
    if rivals:
        raise PolicyError(conflict(rivals))
    near = difflib.get_close_matches(kind, installed, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise PolicyError(
        f"no runtime named '{kind}' is installed; there are {', '.join(sorted(installed))}.{hint} "
        "Install the package that has it, name another one, or set required: never "
        "(docs/runtimes.md)."
    )


def conflict(rivals: tuple[Entry, ...]) -> str:
    """What is wrong with more than one runtime of a name, and the way out."""
    names = " and ".join(
        f"{entry.place} of {entry.package or 'the gate itself'}" for entry in rivals
    )
    return (
        f"two runtimes are named '{rivals[0].name}': {names}. Nobody can say which of them "
        f"measured: uninstall {rivals[-1].package.partition(' ')[0]}, or let it take another name."
    )


def load(entry: Entry) -> Runtime:
    """The runtime: in this process if it is the gate's own and says so, else apart. Starts
    nothing."""
    from gate.runtimes.apart import Apart

    if not entry.builtin:
        return Apart(entry.place)
    own = runtime_at(entry.place)  # imports nothing heavy
    return Apart(entry.place, limit_s=own.limit_s) if own.apart else own


def runtime_at(place: str) -> Runtime:
    """An instance of the class at `module:class`. Raises whatever its module raises."""
    module, _, name = place.partition(":")
    made = getattr(importlib.import_module(module), name)()
    if not isinstance(made, Runtime):
        raise EvidenceError(
            f"{place} is no runtime: it is a {type(made).__name__}. Derive it from "
            "gate.runtimes.Runtime (docs/runtimes.md)."
        )
    return made
