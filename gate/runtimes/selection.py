"""Discover runtimes through entry points; select those of a policy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from gate.errors import EvidenceError, GateError, PolicyError, RuntimeUnusable, first_line
from gate.installation import deaths, onnx_runtime
from gate.policy.defaults import exact_bounds
from gate.policy.policy import Policy
from gate.policy.sections import RuntimePolicy
from gate.records.runtime import (
    ORT,
    RECORDED,
    RUNTIMES,
    SERVER,
    RuntimeIdentity,
    RuntimeName,
)
from gate.runtimes.isolated import IsolatedRuntime
from gate.runtimes.recorded import RecordedRuntime
from gate.runtimes.runtime import (
    ON_CUDA,
    Conditions,
    Promises,
    Proof,
    RunnableFile,
    Runtime,
    Session,
    load_runtime,
)
from gate.storage.arrays import STRING, Batch
from gate.storage.yaml_section import first_problem

GROUP = "parity_gate.runtimes"
"""The group of entry points in which a package names its runtimes. One that takes a name of the
gate's, or of another package, is refused."""

BUILTIN: dict[RuntimeName, str] = {
    "torch-cuda": "gate.runtimes.torch_cuda:TorchCudaRuntime",
    "ort-cpu": "gate.runtimes.ort:OrtCpu",
    "ort-cpu-optimized": "gate.runtimes.ort:OrtCpuOptimized",
    "ort-cuda": "gate.runtimes.ort:OrtCuda",
    "ort-cuda-optimized": "gate.runtimes.ort:OrtCudaOptimized",
    "ort": "gate.runtimes.ort:Ort",
    "browser-wasm": "gate.runtimes.browser:BrowserWasmRuntime",
    "browser-webgpu": "gate.runtimes.browser:BrowserWebGpuRuntime",
    "openvino": "gate.runtimes.openvino:OpenVinoRuntime",
    "tract": "gate.runtimes.tract:TractRuntime",
    "recorded": "gate.runtimes.recorded:RecordedRuntime",
    "server": "gate.runtimes.server:ServerRuntime",
}
"""The gate's own, also where the package's metadata is older than the code."""

_OURS = "parity-gate"


@dataclass(frozen=True)
class RuntimeEntry:
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


def entries() -> dict[RuntimeName, tuple[RuntimeEntry, ...]]:
    """All that are installed, by name, the gate's own first, then by package. More than one of a
    name is a conflict, which `find` refuses."""
    found = {name: [RuntimeEntry(name, place)] for name, place in BUILTIN.items()}
    packages: dict[int, str] = {}  # by id: each look at a name parses the metadata anew
    for point in metadata.entry_points(group=GROUP):
        dist = point.dist
        if id(dist) not in packages:
            packages[id(dist)] = "" if dist is None else f"{dist.name} {dist.version}"
        package = packages[id(dist)]
        if package.partition(" ")[0] == _OURS and BUILTIN.get(point.name) == point.value:
            continue
        entry = RuntimeEntry(point.name, point.value, package or "an unnamed package")
        if entry not in found.setdefault(point.name, []):
            found[point.name].append(entry)
    return {
        name: tuple(sorted(rivals, key=lambda entry: entry.package))
        for name, rivals in found.items()
    }


def find_runtime(
    kind: RuntimeName, installed: Mapping[RuntimeName, tuple[RuntimeEntry, ...]]
) -> RuntimeEntry:
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


def conflict(rivals: tuple[RuntimeEntry, ...]) -> str:
    """Explain which runtimes share a name, and how to resolve it."""
    names = " and ".join(
        f"{entry.place} of {entry.package or 'the gate itself'}" for entry in rivals
    )
    return (
        f"two runtimes are named '{rivals[0].name}': {names}. Nobody can say which of them "
        f"measured: uninstall {rivals[-1].package.partition(' ')[0]}, or let it take another name."
    )


def load_entry(entry: RuntimeEntry) -> Runtime:
    """The runtime: in this process if it is the gate's own and says so, else apart. Starts
    nothing."""
    from gate.runtimes.isolated import IsolatedRuntime

    if not entry.builtin:
        return IsolatedRuntime(entry.place)
    own = load_runtime(entry.place)  # imports nothing heavy
    return IsolatedRuntime(entry.place, limit_s=own.limit_s) if own.apart else own


