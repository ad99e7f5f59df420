"""Group failing checks by root cause, using codes only."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from gate.decision.catalog import SYMPTOMS, Cause, cause_for
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import Decision
from gate.records.localization import Explanation, Localization
from gate.records.runtime import RuntimeName, traits_of
from gate.summary.render import bound_usage, format_bound_usage


@dataclass
class CheckGroup:
    """Checks with the same cause, while the groups are built."""

    cause: Cause
    checks: list[CheckResult] = field(default_factory=list)
    localisation: Localization | None = None
    """The layer at fault, if there is one."""
    cpu_agrees: bool = False
    """Whether ONNX Runtime passed on the CPU, which means that the file is right."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its checks."""
        verdicts = {check.verdict for check in self.checks}
        order = (Verdict.FAIL, Verdict.ERROR, Verdict.WAIVED)
        return next(verdict for verdict in order if verdict in verdicts)

    @property
    def ordered(self) -> tuple[CheckResult, ...]:
        """The checks: failures, then those not judged; each with the largest excess first."""
        return tuple(sorted(self.checks, key=_sort_key))

    @property
    def headline_check(self) -> CheckResult:
        """The check whose number appears in the sentence about this group.

        For a probe this is its check. For a layer, weights, an optimizer or a device it is the
        noise ratio that exceeds its bound most. Otherwise it is the first check.
        """
        first, localization = self.ordered[0], self.localisation
        if localization is not None and localization.probe is not None:
            return next((c for c in self.ordered if c.name == f"probe_{localization.probe}"), first)
        if self.cause in _BY_NAME:
            return worst_of(self.checks, _BY_NAME[self.cause]) or first
        if localization is None and self.cause not in _BY_NOISE:
            return first
        failed = [check for check in self.checks if check.verdict is Verdict.FAIL]
        return worst_of(failed, "noise_ratio") or worst_of(failed, "noise_") or first

    @property
    def number(self) -> str:
        """The number of the headline check, with its name if the unit does not identify it."""
        check = self.headline_check
        text = format_bound_usage(check)
        return text if not text or check.name.startswith("noise_") else f"{check.name} {text}"

    @property
    def where(self) -> str:
        """The affected runtimes."""
        return ", ".join(dict.fromkeys(c.runtime for c in self.ordered if c.runtime))


_BY_NAME: dict[Cause, str] = {"batch": "probe_batch", "nonfinite": "finite"}

_BY_NOISE: tuple[Cause, ...] = ("weights", "optimiser", "device", "server", "cpu_optimized")


def _sort_key(check: CheckResult) -> tuple[int, int, float]:
    used = bound_usage(check)
    shows = 0 if not check.name.startswith(("graph_", "probe_")) else 1
    verdict = 0 if check.verdict is Verdict.FAIL else 1
    return verdict, shows, -(used if used is not None and not math.isnan(used) else 0.0)


def worst_of(checks: Iterable[CheckResult], beginning: str) -> CheckResult | None:
    """Return the check of this name that exceeds its bound most, or None."""
    named = [check for check in checks if check.name.startswith(beginning)]
    return max(named, key=lambda check: bound_usage(check) or 0.0, default=None)


# A known cause absorbs its symptoms: the numbers, probes and graph findings that it explains, on
# every runtime of the same file.


_WEIGHT_CAUSES: frozenset[Cause] = frozenset({"weights", "training_mode", "nonfinite"})
"""Findings in the graph that describe the same fault as the diverging layer."""

_ROOTS: tuple[Cause, ...] = ("outputs", "training_mode", "weights", "model")
"""Causes that explain numbers if no layer is known, the most certain first."""

_ANSWERS = ("top1_", "top5_", "accuracy_drop", "threshold_crossing")
"""Prefixes of checks of answers, which near-ties explain."""

_INDEPENDENT = ("runtime", "graph_fixed_batch")
"""Checks that are not symptoms of another fault: they would fail without it, too."""

_BY_FAULT: dict[str, Cause] = {
    "training_mode": "training_mode",
    "output_order": "outputs",
    "not_returned": "outputs",
    "tf32": "device",
}
"""Causes that do not belong to a single layer."""


