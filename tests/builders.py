"""Valid records for tests. Each test changes the field under test."""

from __future__ import annotations

from typing import Any

from gate import CheckResult, Decision, Policy, decide
from gate.policy.sections import Bounds, ConfidenceBands, RuntimePolicy
from gate.records.champion_comparison import ChampionAnswers, ChampionComparison
from gate.records.evidence import (
    Dataset,
    Determinism,
    Environment,
    Evidence,
    ExportRecord,
    Latency,
    RuntimeEvidence,
    Source,
    Subject,
    TensorSpec,
)
from gate.records.instruments import (
    GraphFinding,
    GraphReport,
    NoiseParity,
    ProbeResult,
    StabilityParity,
    TraceSearch,
    WeightsReport,
    drawn_batch_sizes,
)
from gate.records.outputs import (
    Accuracy,
    ClassParity,
    Confidence,
    ConfidenceOfClass,
    Crossing,
    Histogram,
    OutputParity,
    RowParity,
    SideAnswer,
    WorstSample,
)
from gate.records.runtime import RUNTIMES, RuntimeName
from gate.storage.digest import Digest

SAMPLES = 400


def digest(text: str) -> Digest:
    """Return the digest of `text`."""
    return Digest.from_bytes(text.encode())


def policy(**overrides: Any) -> Policy:
    """Return a policy with every bound; ort-cpu is always required, CUDA if present."""
    bounds = Bounds(
        max_abs_diff=1e-4,
        mean_abs_diff=1e-5,
        scaled_diff=1e-4,
        l2_logits=1e-3,
        l2_probabilities=1e-3,
        confidence_diff=1e-3,
        confidence_bands=ConfidenceBands(
            over_1_percent=0.0, over_5_percent=0.0, over_10_percent=0.0
        ),
        top1_agreement=1.0,
        top1_lower_bound=0.99,
        top5_agreement=0.99,
        accuracy_drop=0.0,
        noise_ratio=3.0,
        noise_peak=6.0,
        noise_diff=32.0,
        repeatability_ratio=8.0,
        batch_invariance_ratio=16.0,
    )
    runtimes: dict[RuntimeName, RuntimePolicy] = {
        name: RuntimePolicy(required="when_present" if traits.cuda else "always", bounds=bounds)
        for name, traits in RUNTIMES.items()
    }
    return Policy(**{"min_samples": 300, "runtimes": runtimes, **overrides})


def class_parity(**overrides: Any) -> ClassParity:
    """Return full agreement over ten classes."""
    fields: dict[str, Any] = {
        "classes": 10,
        "predicted_classes": 10,
        "top1_agreement": 1.0,
        "top1_disagreements": 0,
        "top5_agreement": 1.0,
        "disagreeing": (),
        "l2_probabilities_mean": 1e-7,
        "l2_probabilities_max": 1e-6,
        "confidence": Confidence(
            mean=1e-8,
            min=0.0,
            max=1e-7,
            bands=(1.0, 0.0, 0.0, 0.0),
            per_class=(ConfidenceOfClass(label=0, samples=SAMPLES, mean=1e-8, max=1e-7),),
        ),
        "accuracy": Accuracy(reference=0.97, candidate=0.97, drop=0.0),
    }
    return ClassParity(**fields | overrides)


def noise_parity(**overrides: Any) -> NoiseParity:
    """Return errors against float64 that are about as large as PyTorch's own float32 errors."""
    fields: dict[str, Any] = {
        "samples": 32,
        "elements": 320,
        "truth_rms": 3.2,
        "reference_rms": 1e-6,
        "candidate_rms": 1.1e-6,
        "ratio": 1.1,
        "peak": 1.3,
        "diff": 1.5,
        "closer": "reference",
    }
    return NoiseParity(**fields | overrides)


def stability_parity(**overrides: Any) -> StabilityParity:
    """Return identical repeated outputs, and small differences between batch sizes."""
    fields: dict[str, Any] = {
        "samples": 8,
        "batch_sizes": (1, 4, 7, 8),
        "repeatability": 0.0,
        "batch_invariance": 2e-6,
        "unit": 4e-6,
        "repeatability_ratio": 0.0,
        "batch_invariance_ratio": 0.5,
    }
    return StabilityParity(**fields | overrides)


def probe_parity(name: str = "zeros", **overrides: Any) -> ProbeResult:
    """Return a probe on which the runtime matches the model."""
    fields: dict[str, Any] = {
        "name": name,
        "kind": "value",
        "batch_size": 1,
        "noise_ratio": 1.2,
        "relative_diff": 3e-7,
    }
    return ProbeResult(**fields | overrides)


