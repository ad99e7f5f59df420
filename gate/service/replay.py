"""Replay the golden vectors of a deployed model through the servers that have it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace

from gate.deploy.deploy import rollback_deployment
from gate.deploy.store import EXACT, ModelStore, Slot
from gate.errors import EvidenceError, GateError, RuntimeUnusable
from gate.golden.folder import Vectors, read_golden
from gate.golden.tolerance import widen_tolerances
from gate.golden.verify import compare
from gate.policy.policy import Policy
from gate.policy.runtime_options import servers_of
from gate.records.evidence import TensorSpec
from gate.records.runtime import RuntimeName
from gate.registry.registered_model import RegisteredModel
from gate.runtimes.server import ServedFile, ServerSession
from gate.runtimes.v2_protocol import ServerOptions
from gate.sandbox.limits import SandboxLimits
from gate.service.monitoring import Failed, StepResult
from gate.storage.arrays import RuntimeArray


@dataclass
class ReplayState:
    """The state of replaying the golden vectors of one release."""

    release: int | None
    is_complete: bool = False
    """True once every server returned correct outputs."""
    suspects: dict[RuntimeName, float] = field(default_factory=dict)
    """The servers that returned wrong outputs or refused, and the time of the first observation."""
    proven: set[RuntimeName] = field(default_factory=set)
    """The servers that returned correct outputs at least once."""


def replay_golden(
    model: RegisteredModel,
    store: ModelStore,
    policy: Policy,
    *,
    state: ReplayState,
    limits: SandboxLimits | None = None,
) -> list[StepResult | Failed]:
    """Replay the golden vectors of the deployed release on each server of the policy.

    If outputs differ, or the server refuses the inputs, in two observations, the deployment is
    rolled back. `state`: of this release; its suspects are updated. A server may consist of
    replicas that load the release one by one, so the second observation counts only after the pause
    of the model's `MismatchMemory`. A refusal by a server that returned correct outputs before does
    not count: the server itself is broken.

    A server that is unreachable, or has not loaded the file yet, gives a Failed, and the next
    reconcile retries. Raises StorageError, EvidenceError and DigestMismatch if the vectors of the
    store are damaged.
    """
    history = model.history()
    entry = None if history.serving is None else history.approving_entry(history.serving)
    last = None if entry is None else history.deployment_of(entry)
    live = store.live(model.key)
    if entry is None or last is None or last.action != "deployed" or live is None:
        return []
    slot = live.slots[EXACT]
    if slot.sha256 != entry.sha256:
        return []
    results: list[StepResult | Failed] = []
    memory = model.reading.mismatches
    for name in servers_of(policy):
        try:
            problem, is_refused = _problem(store, slot, policy, name)
        except GateError as error:
            results.append(Failed("replay", error))
            continue
        if problem is None:
            state.proven.add(name)
            state.suspects.pop(name, None)
            continue
        reason = (
            f"the server '{name}' does not reproduce the golden vectors: {problem.rstrip('.')}."
        )
        if is_refused and name in state.proven:
            results.append(Failed("replay", EvidenceError(reason)))
            continue
        now, first = memory.clock(), state.suspects.get(name)
        if first is None or now - first < memory.pause_s:
            state.suspects.setdefault(name, now)
            results.append(Failed("replay", EvidenceError(reason)))
            continue
        rollback = rollback_deployment(store, model.key, limits=limits)
        reason += " " if rollback.outcome == "rolled_back" else " It stays: "
        reason += rollback.reason
        model.write("replay_failed", reason, version=entry.version, about=entry)
        return [*results, StepResult("replay", rollback.outcome, entry.version, reason)]
    return results


def _problem(
    store: ModelStore, slot: Slot, policy: Policy, name: RuntimeName
) -> tuple[str | None, bool]:
    """Return how the outputs of a server differ, or None, and whether a server that has the file
    refuses inputs that the file accepts. Raises RuntimeUnusable or DigestMismatch if there is no
    answer or the server has another file."""
    if slot.golden_sha256 is None or slot.parts:
        reason = "has no golden vectors" if slot.golden_sha256 is None else "has several parts"
        raise RuntimeUnusable(f"{slot.model.name} {reason}, so '{name}' can't replay them.")
    vectors = read_golden(store.content(slot.golden_sha256), sha256=slot.golden_sha256)
    options = ServerOptions.model_validate(policy.runtimes[name].options)
    try:
        outputs = _outputs(vectors, options)
    except RuntimeUnusable:
        raise
    except EvidenceError as error:
        return str(error), True
    golden = widen_tolerances(vectors.golden, policy, name)
    computed = dict(zip([each.name for each in golden.outputs], outputs, strict=True))
    results = compare(replace(vectors, golden=golden), computed)
    problems = [f"output '{r.name}': {r.problem}" for r in results if r.problem]
    return "; ".join(problems) or None, False


def _outputs(vectors: Vectors, options: ServerOptions) -> list[RuntimeArray]:
    """Return the outputs of a server. Raises the exceptions of `ServerSession`, and RuntimeUnusable
    if the server refuses the batch but not a single sample."""
    golden = vectors.golden
    inputs, outputs = (
        [TensorSpec(name=each.name, dtype=each.dtype, shape=each.shape) for each in tensors]
        for tensors in (golden.inputs, golden.outputs)
    )
    served = ServedFile(golden.model.sha256, inputs, outputs, golden.batch_axes)
    with closing(ServerSession(served, options, vectors.inputs)) as session:
        try:
            return session.run(vectors.inputs)
        except RuntimeUnusable:
            raise
        except EvidenceError as error:
            session.run(served.parts(vectors.inputs, 1)[0])
            raise RuntimeUnusable(
                f"it answers a single sample, and not all golden inputs in one request: {error} "
                "If its batches are limited, state that (options: max_batch_size)."
            ) from error