def groups_of(
    decision: Decision, explanation: Explanation, *, servers: Container[RuntimeName] = ()
) -> list[CheckGroup]:
    """Return the groups: the one that explains most first, waived checks last.

    `servers`: the runtimes that are model servers.
    """
    by_cause: dict[Cause, CheckGroup] = {}
    if any(_is_fault(check) and check.runtime not in servers for check in decision.problems):
        servers = ()  # the fault of the file explains what they return
    for check in (*decision.problems, *decision.waived):
        is_served = check.runtime in servers and _is_fault(check)
        cause = "server" if is_served else cause_for(check)
        group = CheckGroup(cause, cpu_agrees=cause == "server" and _cpu_agrees(decision))
        by_cause.setdefault(cause, group).checks.append(check)
    root = _root_cause(by_cause, decision, explanation.localisation)
    groups = []
    if root is not None:
        _absorb(root, by_cause, decision)
        groups.append(root)
    for group in by_cause.values():
        if group is not root:
            runtimes = [check.runtime for check in group.checks]
            on_cuda = all(name is not None and traits_of(name).cuda for name in runtimes)
            # The fault of the file is already reported; these checks differ because of the device.
            numbers = group.cause == "numbers" and on_cuda
            groups.append(_on_device(group.checks, decision) if numbers else group)
    return sorted((group for group in groups if group.checks), key=_rank)


def _root_cause(
    by_cause: dict[Cause, CheckGroup], decision: Decision, localization: Localization | None
) -> CheckGroup | None:
    """Return the root cause of the other failures, or None."""
    if "model" in by_cause and _is_reference_unusable(by_cause["model"]):
        return by_cause["model"]
    if "samples" in by_cause and any(
        check.name == "reference" and check.output is None for check in by_cause["samples"].checks
    ):  # if no output varies, none can be an output of classes
        return by_cause["samples"]
    if localization is not None and localization.diverges and localization.probe is None:
        nonfinite = by_cause.get("nonfinite", CheckGroup("nonfinite")).checks
        refused = any(check.name == "finite" for check in nonfinite)
        cause = "nonfinite" if refused else _located(localization, decision)
        return CheckGroup(cause, localisation=localization)
    certain = next((by_cause[cause] for cause in _ROOTS if cause in by_cause), None)
    if certain is None and localization is not None and localization.probe is not None:
        # Only a probe reveals the layer. Different code may come from the trace.
        is_code = localization.fault_code == "code"
        if is_code and "baked_in" in by_cause and "beyond" not in by_cause:
            return by_cause["baked_in"]
        return CheckGroup("beyond", localisation=localization)
    return certain or _cause_of_pattern(by_cause, decision)


def _cause_of_pattern(by_cause: dict[Cause, CheckGroup], decision: Decision) -> CheckGroup | None:
    """Return the cause that follows from the pattern of failures, or None."""
    if not _measured(decision):
        return by_cause.get("runtime") or by_cause.get("batch")
    by_runtime = _only_on(decision)
    if by_runtime is not None and "numbers" in by_cause:
        checks = by_cause.pop("numbers").checks
        if by_runtime == "device":
            # Checks of precision explain the numbers of their runtimes.
            device = by_cause.get("device", CheckGroup("device"))
            runtimes = {check.runtime for check in checks}
            for check in [*device.checks]:
                if check.name == "precision" and check.runtime in runtimes:
                    device.checks.remove(check)
                    checks.append(check)
            return _on_device(checks, decision)
        return CheckGroup(by_runtime, checks)
    batch = by_cause.get("batch")
    if batch is not None and all(check.name in _INDEPENDENT for check in batch.checks):
        batch = None
    return by_cause.get("nonfinite") or batch or by_cause.get("unstable")


def _is_reference_unusable(group: CheckGroup) -> bool:
    """Return whether the fault is in the reference, so that its numbers prove nothing else.

    The reference is not repeatable, or its fused path and its layers return different numbers.
    """
    return any(check.name in ("repeats", "fast_path") for check in group.checks)


