"""Find the ONNX Runtime graph optimizer that changes the results, by bisection."""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from pydantic import TypeAdapter

from gate.errors import EvidenceError, GateError, LimitExceeded, ModelError, describe_failure
from gate.localize.layer_deviations import Deviation, DeviationLimits
from gate.localize.model_runner import ForwardPathChanged, LocalizationContext, ValueSurvey
from gate.onnx_file.reading import nodes_of
from gate.onnx_file.sessions import enable_verbose_log, open_session, quiet_run, session_options
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import OPTIMIZATIONS_OFF, OrtSetup
from gate.records.localization import OptimizerFault
from gate.sandbox.limits import SandboxLimits, usual_memory
from gate.sandbox.process import run_in_sandbox
from gate.storage.arrays import Batch, OutputArray
from gate.storage.files import temporary_folder

RunSession = Callable[[Mapping[str, OutputArray]], Mapping[str, OutputArray]]
"""Runs a session: returns its outputs by name for inputs by name."""


@dataclass(frozen=True)
class ReferenceOutput:
    """The inputs and the model's outputs of one batch, by the file's names."""

    feed: Mapping[str, OutputArray]
    outputs: Mapping[str, OutputArray]
    """Complete outputs."""
    first: bool = False
    """True for the batch on which the noise floor is measured."""
    truths: Mapping[str, OutputArray] | None = None
    """Sketches of the float64 outputs of the first batch; None if float64 can't run."""


class OutputComparator:
    """Compares outputs in the same way as a localization, on the same samples."""

    def __init__(
        self, references: Sequence[ReferenceOutput], limits: DeviationLimits, *, bound: float = 1.0
    ) -> None:
        """`bound`: the largest allowed deviation in units of its limits."""
        self._references, self._limits, self._bound = references, limits, bound

    def agrees(self, run_session: RunSession) -> bool:
        """Return True if all outputs are within the bound. Raises the session's exceptions."""
        deviations: dict[str, Deviation] = {}
        for reference in self._references:
            outputs = run_session(reference.feed)
            for name, value in reference.outputs.items():
                deviation = deviations.setdefault(name, Deviation())
                deviation.update(value, outputs[name])
                if reference.first:
                    truth = None if reference.truths is None else reference.truths[name]
                    deviation.update_noise(value, outputs[name], truth)
            if not self._limits.bound_usage(deviations) <= self._bound:
                return False  # more samples can't change this
        return True


def reference_outputs(context: LocalizationContext, survey: ValueSurvey) -> list[ReferenceOutput]:
    """Run the model; return its outputs per batch. Raises EvidenceError.

    Batches that take another path through the model are left out.
    """
    returned = dict(zip(context.graph.outputs, survey.outputs, strict=False))
    references: list[ReferenceOutput] = []
    for index, batch in enumerate(context.batches):
        try:
            values = context.runner.values(batch, survey, set(returned.values()))
        except ForwardPathChanged:
            continue
        outputs = {name: values[number] for name, number in returned.items()}
        truths = _float64_values(context, survey, batch, values) if index == 0 else None
        named = None if truths is None else {name: truths[n] for name, n in returned.items()}
        references.append(ReferenceOutput(context.feed(batch), outputs, index == 0, named))
    return references


def _float64_values(
    context: LocalizationContext, survey: ValueSurvey, batch: Batch, values: Mapping[int, Any]
) -> Mapping[int, OutputArray] | None:
    try:
        return context.runner.float64_values(batch, survey, values).through
    except ModelError:
        return None


# ONNX Runtime has no API that lists the optimizers. Its most verbose log names each one when it
# starts and ends, for all providers alike.
_LEVEL = re.compile(r"graph transformer\(s\) for level (\d+)")

_BEGINS = re.compile(r"Applying graph transformer (\S+) on step")

_ENDS = re.compile(r"GraphTransformer (\S+) modified: (\d+) with status: (\S+)")

LEVELS = ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL")
"""Levels as the log numbers them, from 1."""


def optimizers_that_changed(lines: Iterable[str], *, at: str | None = None) -> tuple[str, ...]:
    """Return the optimizers that changed the graph or failed, in the order of their first run.

    Those that changed it at level `at` come first. Empty if the log names none.
    """
    levels: dict[str, set[int]] = {}
    level, begun = 0, None
    for line in lines:
        if level_match := _LEVEL.search(line):
            level = int(level_match[1])
        elif begins := _BEGINS.search(line):
            begun = begins[1]
        elif ends := _ENDS.search(line):
            begun = None
            if ends[2] != "0" or ends[3] != "OK":
                levels.setdefault(ends[1], set()).add(level)
    if begun is not None:  # it failed before it ended
        levels.setdefault(begun, set()).add(level)
    preferred_level = LEVELS.index(at) + 1 if at in LEVELS else 0
    return tuple(sorted(levels, key=lambda name: preferred_level not in levels[name]))


