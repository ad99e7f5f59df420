"""Which layer of a file diverges first from its model, and why."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from gate.errors import EvidenceError, GateError, PolicyError, describe_failure
from gate.localisation.bench import BUDGET, Bench
from gate.localisation.finder import Finder
from gate.localisation.findings import Findings
from gate.localisation.graph import FileGraph
from gate.localisation.layout import Layout
from gate.localisation.listeners import AnotherWay
from gate.localisation.matching import ValueMatcher
from gate.localisation.measuring import Measured, Measuring
from gate.localisation.names import Paths
from gate.localisation.optimisers.answers import right_answers
from gate.localisation.optimisers.apart import Inquiry, blame_apart
from gate.localisation.sides import ModelSide
from gate.localisation.telling import tell
from gate.localisation.values import Survey
from gate.localisation.verdicts import Limits
from gate.onnxfile.candidate import Candidate
from gate.parity.arrays.samples import Samples
from gate.parity.case import Case
from gate.parity.runners.determinism import deterministic
from gate.parity.runners.torch_runner import private_copy
from gate.policy.ort_options import OrtSetup
from gate.policy.policy import Policy
from gate.policy.runtimes import ort_setup
from gate.records.localisation import Localisation, OptimiserBlame
from gate.records.runtime import RUNTIMES, RuntimeName
from gate.runtimes.runtime import Batch

MATCHED = 2
"""Samples on which tensors are matched and the float64 reference runs."""
_steps = logging.getLogger("gate.steps")


def locate(
    case: Case,
    *,
    runtime: RuntimeName,
    limit: int = 8,
    refused: Collection[RuntimeName] = (),
    beyond: Samples | None = None,
) -> Localisation:
    """Compare every layer of the file in `runtime` with the modules of the model.

    On the first `limit` samples; of a file with a fixed batch axis on whole batches. `refused`: by
    the policy. Where `runtime` is, an optimiser may be to blame for less than what is a divergence
    here; where the same without optimisations is, none is. `beyond`: inputs of the samples' shapes
    that are compared in their place; the samples, which agree, only say which tensor is which
    value. The model and all global switches are afterwards as they were.

    Raises PolicyError for a runtime that the policy does not name, InputMismatch and DataError for
    samples that don't fit, ModelError and EvidenceError where the model or the file can't compute
    them or nothing can be matched, or the runtime shows no tensors, DigestMismatch if the file is
    not the one that `candidate.subject` describes.
    """
    candidate, samples, policy = case.candidate, case.inputs, case.policy
    setup = _setup(policy, runtime)
    binding = case.bind(batch_size=MATCHED)
    size = binding.batch_size
    wanted = -(-limit // size) * size if binding.fixed else limit
    taken = next(samples.batches(min(wanted, len(samples))))
    with _switched(policy):
        graph = FileGraph(candidate)
        side = ModelSide(private_copy(case.model, device="cpu", double=binding.double), binding)
        first = {name: array[:size] for name, array in taken.items()}
        survey = side.survey(first)
        step = size if binding.fixed else _step(survey, size, BUDGET)
        rest = [
            {name: array[start : start + step] for name, array in taken.items()}
            for start in range(size, _count(taken), step)
        ]
        bench = Bench(side, graph, [first, *rest], binding.pairs, policy, BUDGET)
        matcher = _matcher(bench, survey)
        try:
            layout = Finder(bench, survey, matcher).find()
            _check_matched(survey, layout.matching.tensors, matcher.folded)
            if beyond is not None:
                bench = replace(bench, batches=list(beyond.batches(size)))
                survey, before = side.survey(bench.batches[0]), survey
                matcher = _matcher(bench, survey)
                layout = Finder(bench, survey, matcher).find(_still(layout, before, survey))
            measured = _measured(bench, survey, layout, setup)
            limits = Limits(
                runtime,
                setup,
                float64=measured.noise_unmeasured is None,
                reduced=policy.precision == "reduced",
                plain_refused=any(_is_plain(policy, name, setup) for name in refused),
            )
            finer = runtime in refused or any(map(limits.is_source, measured.layers.values()))
            doubt = limits.doubt(measured.whole, refused=finer)
            blamed = _blame(bench, survey, limits, candidate=candidate, bound=doubt)
        except GateError:
            raise
        except Exception as error:  # of ONNX Runtime, without a common base
            raise EvidenceError(
                f"{candidate.path.name} can't compute the samples layer by layer: "
                f"{describe_failure(error)}. If the whole file can, it is of another model: give "
                "the factory and the checkpoint that it was exported from."
            ) from error
    candidate.verify()
    _check_finite(measured)
    findings = Findings(survey, graph, layout, measured, matcher.folded, matcher.constants)
    return tell(findings, side.model, limits, candidate.subject, blame=blamed)


def _matcher(bench: Bench, survey: Survey) -> ValueMatcher:
    side, batch = bench.side, bench.batches[0]
    return ValueMatcher(
        survey,
        bench.graph,
        Paths(side.model),
        inputs=[name for name, _ in bench.names],
        constants=lambda: side.constants(batch, survey),
    )


def _still(layout: Layout, before: Survey, survey: Survey) -> Layout:
    """What the samples, `before`, say of the values of another input: all but those that are one
    value on the samples and two here, as what a limit gets and returns.

    Raises AnotherWay where the model takes another way.
    """
    if before.paths != survey.paths or before.at != survey.at:
        raise AnotherWay("the model makes other calls on this input than on the samples.")
    apart = [v for v in before.values if v.repeats != survey.values[v.number].repeats]
    unsure = {number for value in apart for number in (value.number, value.repeats)}
    return layout.only({value.number for value in survey.values} - unsure)


def _setup(policy: Policy, runtime: RuntimeName) -> OrtSetup:
    """Raises EvidenceError for a runtime that shows no tensor but the file's outputs."""
    named = {*RUNTIMES, *policy.runtimes}
    if runtime not in named:
        raise PolicyError(
            f"the policy names no runtime '{runtime}'; there are {', '.join(sorted(named))}. Give "
            "the policy that has it: --policy FILE."
        )
    setup = ort_setup(policy, runtime)
    if setup is None:
        raise EvidenceError(
            f"{runtime} gives no intermediate tensors, so its layers can't be compared. Look at "
            "the same file in ort-cpu: gate locate --runtime ort-cpu."
        )
    return setup