def _located(localization: Localization, decision: Decision) -> Cause:
    """Return the cause in a localization."""
    cause = _BY_FAULT.get(localization.fault_code or "")
    if cause is not None:
        return cause
    if localization.optimiser or _only_on(decision) == "optimiser":
        return "optimiser"
    return "layer" if localization.first_divergence is not None else "numbers"


def _absorb(root: CheckGroup, by_cause: dict[Cause, CheckGroup], decision: Decision) -> None:
    """Move the checks that the root cause explains into its group."""
    explained: set[Cause] = {"outputs"} if root.cause == "samples" else set(SYMPTOMS)
    if root.localisation is not None or root.cause == "weights":
        explained |= _WEIGHT_CAUSES
    if not _measured(decision):
        explained.add("evidence")
    if root.cause == "optimiser":
        explained.add("runtime")
    for cause, group in by_cause.items():  # in the order of the decision, which then breaks ties
        if group is root or cause not in explained:
            continue
        moved = [check for check in group.checks if _explains(root, check)]
        group.checks = [check for check in group.checks if check not in moved]
        root.checks += moved


def _explains(root: CheckGroup, check: CheckResult) -> bool:
    """Return whether a check fails because of the root cause."""
    if check.verdict is Verdict.WAIVED:
        return False
    if check.name in _INDEPENDENT:
        # An optimizer may break the session instead of the outputs.
        blame = root.localisation.blame if root.localisation else None
        breaks = root.cause == "optimiser" and blame is not None and blame.raises is not None
        return breaks and check.runtime is not None and _shows_on(root, check.runtime)
    if root.cause == "model":
        return _is_reference_unusable(root) or check.name.startswith(_ANSWERS)
    return check.runtime is None or _shows_on(root, check.runtime)


def _shows_on(root: CheckGroup, runtime: RuntimeName) -> bool:
    """Return whether the root cause affects a runtime.

    A fault of the file affects all runtimes except PyTorch, one of the optimizer those with
    optimizations, one of a device those on the device.
    """
    traits = traits_of(runtime)
    if traits.engine == "torch":
        return False
    located = root.localisation
    if root.cause == "optimiser":
        itself = located is not None and located.runtime == runtime
        return itself or traits.optimization == "ORT_ENABLE_ALL"
    if located is not None and traits_of(located.runtime).cuda:
        return traits.cuda
    return True


def _only_on(decision: Decision) -> Cause | None:
    """Return a cause if numbers fail only optimized, on CUDA or outside ONNX Runtime."""
    failed = {
        check.runtime
        for check in decision.problems
        if check.runtime and check.output and check.verdict is Verdict.FAIL
    }
    right = {name for name in decision.runtimes if traits_of(name).engine == "onnxruntime"}
    if not failed or not right:
        return None
    if all(traits_of(name).cuda or traits_of(name).engine == "other" for name in failed):
        return "device"
    on = all(traits_of(name).optimization == "ORT_ENABLE_ALL" for name in failed)
    off = any(traits_of(name).optimization == "ORT_DISABLE_ALL" for name in right)
    return "optimiser" if on and off else None


def _on_device(checks: list[CheckResult], decision: Decision) -> CheckGroup:
    """Return the cause of numbers that fail on CUDA or in a third-party runtime."""
    return CheckGroup("device", checks, cpu_agrees=_cpu_agrees(decision))


def _cpu_agrees(decision: Decision) -> bool:
    passed = [traits_of(name) for name in decision.runtimes]
    return any(traits.engine == "onnxruntime" and not traits.cuda for traits in passed)


def _is_fault(check: CheckResult) -> bool:
    """Return whether a check shows a fault of the file, or of the server that computes it."""
    return cause_for(check) in SYMPTOMS or cause_for(check) in _ROOTS


def _measured(decision: Decision) -> bool:
    return any(check.output for check in decision.checks)


def _rank(group: CheckGroup) -> tuple[int, int, int]:
    order = {Verdict.FAIL: 0, Verdict.ERROR: 1, Verdict.WAIVED: 2}
    # A model that draws random numbers explains its own failures.
    certain = group.cause not in ("numbers", "evidence")
    first = -1 if group.cause == "model" and _is_reference_unusable(group) else order[group.verdict]
    return first, -len(group.checks) if certain else 0, 0 if certain else 1