# The log names sets of rules, not the rule that applied. `disabled_optimizers` accepts names of
# rules too, and ignores unknown ones: a rule that a version lacks does no harm here, and a missing
# rule leaves the name of the set.
RULES: Mapping[str, tuple[str, ...]] = {
    "Level1_RuleBasedTransformer": (
        "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout",
        "ExpandElimination", "CastElimination", "CastChainElimination", "PreShapeNodeElimination",
        "NoopElimination", "DivMulFusion", "FuseReluClip", "GemmSumFusion", "GemmTransposeFusion",
        "NotWhereFusion", "ConvAddFusion", "ConvMulFusion", "ConvBNFusion", "Pad_Fusion",
        "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion",
    ),
    "Level2_RuleBasedTransformer": (
        "ClipQuantRewrite", "ReluQuantRewrite", "GemmTransposeFusion",
    ),
}  # fmt: skip

IsCorrectWithout = Callable[[frozenset[str]], bool]
"""Returns whether the outputs are correct with exactly these optimizers disabled."""


def minimal_set(names: Sequence[str], is_correct_without: IsCorrectWithout) -> tuple[str, ...]:
    """Return which of `names` must be disabled, in order; disabling all of them is enough.

    If disabling more never breaks what disabling fewer fixes, the result is minimal. Calls
    `is_correct_without` about 2 log2(n) times per member (QuickXplain, Junker 2004).
    """
    return _minimal_addition(frozenset(), names, is_correct_without, more=False)


def _minimal_addition(
    disabled: frozenset[str], names: Sequence[str], is_correct: IsCorrectWithout, *, more: bool
) -> tuple[str, ...]:
    """Return which of `names` must be disabled in addition to `disabled`.

    more: whether `disabled` has grown since it was last tested.
    """
    if more and is_correct(disabled):
        return ()
    if len(names) <= 1:
        return tuple(names)
    front, back = names[: len(names) // 2], names[len(names) // 2 :]
    of_back = _minimal_addition(disabled.union(front), back, is_correct, more=True)
    of_front = _minimal_addition(disabled.union(of_back), front, is_correct, more=bool(of_back))
    return (*of_front, *of_back)


SESSIONS = 32
"""Largest number of sessions per file; real faults took 7 to 15."""

TRIALS_LIMIT_S = 30.0
"""Processor time after which no session is opened: ten of a resnet18 take 1.6 s. It is not
wall-clock time, so a busy machine finds the same optimizer as an idle one."""


class NotIdentified(EvidenceError):
    """Raised with a code and parameters that state why no optimizer is named."""

    def __init__(self, code: str, **params: Any) -> None:
        super().__init__(f"the search stopped: {code}")
        self.fields = {"reason_code": code, "reason_params": params}


class BudgetExceeded(NotIdentified):
    """Raised if the search has used its sessions or its time."""


@dataclass(frozen=True)
class TrialOutcome:
    """The result of running one session."""

    agrees: bool
    failure: str | None = None
    """The error that ONNX Runtime raises; None: it returned outputs."""


class OptimizerTrials:
    """Opens sessions one by one and caches their outcomes."""

    def __init__(
        self,
        candidate: TestedFile,
        setup: OrtSetup,
        comparator: OutputComparator,
        *,
        threads: int = 1,
        deterministic: bool = False,
    ) -> None:
        """setup: with the optimizations to test.
        threads, deterministic: as for `session_options`.

        Raises DigestMismatch, StorageError.
        """
        self.setup = setup
        self._threads, self._deterministic = threads, deterministic
        self._model = candidate.loadable()
        self._comparator = comparator
        self._until = time.process_time() + TRIALS_LIMIT_S
        self._outcomes: dict[tuple[str, frozenset[str]], TrialOutcome] = {}
        self.sessions = 0

    def is_correct_without(self, disabled: Set[str]) -> bool:
        """Return whether the outputs are correct with these optimizers disabled.

        Raises BudgetExceeded, EvidenceError.
        """
        return self.outcome(disabled=disabled).agrees

    @property
    def smallest_correct(self) -> frozenset[str] | None:
        """Return the smallest tested set of disabled optimizers with correct outputs, or None.

        Only sets at the setup's own level count.
        """
        correct_sets = [
            disabled
            for (level, disabled), outcome in self._outcomes.items()
            if outcome.agrees and level == self.setup.optimization
        ]
        return min(correct_sets, key=len, default=None)

    def outcome(
        self, *, disabled: Set[str] = frozenset(), level: str | None = None,
        log: list[str] | None = None,
    ) -> TrialOutcome:  # fmt: skip
        """Run a session, or return its cached outcome.

        `log` collects everything that ONNX Runtime logs while it opens. Raises BudgetExceeded, and
        EvidenceError if the provider does not load.
        """
        key = (level or self.setup.optimization, frozenset(disabled))
        if key not in self._outcomes or log is not None:
            self._outcomes[key] = self._run_trial(*key, log)
        return self._outcomes[key]

    def write(self, path: Path, *, disabled: Set[str]) -> None:
        """Write the graph that ONNX Runtime optimizes. Raises the exceptions of `outcome` and its
        own."""
        setup, options = self._open_session(self.setup.optimization, disabled)
        options.optimized_model_filepath = str(path)
        open_session(self._model, options, setup)

    def _run_trial(
        self, level: str, disabled: frozenset[str], log: list[str] | None
    ) -> TrialOutcome:
        setup, options = self._open_session(level, disabled)
        if log is not None:
            enable_verbose_log(options)
        try:
            session = open_session(self._model, options, setup, log=log)
            return TrialOutcome(self._comparator.agrees(lambda feed: _run_session(session, feed)))
        except GateError:
            raise
        except Exception as error:  # ONNX Runtime's errors have no common base
            return TrialOutcome(False, describe_failure(error))

    def _open_session(self, level: str, disabled: Set[str]) -> tuple[OrtSetup, Any]:
        if self.sessions >= SESSIONS:
            raise BudgetExceeded("sessions_spent", count=SESSIONS)
        if time.process_time() > self._until:
            raise BudgetExceeded("time_spent", seconds=TRIALS_LIMIT_S)
        self.sessions += 1
        settings = self.setup.settings
        names = tuple(sorted({*settings.disabled_optimizers, *disabled}))
        setup = replace(
            self.setup,
            optimization=level,
            settings=settings.model_copy(update={"disabled_optimizers": names}),
        )
        return setup, session_options(
            setup, threads=self._threads, deterministic=self._deterministic
        )


def _run_session(session: Any, feed: Mapping[str, OutputArray]) -> dict[str, OutputArray]:
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed), quiet_run()), strict=True))


