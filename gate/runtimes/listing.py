"""What of the runtimes is there, what is not and why: for `gate runtimes` and `gate doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gate.errors import GateError, PolicyError, first_line
from gate.package.loaded import deaths, onnx_runtime
from gate.policy.policy import Policy
from gate.policy.sections import RuntimePolicy
from gate.records.runtime import ORT, RECORDED, RUNTIMES, RuntimeName
from gate.runtimes import registry
from gate.runtimes.chosen import ChosenRuntime

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
    for name in registry.entries():
        wanted = RuntimePolicy(required="never")
        if deadly and name in (*RUNTIMES, ORT):
            yield Listed(name, name, "broken", reason=deadly)
        elif name == ORT:
            yield _providers()
        elif name == RECORDED:
            reason = "it gives back what another machine computed: gate check --recorded"
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
    reason = f"options name the providers; this build lists {there}"
    return Listed(ORT, ORT, "by options", versions=versions, reason=reason)


def _row(name: RuntimeName, wanted: RuntimePolicy) -> Listed:
    kind = wanted.kind or name
    try:
        chosen = ChosenRuntime(name, wanted)
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
