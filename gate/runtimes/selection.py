"""Discover runtimes through entry points; select those of a policy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from gate.errors import EvidenceError, GateError, PolicyError, RuntimeUnusable, first_line
from gate.installation import import_crashes, onnx_runtime
from gate.policy.defaults import exact_bounds
from gate.policy.policy import Policy
from gate.policy.sections import RuntimePolicy
from gate.records.runtime import ORT, RECORDED, RUNTIMES, SERVER, RuntimeIdentity, RuntimeName
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
"""The entry point group for runtimes of other packages. Duplicate names are refused."""

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
"""The built-in runtimes, independent of the installed package metadata."""

_DISTRIBUTION = "parity-gate"


@dataclass(frozen=True)
class RuntimeEntry:
    """An installed runtime."""

    name: RuntimeName
    class_path: str
    """`module:class`."""
    package: str = ""
    """Distribution and version; empty for built-in runtimes."""

    @property
    def builtin(self) -> bool:
        """Return whether the runtime is built in."""
        return not self.package


def entries() -> dict[RuntimeName, tuple[RuntimeEntry, ...]]:
    """Return all installed runtimes by name, built-in ones first, then sorted by package.

    `find_runtime` refuses a name with more than one entry.
    """
    by_name = {name: [RuntimeEntry(name, class_path)] for name, class_path in BUILTIN.items()}
    packages: dict[int, str] = {}  # cached by id, because reading `dist.name` parses the metadata
    for point in metadata.entry_points(group=GROUP):
        dist = point.dist
        if id(dist) not in packages:
            packages[id(dist)] = "" if dist is None else f"{dist.name} {dist.version}"
        package = packages[id(dist)]
        if package.partition(" ")[0] == _DISTRIBUTION and BUILTIN.get(point.name) == point.value:
            continue
        entry = RuntimeEntry(point.name, point.value, package or "an unnamed package")
        if entry not in by_name.setdefault(point.name, []):
            by_name[point.name].append(entry)
    return {
        name: tuple(sorted(candidates, key=lambda entry: entry.package))
        for name, candidates in by_name.items()
    }


def find_runtime(
    kind: RuntimeName, installed: Mapping[RuntimeName, tuple[RuntimeEntry, ...]]
) -> RuntimeEntry:
    """Return the runtime with this name. Raises PolicyError unless there is exactly one."""
    candidates = installed.get(kind, ())
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise PolicyError(conflict(candidates))
    near = difflib.get_close_matches(kind, installed, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise PolicyError(
        f"no runtime named '{kind}' is installed; there are {', '.join(sorted(installed))}.{hint} "
        "Install the package that has it, name another one, or set required: never "
        "(docs/runtimes.md)."
    )


def conflict(entries_: tuple[RuntimeEntry, ...]) -> str:
    """Explain which runtimes share a name, and how to resolve it."""
    names = " and ".join(
        f"{entry.class_path} of {entry.package or 'the gate itself'}" for entry in entries_
    )
    return (
        f"two runtimes are named '{entries_[0].name}': {names}. The evidence would not show which "
        f"one ran: uninstall {entries_[-1].package.partition(' ')[0]} or rename its runtime."
    )


def load_entry(entry: RuntimeEntry) -> Runtime:
    """Return the runtime, isolated unless it is built in and not `isolated`; start no process."""
    if not entry.builtin:
        return IsolatedRuntime(entry.class_path)
    builtin = load_runtime(entry.class_path)
    return (
        IsolatedRuntime(entry.class_path, limit_s=builtin.limit_s) if builtin.isolated else builtin
    )


Installed = Mapping[RuntimeName, tuple[RuntimeEntry, ...]]


class SelectedRuntime:
    """A runtime with the name and options of a policy."""

    def __init__(
        self, name: RuntimeName, settings: RuntimePolicy, installed: Installed | None = None
    ) -> None:
        """`installed`: the result of `entries`, if already known.

        Raises PolicyError if there is no such runtime, or it does not accept these options.
        """
        self.name = name
        self.settings = settings
        self._kind = settings.kind or name
        self._plain = dict(settings.options)
        self._entry = find_runtime(self._kind, installed or entries())
        self.runtime = load_entry(self._entry)
        self._options = _parse_options(self.runtime.options, name, self._plain)
        self._promises: Promises | None = None

    @property
    def package(self) -> str:
        """Return the package of the runtime; empty if built in."""
        return self._entry.package

    @property
    def promises(self) -> Promises:
        """Return the claims of the runtime; empty if unknown."""
        if self._promises is None:
            if isinstance(self.runtime, IsolatedRuntime):
                return Promises("")
            self._promises = self.runtime.promised(self._options)
        return self._promises

    @property
    def takes_cuda(self) -> bool:
        """Return whether it runs on a CUDA device from this process."""
        return not isinstance(self.runtime, IsolatedRuntime) and self.promises.provider in ON_CUDA

    def absent_reason(self) -> str | None:
        """Return why it can't run on this machine, or None. Raises PolicyError for invalid options,
        and the exceptions of the runtime."""
        reason = self.runtime.absent_reason(self._options)
        self._promises = self.runtime.promised(self._options)
        return reason

    def use_recording(self, recording: Path) -> None:
        """Set the recording. Raises PolicyError unless the runtime is of kind recorded."""
        if not isinstance(self.runtime, RecordedRuntime):
            raise PolicyError(
                f"'{self.name}' is a live runtime, so it can't use a recording. Use another name "
                "for the recording, or set kind: recorded in the policy."
            )
        self.runtime.recording = recording

    def open(self, file: RunnableFile, *, conditions: Conditions, example: Batch) -> Session:
        """Open the file. Raises RuntimeUnusable for string inputs if the runtime is isolated, and
        the exceptions of the runtime."""
        texts = [spec.name for spec in file.subject.inputs if spec.dtype == STRING]
        if texts and isinstance(self.runtime, IsolatedRuntime):
            raise RuntimeUnusable(
                f"{self.name} supports only numeric inputs, but '{texts[0]}' of the file is a "
                "string. Measure this file in ONNX Runtime; set the runtime to required: never."
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
        """End the process of the runtime, if any."""
        if isinstance(self.runtime, IsolatedRuntime):
            self.runtime.close()

    def identity(self, proof: Proof | None = None) -> RuntimeIdentity | None:
        """Return the identity of the runtime for the evidence; None if the name is sufficient."""
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


def selected_runtimes(
    policy: Policy, recordings: Mapping[RuntimeName, Path] | None = None
) -> list[SelectedRuntime]:
    """Return the runtimes of the policy, in order. `recordings`: a folder or zip by name.

    Raises PolicyError for unknown runtimes and recordings."""
    installed, unused = entries(), dict(recordings or {})
    runtimes = [
        SelectedRuntime(name, settings, installed)
        for name, settings in policy.runtimes.items()
        if settings.required != "never"
    ]
    for runtime in runtimes:
        if runtime.name in unused:
            runtime.use_recording(unused.pop(runtime.name))
    if unused:
        raise PolicyError(
            f"there is a recording for {', '.join(unused)}, which is not in the policy. Add an "
            "entry of kind: recorded, or use gate check --recorded."
        )
    return runtimes


def with_runtime(policy: Policy, name: RuntimeName) -> Policy:
    """Return the policy with this runtime required always.

    Without bounds in the policy, the built-in bounds of the runtime's kind apply. Raises
    PolicyError if there is no such runtime, and the exceptions of the runtime.
    """
    settings = policy.runtimes.get(name, RuntimePolicy(required="never"))
    runtime = SelectedRuntime(name, settings)
    try:
        runtime.absent_reason()
        builtin_bounds = exact_bounds(runtime.promises.bounds, classes=policy.task != "tensors")
    finally:
        runtime.close()
    bounds = settings.bounds
    if bounds.empty:
        bounds = builtin_bounds.model_copy(update=bounds.costs)
    plain = policy.to_plain()
    plain["runtimes"][name] = {**settings.to_plain(), "bounds": bounds.to_plain()}
    plain["runtimes"][name]["required"] = "always"
    try:
        return Policy.from_json(json.dumps(plain))
    except EvidenceError as error:
        raise PolicyError(f"the policy with the runtime {name}: {error}") from error


def _parse_options(options: type[Any], name: RuntimeName, plain: dict[str, Any]) -> Any:
    try:
        return options.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        raise PolicyError(f"runtime {name}: options: {first_problem(error)}") from error


State = Literal["ok", "absent", "broken", "by options"]


@dataclass(frozen=True)
class RuntimeStatus:
    """The state of a runtime on this machine."""

    name: RuntimeName
    kind: RuntimeName
    state: State
    """`broken`: installed, but fails. `by options`: needs options of a policy, or a recording."""
    provider: str = ""
    package: str = ""
    """Empty for built-in runtimes."""
    versions: dict[str, str] = field(default_factory=dict)
    reason: str | None = None
    """The reason for a state other than `ok`."""

    def to_plain(self) -> dict[str, Any]:
        """JSON-compatible dict."""
        return asdict(self)


def runtime_statuses(policy: Policy | None = None) -> tuple[RuntimeStatus, ...]:
    """Return all installed runtimes, or those of a policy with its options."""
    if policy is not None:
        return tuple(_status_of(name, settings) for name, settings in policy.runtimes.items())
    return tuple(_installed_statuses())


_BY_OPTIONS = {
    RECORDED: "outputs of another machine, given with gate check --recorded",
    SERVER: "needs the URL of a model: gate check --server",
}
"""Why a runtime needs options, by name."""


def _installed_statuses() -> Iterator[RuntimeStatus]:
    crashes = " and ".join(f"{name}: {reason}" for name, reason in import_crashes().items())
    for name in entries():
        if crashes and name in (*RUNTIMES, ORT):
            yield RuntimeStatus(name, name, "broken", reason=crashes)
        elif name == ORT:
            yield _status_of_ort()
        elif name in _BY_OPTIONS:
            yield RuntimeStatus(name, name, "by options", reason=_BY_OPTIONS[name])
        else:
            yield _status_of(name, RuntimePolicy(required="never"))


def _status_of_ort() -> RuntimeStatus:
    try:
        onnxruntime = onnx_runtime()
        available = ", ".join(onnxruntime.get_available_providers())
        versions = {"onnxruntime": str(onnxruntime.__version__)}
    except Exception as error:  # a broken binary package raises almost anything
        return RuntimeStatus(ORT, ORT, "broken", reason=first_line(error))
    reason = f"needs options.providers; this build has {available}"
    return RuntimeStatus(ORT, ORT, "by options", versions=versions, reason=reason)


def _status_of(name: RuntimeName, settings: RuntimePolicy) -> RuntimeStatus:
    status = partial(RuntimeStatus, name, settings.kind or name)
    try:
        runtime = SelectedRuntime(name, settings)
    except Exception as error:
        return status("broken", reason=_error_text(error))
    status = partial(status, package=runtime.package)
    try:
        absent = runtime.absent_reason()
        versions = {} if absent else runtime.versions()
    except PolicyError as error:
        return status("broken" if settings.options else "by options", reason=_error_text(error))
    except Exception as error:
        return status("broken", reason=_error_text(error))
    finally:
        runtime.close()
    provider = runtime.promises.provider
    return status("absent" if absent else "ok", provider=provider, versions=versions, reason=absent)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, GateError) else f"{type(error).__name__}: {error}"