def _is_plain(policy: Policy, runtime: RuntimeName, setup: OrtSetup) -> bool:
    """Whether the runtime is that of `setup` with optimisations off."""
    other = ort_setup(policy, runtime)
    return other is not None and other == other.plain and other.providers == setup.providers


def _measured(bench: Bench, survey: Survey, layout: Layout, setup: OrtSetup) -> Measured:
    """All samples in the runtime; where its optimisations break the pieces of the file, without
    them; where a batch of another size does not fit the tensors, the first samples."""
    setups = [setup] if setup.plain == setup else [setup, setup.plain]
    benches = [bench] if len(bench.batches) == 1 else [bench, bench.first]
    attempts = [(some, each) for some in benches for each in setups]
    for some, each in attempts[:-1]:
        try:
            return Measuring(some, survey, layout, each, optimised=setup.optimised).run()
        except GateError:
            raise
        except Exception:  # of ONNX Runtime, without a common base
            _steps.debug("comparing layers again, in another way")
    some, each = attempts[-1]
    return Measuring(some, survey, layout, each, optimised=setup.optimised).run()


def _blame(
    bench: Bench, survey: Survey, limits: Limits, *, candidate: Candidate, bound: float | None
) -> OptimiserBlame | None:
    """Which optimiser it is, where optimisations are in doubt: where there is a bound."""
    if bound is None:
        return None
    try:
        right = right_answers(bench, survey)
    except Exception as error:
        return OptimiserBlame(reason=describe_failure(error))
    inquiry = Inquiry(
        candidate=replace(candidate, path=candidate.path.resolve()),
        limits=limits,
        bound=bound,
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return blame_apart(inquiry, right)


@contextmanager
def _switched(policy: Policy) -> Iterator[None]:
    """The policy's switches; tensors with versions, because in-place operations are told by them;
    attention by its ordinary operators, because the fused ones call no modules."""
    fused = torch.backends.mha.get_fastpath_enabled()
    with deterministic(policy.determinism), torch.inference_mode(False), torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _step(survey: Survey, size: int, budget: int) -> int:
    """Samples a batch, so that all values of a batch fit the budget with the file's."""
    each = sum(value.nbytes for value in survey.values) / size
    return max(1, int(budget // max(1.0, 2 * each)))


def _count(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _check_finite(measured: Measured) -> None:
    """Raises EvidenceError if the model has nothing to compare an output with."""
    for name, output in measured.marked.items():
        if not output.finite:
            raise EvidenceError(
                f"the model returns no finite number for output '{name}' on {measured.samples} "
                "samples: nothing can be compared. Give samples on which it does."
            )


def _check_matched(
    survey: Survey, tensors: Mapping[int, object], folded: Mapping[int, int]
) -> None:
    """Raises EvidenceError if no call of a module has a tensor in the file."""
    calls = [
        value.number
        for value in survey.values
        if not value.functional
        and value.repeats is None
        and value.number not in (*survey.inputs, *folded)
    ]
    if calls and not any(number in tensors for number in calls):
        kinds = sorted({survey.values[number].kind for number in calls})
        raise EvidenceError(
            f"mapped 0 of {len(calls)} module calls ({', '.join(kinds[:5])}): no tensor of the "
            "file has the shape and the name, operator or values of any of them. Give the "
            "factory and the checkpoint of the model that the file was exported from."
        )