def row_parity(**overrides: Any) -> RowParity:
    """Return rows of probabilities with tiny differences."""
    fields: dict[str, Any] = {
        "cosine_distance": 1e-12,
        "confidence_diff": 1e-7,
        "bands": (1.0, 0.0, 0.0, 0.0),
        "sum_diff": 1e-7,
        "sum_error": 1e-7,
    }
    return RowParity(**fields | overrides)


def output_parity(**overrides: Any) -> OutputParity:
    """Return the parity of a correct float32 export."""
    fields: dict[str, Any] = {
        "name": "logits",
        "dtype": "float32",
        "samples": SAMPLES,
        "elements": SAMPLES * 10,
        "nonfinite_reference": 0,
        "nonfinite_mismatched": 0,
        "reference_constant": False,
        "reference_abs_max": 12.0,
        "reference_std": 3.0,
        "max_abs_diff": 1.7e-5,
        "max_abs_diff_sample": 3,
        "mean_abs_diff": 1e-6,
        "scaled_diff": 6e-6,
        "l2_mean": 1e-5,
        "l2_max": 5e-5,
        "classification": class_parity(),
        "noise": noise_parity(),
        "stability": stability_parity(),
    }
    return OutputParity(**fields | overrides)


def graph_report(**overrides: Any) -> GraphReport:
    """Return a report with no finding that the default policy forbids."""
    fields: dict[str, Any] = {
        "nodes": 49,
        "initializers": 42,
        "operators": {"Add": 8, "Conv": 20, "Relu": 17, "Gemm": 4},
        "findings": (
            GraphFinding(
                code="opset",
                place="opset_import",
                detail_code="old_opset",
                detail_params={"version": 12, "oldest": 13},
            ),
        ),
        "weights": WeightsReport(
            constants=42, matched={"as it is": 2, "folded": 40}, unmatched=0, absent=0
        ),
    }
    return GraphReport(**fields | overrides)


def runtime_evidence(name: RuntimeName = "ort-cpu", **overrides: Any) -> RuntimeEvidence:
    """Return a runtime whose provider, options and node placement match its name."""
    traits = RUNTIMES[name]
    options: dict[str, str] = {}
    nodes: dict[str, int] = {}
    if traits.optimization is not None:
        options["graph_optimization_level"] = traits.optimization
        nodes[traits.provider] = 49
        if traits.cuda:
            options |= policy().cuda_provider.provider_options(tf32=False)
    fields: dict[str, Any] = {
        "runtime": name,
        "provider_requested": traits.provider,
        "providers_active": (traits.provider,),
        "nodes_per_provider": nodes,
        "session_options": options,
        "outputs": (output_parity(),),
        "latency": Latency(batch_size=32, batches=13, median_ms=20.0, p95_ms=25.0),
        "probes": (
            *(
                probe_parity(f"batch_{n}", kind="batch", batch_size=n)
                for n in (1, 4, 7, *drawn_batch_sizes(digest("model.onnx"), (1, 4, 7)))
            ),
            probe_parity("zeros"),
            probe_parity(
                "size_9x9",
                kind="size",
                noise_ratio=None,
                relative_diff=None,
                inapplicable="RuntimeError: the input is too small",
            ),
        ),
    }
    return RuntimeEvidence(**fields | overrides)


def absent(name: RuntimeName) -> RuntimeEvidence:
    """Return a runtime whose device is not on this machine."""
    return RuntimeEvidence(
        runtime=name,
        provider_requested=RUNTIMES[name].provider,
        absent_reason="no CUDA device",
    )


def evidence(**overrides: Any) -> Evidence:
    """Return evidence with CPU runtimes measured and CUDA runtimes absent."""
    fields: dict[str, Any] = {
        "subject": Subject(
            sha256=digest("model.onnx"),
            size_bytes=44_000_000,
            opset=13,
            producer="pytorch 2.15.0",
            inputs=(TensorSpec(name="input", dtype="float32", shape=("batch", 3, 64, 64)),),
            outputs=(TensorSpec(name="logits", dtype="float32", shape=("batch", 10)),),
        ),
        "source": Source(factory="torchvision:resnet18", checkpoint_sha256=digest("checkpoint")),
        "dataset": Dataset(sha256=digest("data"), samples=SAMPLES, labelled=True),
        "export": ExportRecord(strategy="traced", settings={"opset": 13, "dynamo": False}),
        "environment": Environment(
            versions={"torch": "2.15.0", "onnxruntime": "1.31.1"},
            cpu="test",
            determinism=Determinism(
                tf32_matmul=False,
                tf32_cudnn=False,
                cudnn_deterministic=True,
                cudnn_benchmark=False,
                grad=False,
                seed=0,
                threads=2,
            ),
        ),
        "runtimes": tuple(
            absent(name) if traits.cuda else runtime_evidence(name)
            for name, traits in RUNTIMES.items()
        ),
        "graph": graph_report(),
        "trace_search": TraceSearch(tried=7),
        "measured_at": "2026-01-01T00:00:00+00:00",
    }
    return add_drawn_probes(Evidence(**fields | overrides))