MAX_BYTES = 512 << 20
"""Largest file whose optimized graphs are written, in bytes; ONNX Runtime writes the weights
too."""

_MAX_NODES = 64


def changed_nodes(
    trials: OptimizerTrials, disabled: Set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the nodes that these optimizers remove from the graph, and those that they add.

    Both list operators with the names of their nodes, at most 64 each.

    Raises the exceptions of `OptimizerTrials.write`, and whatever onnx raises.
    """
    with temporary_folder() as folder:
        without, with_them = Path(folder) / "without.onnx", Path(folder) / "with.onnx"
        trials.write(without, disabled=disabled)
        trials.write(with_them, disabled=frozenset())
        before, after = (
            _nodes(onnx.load(path, load_external_data=False)) for path in (without, with_them)
        )
    return _unmatched(before, after), _unmatched(after, before)


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in nodes_of(model) if node.op_type != "Constant"]


def _unmatched(nodes: list[onnx.NodeProto], reference: list[onnx.NodeProto]) -> tuple[str, ...]:
    """Return descriptions of the nodes without an equal one in `reference`.

    Nodes are compared by the names of their outputs, which the last node of a pattern keeps, or by
    their own names.
    """
    for outputs in (True, False):
        counts = Counter(_key(node, outputs=outputs) for node in reference)
        unmatched = []
        for node in nodes:
            key = _key(node, outputs=outputs)
            if counts[key]:
                counts[key] -= 1
            else:
                unmatched.append(node)
        nodes = unmatched
    return tuple(f"{node.op_type} {node.name}".strip() for node in nodes[:_MAX_NODES])


def _key(node: onnx.NodeProto, *, outputs: bool) -> tuple[object, ...]:
    attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
    names = tuple(node.output) if outputs else (node.name,)
    return node.op_type, node.domain, names, tuple(attributes)


_MAX_ROUNDS = 4
"""Largest number of rounds that disable optimizers which then newly change the graph."""


def _stop_reason(failure: str) -> dict[str, Any]:
    return {"reason_code": "stopped", "reason_params": {"failure": failure}}


def find_faulty_optimizer(trials: OptimizerTrials, *, size_bytes: int) -> OptimizerFault:
    """Find the level, then the smallest set of optimizers that must be disabled, preferring that
    level.

    Of a set of rules, the rule is found. With them disabled, the session computes the model's
    results. Errors are not raised, but returned as the reason why no optimizer is named.

    size_bytes: size of the file; nodes of large files are not compared.
    """
    level = below = raises = None
    names: tuple[str, ...] = ()
    reason: dict[str, Any] = {}
    try:
        log: list[str] = []
        raises = _failure_with_all_enabled(trials, log)
        below, level = _find_levels(trials)
        names, reason = _find_names(trials, optimizers_that_changed(log, at=level), level)
    except NotIdentified as stop:
        reason = stop.fields
    except Exception as error:
        reason = _stop_reason(describe_failure(error))
    fault = OptimizerFault(
        names=names, raises=raises, level=level, below=below, sessions=trials.sessions, **reason
    )
    return _add_nodes(fault, trials, size_bytes) if names else fault


def _failure_with_all_enabled(trials: OptimizerTrials, log: list[str]) -> str | None:
    """Return the error that ONNX Runtime raises with all optimizers enabled, or None.

    `log` collects the log of that session. Raises NotIdentified if the optimizers are not the
    cause.
    """
    without = trials.outcome(level=OPTIMIZATIONS_OFF)
    if not without.agrees:
        if without.failure:
            raise NotIdentified("unoptimized_fails", failure=without.failure)
        raise NotIdentified("unoptimized_off")
    with_all = trials.outcome(log=log)
    if with_all.agrees:
        raise NotIdentified("served_agrees")
    return with_all.failure


def _find_levels(trials: OptimizerTrials) -> tuple[str, str]:
    """Return two consecutive levels; at the lower one, the outputs are correct."""
    setup_level = trials.setup.optimization
    levels = [OPTIMIZATIONS_OFF, *LEVELS[: LEVELS.index(setup_level)], setup_level]
    right, wrong = 0, len(levels) - 1
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if trials.outcome(level=levels[middle]).agrees:
            right = middle
        else:
            wrong = middle
    return levels[right], levels[wrong]


def _find_names(
    trials: OptimizerTrials, first: Sequence[str], level: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the optimizers, and the reason why there may be more than needed.

    first: those that change the graph. Raises NotIdentified.
    """
    try:
        suspects = _sufficient_set(trials, first, level)
        names = minimal_set(suspects, trials.is_correct_without)
        for name in names:
            if name in RULES:
                names = _replace_rules(trials, names, name)
        if trials.is_correct_without(frozenset(names)):
            return names, {}
        # With more disabled, the outputs were correct: the effects are not additive.
        return suspects, {"reason_code": "not_additive"}
    except BudgetExceeded as spent:
        if trials.smallest_correct is None:
            raise
        code = f"{spent.fields['reason_code']}_maybe"
        return tuple(sorted(trials.smallest_correct)), {**spent.fields, "reason_code": code}


def _sufficient_set(trials: OptimizerTrials, first: Sequence[str], level: str) -> tuple[str, ...]:
    """Return a set of optimizers that change the graph, without which the outputs are correct.

    If one is disabled, another may have the same effect. Raises NotIdentified, BudgetExceeded.
    """
    if not first:
        raise NotIdentified("unlogged", level=level)
    disabled = dict.fromkeys(first)
    for _ in range(_MAX_ROUNDS):
        log: list[str] = []
        if trials.outcome(disabled=disabled.keys(), log=log).agrees:
            return tuple(disabled)
        new = [name for name in optimizers_that_changed(log) if name not in disabled]
        if not new:
            break
        disabled.update(dict.fromkeys(new))
    raise NotIdentified("still_wrong", count=len(disabled), level=level)


def _replace_rules(trials: OptimizerTrials, names: Sequence[str], rule_set: str) -> tuple[str, ...]:
    """Replace sets of rules by the rules at fault, if ONNX Runtime accepts their names."""
    rest = frozenset(names) - {rule_set}
    rules = [rule for rule in RULES[rule_set] if rule not in rest]
    if not trials.is_correct_without(rest.union(rules)):
        return tuple(names)
    needed = minimal_set(rules, lambda disabled: trials.is_correct_without(rest | disabled))
    return tuple(name for name in names if name != rule_set) + needed


def _add_nodes(fault: OptimizerFault, trials: OptimizerTrials, size_bytes: int) -> OptimizerFault:
    """Add the nodes that the optimizers replace, or the reason why they are unknown."""
    update: dict[str, Any]
    if size_bytes > MAX_BYTES:
        params = {"limit": MAX_BYTES >> 20}
        update = {"nodes_unread_code": "too_large", "nodes_unread_params": params}
    else:
        try:
            before, after = changed_nodes(trials, frozenset(fault.names))
            update = {"before": before, "after": after}
        except Exception as error:
            failure = {"failure": describe_failure(error)}
            update = {"nodes_unread_code": "stopped", "nodes_unread_params": failure}
    return fault.model_copy(update={**update, "sessions": trials.sessions})


APART_LIMIT_S = 300.0
"""Wall-clock time limit of the whole process, which only a hanging one reaches."""

_ACTIVITY = "disabling optimizers"

_steps = logging.getLogger("gate.steps")


@dataclass(frozen=True)
class TrialSettings:
    """The file to test, and how its outputs are judged."""

    candidate: TestedFile
    limits: DeviationLimits
    bound: float
    """The largest allowed deviation in units of its limits."""
    threads: int
    deterministic: bool


_SETTINGS = TypeAdapter(TrialSettings)

_OutputFiles = list[dict[str, Any]]
"""Fields of each reference output, with file names for arrays."""


def find_optimizer_in_sandbox(
    settings: TrialSettings, references: Sequence[ReferenceOutput]
) -> OptimizerFault:
    """Run `find_faulty_optimizer` in a sandbox and return its result.

    The sandbox gets arrays, but neither the model nor torch. If the process dies or takes too long,
    the result contains that as the reason why no optimizer is named. Raises only KeyboardInterrupt.
    """
    _steps.debug("disabling optimizers of ONNX Runtime")
    limits = SandboxLimits(APART_LIMIT_S, usual_memory())
    try:
        with temporary_folder() as folder:
            arguments = {
                "settings": _SETTINGS.dump_python(settings, mode="json"),
                "output_files": _save_references(references, folder),
                "folder": str(folder),
            }
            child = f"{__name__}:find_in_child"
            result = run_in_sandbox(child, arguments, limits=limits, task=_ACTIVITY)
        return OptimizerFault.from_json(json.dumps(result))
    except LimitExceeded as error:  # the rest of the message is about verdicts
        return OptimizerFault(**_stop_reason(str(error).split(". ")[0]))
    except Exception as error:
        return OptimizerFault(**_stop_reason(describe_failure(error)))


def find_in_child(
    settings: Mapping[str, Any], output_files: _OutputFiles, folder: str
) -> dict[str, Any]:
    """Run `find_faulty_optimizer` in the child process."""
    parsed = _SETTINGS.validate_json(json.dumps(settings))
    references = _load_references(output_files, Path(folder))
    trials = OptimizerTrials(
        parsed.candidate,
        parsed.limits.setup.optimized,
        OutputComparator(references, parsed.limits, bound=parsed.bound),
        threads=parsed.threads,
        deterministic=parsed.deterministic,
    )
    return find_faulty_optimizer(trials, size_bytes=parsed.candidate.subject.size_bytes).to_plain()


def _save_references(references: Sequence[ReferenceOutput], folder: Path) -> _OutputFiles:
    """Write the arrays to files. Raises OSError, and ValueError for unsupported dtypes."""
    numbers = itertools.count()

    def save(arrays: Mapping[str, OutputArray]) -> dict[str, str]:
        # The names of tensors may be invalid as file names.
        names = {name: f"{next(numbers)}.npy" for name in arrays}
        for name, array in arrays.items():
            np.save(folder / names[name], array, allow_pickle=False)
        return names

    return [
        {
            "feed": save(reference.feed),
            "outputs": save(reference.outputs),
            "first": reference.first,
            "truths": None if reference.truths is None else save(reference.truths),
        }
        for reference in references
    ]


def _load_references(entries: _OutputFiles, folder: Path) -> list[ReferenceOutput]:
    def load(files: Mapping[str, str]) -> dict[str, OutputArray]:
        return {name: np.load(folder / file, allow_pickle=False) for name, file in files.items()}

    return [
        ReferenceOutput(
            load(entry["feed"]),
            load(entry["outputs"]),
            entry["first"],
            None if entry["truths"] is None else load(entry["truths"]),
        )
        for entry in entries
    ]