Installed = Mapping[RuntimeName, tuple[RuntimeEntry, ...]]


class SelectedRuntime:
    """One runtime under the name that a policy gives it."""

    def __init__(
        self, name: RuntimeName, wanted: RuntimePolicy, installed: Installed | None = None
    ) -> None:
        """`installed`: the entries of the registry, where they were read before.

        Raises PolicyError where there is no such runtime, or it does not take these options.
        """
        self.name = name
        self._kind = wanted.kind or name
        self._plain = dict(wanted.options)
        self._entry = find_runtime(self._kind, installed or entries())
        self.runtime = load_entry(self._entry)
        self._options = _checked(self.runtime.options, name, self._plain)
        self._promises: Promises | None = None

    @property
    def package(self) -> str:
        """That it comes with; empty: the gate itself."""
        return self._entry.package

    @property
    def promises(self) -> Promises:
        """Return the claims of a runtime; empty if it cannot be asked."""
        if self._promises is None:
            if isinstance(self.runtime, IsolatedRuntime):
                return Promises("")
            self._promises = self.runtime.promised(self._options)
        return self._promises

    @property
    def takes_cuda(self) -> bool:
        """Whether it is to compute on a CUDA device, from this process."""
        return not isinstance(self.runtime, IsolatedRuntime) and self.promises.provider in ON_CUDA

    def absent_reason(self) -> str | None:
        """Why it can't run on this machine. Raises PolicyError for options that it does not take,
        and whatever it raises."""
        reason = self.runtime.absent_reason(self._options)
        self._promises = self.runtime.promised(self._options)
        return reason

    def take(self, recording: Path) -> None:
        """Give it what it answers from. Raises PolicyError where it computes by itself."""
        if not isinstance(self.runtime, RecordedRuntime):
            raise PolicyError(
                f"'{self.name}' is a runtime that computes here, and a recording was given for it. "
                "Give the recording another name, or say kind: recorded in the policy."
            )
        self.runtime.recording = recording

    def open(self, file: RunnableFile, *, conditions: Conditions, example: Batch) -> Session:
        """Raises RuntimeUnusable for a file with texts as inputs where the runtime gets numbers
        only, and whatever the runtime raises."""
        texts = [spec.name for spec in file.subject.inputs if spec.dtype == STRING]
        if texts and isinstance(self.runtime, IsolatedRuntime):
            raise RuntimeUnusable(
                f"the gate gives {self.name} numbers only, and the file takes texts as '{texts[0]}'"
                ". Measure this file in ONNX Runtime; set the runtime to required: never."
            )
        return self.runtime.open(
            file, options=self._options, conditions=conditions, example=example
        )

    def versions(self) -> dict[str, str]:
        """Return the versions of its libraries, if it can run."""
        if isinstance(self.runtime, IsolatedRuntime):
            return self.runtime.installed_versions(self._options)
        return self.runtime.versions()

    def close(self) -> None:
        """End the process that it may have started."""
        if isinstance(self.runtime, IsolatedRuntime):
            self.runtime.close()

    def identity(self, proof: Proof | None = None) -> RuntimeIdentity | None:
        """Return the identity of the runtime for the evidence; None if its name says everything."""
        if self.name in RUNTIMES and not self._plain:
            return None
        proof = proof or Proof()
        return RuntimeIdentity(
            kind=self._kind,
            options=self._plain,
            package=self._entry.package,
            provider=self.promises.provider,
            bounds=self.promises.bounds,
            versions=proof.versions,
            device=proof.device,
            precision=proof.precision,
        )


def chosen_of(
    policy: Policy, recordings: Mapping[RuntimeName, Path] | None = None
) -> list[SelectedRuntime]:
    """All that the policy asks for, in its order. `recordings`: a folder or zip by name.

    Raises PolicyError, before anything is measured."""
    installed, left = entries(), dict(recordings or {})
    chosen = [
        SelectedRuntime(name, wanted, installed)
        for name, wanted in policy.runtimes.items()
        if wanted.required != "never"
    ]
    for runtime in chosen:
        if runtime.name in left:
            runtime.take(left.pop(runtime.name))
    if left:
        raise PolicyError(
            f"a recording was given for {', '.join(left)}, which the policy does not ask for. Add "
            "an entry of kind: recorded, or use gate check --recorded."
        )
    return chosen