def judge(evidence: Evidence, *, by: Policy | None = None, **fields: Any) -> Decision:
    """Decide on evidence by a policy; by default by `policy` with these fields."""
    return decide(by or policy(**fields), evidence, decided_at="2026-01-01T00:00:00+00:00")


def find_check(decision: Decision, name: str, runtime: str | None = "ort-cpu") -> CheckResult:
    """Return the only check of this name and runtime."""
    (check,) = [c for c in decision.checks if (c.name, c.runtime) == (name, runtime)]
    return check


def with_outputs(*outputs: OutputParity, **overrides: Any) -> Evidence:
    """Return valid evidence with these outputs in the file and in each measured runtime."""
    base = evidence(**overrides)
    (spec,) = base.subject.outputs
    specs = tuple(spec.model_copy(update={"name": output.name}) for output in outputs)
    runtimes = tuple(
        each.model_copy(update={"outputs": outputs}) if each.outputs else each
        for each in base.runtimes
    )
    subject = base.subject.model_copy(update={"outputs": specs})
    return base.model_copy(update={"subject": subject, "runtimes": runtimes})


def add_sample_details(measured: Evidence) -> Evidence:
    """Add per-sample details: difference counts, the worst sample, threshold crossings at 0.5, and
    the confidence of both sides by class."""
    return measured.model_copy(
        update={
            "runtimes": tuple(
                runtime.model_copy(
                    update={"outputs": tuple(map(_add_details_to_output, runtime.outputs))}
                )
                for runtime in measured.runtimes
            )
        }
    )


def _add_details_to_output(output: OutputParity) -> OutputParity:
    classes, answer = output.classification, SideAnswer(top1=3, probability=0.75, margin=1.5)
    assert classes is not None
    by_class = tuple(
        item.model_copy(
            update={"signed_mean": -1e-8, "reference_mean": 0.75, "candidate_mean": 0.75 - 1e-8}
        )
        for item in classes.confidence.per_class
    )
    confidence = classes.confidence.model_copy(update={"per_class": by_class})
    crossing = Crossing(threshold=0.5, samples=output.samples, reference_above=300,
                        candidate_above=299, crossed=1, crossing=(7,))  # fmt: skip
    worst = WorstSample(sample=3, max_abs_diff=1.7e-5, label=3, reference=answer, candidate=answer)
    counts = (output.elements - 200, 100)
    return output.model_copy(
        update={
            "classification": classes.model_copy(
                update={"confidence": confidence, "crossings": (crossing,)}
            ),
            "differences": Histogram(zeros=100, first=-80, counts=counts),
            "worst": (worst,),
        }
    )


def incumbent(**overrides: Any) -> ChampionComparison:
    """Return a comparison in which version 3 serves, is slightly more accurate than `evidence()`,
    and as fast."""
    batch = Latency(batch_size=32, batches=13, median_ms=20.0, p95_ms=25.0)
    fields: dict[str, Any] = {
        "state": "compared",
        "version": "3",
        "sha256": digest("champion.onnx"),
        "evidence_sha256": digest("evidence of the champion"),
        "subject_sha256": digest("model.onnx"),
        "data_sha256": digest("data"),
        "samples": SAMPLES,
        "outputs": (
            ChampionAnswers(
                name="logits",
                samples=SAMPLES,
                disagreements=4,
                champion_accuracy=0.97,
                accuracy=0.965,
            ),
        ),
        "champion_latency": batch,
        "latency": batch.model_copy(update={"median_ms": 22.0}),
        "champion_noise_ratio": 1.0,
        "noise_ratio": 1.1,
    }
    return ChampionComparison(**fields | overrides)


def add_drawn_probes(measured: Evidence) -> Evidence:
    """Add a probe of the batch size drawn from the file's digest to each runtime that has
    probes."""
    size, _ = drawn_batch_sizes(measured.subject.sha256, policy().instruments.probe_batch_sizes)
    probe = probe_parity(f"batch_{size}", kind="batch", batch_size=size)
    runtimes = tuple(
        runtime.model_copy(update={"probes": (*runtime.probes, probe)})
        if runtime.probes and all(item.batch_size != size for item in runtime.probes)
        else runtime
        for runtime in measured.runtimes
    )
    return measured.model_copy(update={"runtimes": runtimes})