def with_runtime(policy: Policy, name: RuntimeName) -> Policy:
    """The same policy, which asks for this runtime too: always, and within the built-in bounds that
    it promises to fit, where the policy has none for it.

    Raises PolicyError where there is no such runtime, and what it raises where it can't say what
    it is.
    """
    wanted = policy.runtimes.get(name, RuntimePolicy(required="never"))
    chosen = SelectedRuntime(name, wanted)
    try:
        chosen.absent_reason()
        fitting = exact_bounds(chosen.promises.bounds, classes=policy.task != "tensors")
    finally:
        chosen.close()
    bounds = wanted.bounds
    if bounds.empty:
        bounds = fitting.model_copy(update=bounds.costs)
    plain = policy.to_plain()
    plain["runtimes"][name] = {**wanted.to_plain(), "bounds": bounds.to_plain()}
    plain["runtimes"][name]["required"] = "always"
    try:
        return Policy.from_json(json.dumps(plain))
    except EvidenceError as error:
        raise PolicyError(f"the policy with the runtime {name}: {error}") from error


def _checked(options: type[Any], name: RuntimeName, plain: dict[str, Any]) -> Any:
    try:
        return options.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        raise PolicyError(f"runtime {name}: options: {first_problem(error)}") from error


State = Literal["ok", "absent", "broken", "by options"]


@dataclass(frozen=True)
class Listed:
    """One runtime on this machine."""

    name: RuntimeName
    kind: RuntimeName
    state: State
    """`broken`: it is installed and can't say whether it runs. `by options`: it runs by options
    that only a policy has, or by a recording."""
    provider: str = ""
    package: str = ""
    """Empty: the gate itself."""
    versions: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    """Why it is not `ok`."""

    def to_plain(self) -> dict[str, Any]:
        """JSON-compatible dict."""
        return asdict(self)


def listed(policy: Policy | None = None) -> tuple[Listed, ...]:
    """All that are installed, without options; with a policy those that it names, with theirs."""
    if policy is not None:
        return tuple(_row(name, wanted) for name, wanted in policy.runtimes.items())
    return tuple(_installed())


def _installed() -> Iterator[Listed]:
    deadly = " and ".join(f"{name}: {how}" for name, how in deaths().items())
    for name in entries():
        wanted = RuntimePolicy(required="never")
        if deadly and name in (*RUNTIMES, ORT):
            yield Listed(name, name, "broken", reason=deadly)
        elif name == ORT:
            yield _providers()
        elif name == RECORDED:
            reason = "outputs of another machine, given with gate check --recorded"
            yield Listed(name, name, "by options", reason=reason)
        elif name == SERVER:
            reason = "needs the URL of a model: gate check --server"
            yield Listed(name, name, "by options", reason=reason)
        else:
            yield _row(name, wanted)


def _providers() -> Listed:
    try:
        onnxruntime = onnx_runtime()
        there = ", ".join(onnxruntime.get_available_providers())
        versions = {"onnxruntime": str(onnxruntime.__version__)}
    except Exception as error:  # a broken binary package raises almost anything
        return Listed(ORT, ORT, "broken", reason=first_line(error))
    reason = f"needs options.providers; this build has {there}"
    return Listed(ORT, ORT, "by options", versions=versions, reason=reason)


def _row(name: RuntimeName, wanted: RuntimePolicy) -> Listed:
    kind = wanted.kind or name
    try:
        chosen = SelectedRuntime(name, wanted)
    except Exception as error:
        return Listed(name, kind, "broken", reason=_text(error))
    found = Listed(name, kind, "ok", package=chosen.package)
    try:
        absent = chosen.absent_reason()
        versions = {} if absent else chosen.versions()
    except PolicyError as error:
        state: State = "broken" if wanted.options else "by options"
        return Listed(name, kind, state, package=found.package, reason=_text(error))
    except Exception as error:
        return Listed(name, kind, "broken", package=found.package, reason=_text(error))
    finally:
        chosen.close()
    return Listed(
        name, kind, "absent" if absent else "ok", provider=chosen.promises.provider,
        package=found.package, versions=versions, reason=absent,
    )  # fmt: skip


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, GateError) else f"{type(error).__name__}: {error}"
