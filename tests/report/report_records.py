"""Reports and their records: passed, waiting for review, rejected, ERROR, and malicious names."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

from PIL import Image

from gate import CheckResult, Evidence, Localization, Verdict, decide
from gate.records.evidence import Cost, Latency
from gate.records.localization import Explanation, LayerRow
from gate.records.outputs import Confidence, ConfidenceOfClass, Histogram, SideAnswer, WorstSample
from gate.records.preprocessing import (
    ChannelDifference,
    ConsumerParity,
    Decisions,
    PreprocessingParity,
    TensorSummary,
)
from gate.records.runtime import RUNTIMES
from gate.report.html_page import Report
from gate.summary.summarize import check_row, summarize
from gate.summary.summary import Change, ChangeRow, CheckRow, Finding, Headline, Step
from tests.builders import (
    absent,
    class_parity,
    digest,
    evidence,
    noise_parity,
    output_parity,
    policy,
    probe_parity,
    runtime_evidence,
)

LAYER = "layer3.0.conv1"
HOSTILE = 'x"><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{$ `{{ 7*7 }}` &amp;</style>\x1b[31m'
UNJUDGED = (
    "Could not judge: all 400 samples give the same answer, so agreement of 100 % proves nothing."
)
BLAMED = (
    "layer3.0.conv1.weight is the model's rounded to float16: 33.7 × rounding, allowed 1.67 "
    "(1.5, widened for 320 elements)."
)
CPU = ("ort-cpu", "ort-cpu-optimized")


def passed() -> Report:
    """Return a report within every bound; CUDA is waived."""
    observed = _evidence(wrong=False)
    judged = decide(policy(), observed, decided_at="2026-03-04T17:15:00+00:00")
    assert judged.passed
    headline = Headline(
        verdict=Verdict.PASS,
        cause="passed",
        sentence="Passed: computes what the PyTorch model computes, 1.1 × rounding where 3 is "
        "allowed, on 400 samples with ort-cpu and ort-cpu-optimized.",
    )
    step = Step(label="Promote it", command="gate promote model.onnx --name resnet-digits")
    return Report(
        _summary(headline, judged, observed, steps=(step,)), observed, judged, pictures=pictures()
    )


def waiting() -> Report:
    """Return a passed report that waits for a reviewer."""
    case = passed()
    headline = Headline(
        verdict=Verdict.PASS,
        cause="passed",
        sentence="Passed, waits for review: 1.1 × rounding where 3 is allowed, on 400 samples.",
    )
    step = Step(
        label="Approve: set the tag gate.review of version 12 to approved",
        address="#/models/resnet-digits/versions/12",
    )
    summary = case.summary.model_copy(update={"headline": headline, "steps": (step,)})
    return replace(case, summary=summary)


def rejected() -> Report:
    """Return a report of a file with one layer rounded to float16: 26 checks in three findings."""
    observed = _evidence(wrong=True)
    judged = decide(policy(), observed, decided_at="2026-03-04T17:15:00+00:00")
    assert judged.verdict is Verdict.FAIL
    problems = judged.problems
    noise = tuple(c for c in problems if c.name.startswith("noise_"))
    probes = tuple(c for c in problems if c.name.startswith("probe_"))
    rest = tuple(c for c in problems if c not in (*noise, *probes))
    findings = (
        Finding(
            cause="layer",
            verdict=Verdict.FAIL,
            title=f"{LAYER}.weight is rounded to float16",
            sentence=f"Every number from {LAYER} on is 33.7 times farther off than rounding.",
            remedy="Export from the float32 weights: model.float() before gate export.",
            checks=noise,
        ),
        Finding(
            cause="layer",
            verdict=Verdict.FAIL,
            title="Probes disagree as the samples do",
            sentence="The same fault in every probe of both runtimes.",
            checks=probes,
        ),
        Finding(
            cause="numbers",
            verdict=Verdict.FAIL,
            title="Differences beyond their bounds",
            sentence="The answers themselves moved by more than the policy allows.",
            remedy="Mend the layer first.",
            checks=rest,
        ),
    )
    headline = Headline(
        verdict=Verdict.FAIL,
        cause="layer",
        blamed=f"{LAYER}.weight",
        sentence=BLAMED,
        remedy="Export from the float32 weights.",
    )
    steps = (
        Step(
            label="Export again, from the float32 weights",
            command="gate export torchvision.models:resnet18 --checkpoint models/model.safetensors "
            "--output model.onnx",
        ),
        Step(label="See each layer", command="gate locate model.onnx --reference torchvision.models:resnet18 --inputs samples.npy"),
    )  # fmt: skip
    summary = _summary(headline, judged, observed, findings=findings, steps=steps)
    return Report(summary, observed, judged, Explanation(localisation=_layers()), pictures())


def rejected_on_all_runtimes() -> Report:
    """Return a rejected report with all five runtimes and the longest headline."""
    case = rejected()
    measured = case.evidence.runtimes[0]
    runtimes = tuple(measured.model_copy(update={"runtime": name}) for name in RUNTIMES)
    observed = case.evidence.model_copy(update={"runtimes": runtimes})
    judged = decide(policy(), observed, decided_at="2026-03-04T17:15:00+00:00")
    headline = case.summary.headline.model_copy(
        update={
            "sentence": "backbone.encoder.layers.11.attention.output.dense.weight has other values "
            "in 4 096 of 589 824 elements than the checkpoint: 1.2e+04 × rounding, allowed 1.5"
        }
    )
    summary = _summary(
        headline, judged, observed, findings=case.summary.findings, steps=case.summary.steps
    )
    return Report(summary, observed, judged, case.explanation, pictures())


def unjudged() -> Report:
    """Return a report whose samples prove nothing."""
    observed = _evidence(wrong=False)
    constant = {"reference_constant": True}
    runtimes = tuple(
        each.model_copy(
            update={"outputs": tuple(item.model_copy(update=constant) for item in each.outputs)}
        )
        for each in observed.runtimes
    )
    observed = observed.model_copy(update={"runtimes": runtimes})
    judged = decide(policy(), observed, decided_at="2026-03-04T17:15:00+00:00")
    assert judged.verdict is Verdict.ERROR
    finding = Finding(
        cause="samples",
        verdict=Verdict.ERROR,
        title="The samples prove nothing",
        sentence="All samples have the same reference output.",
        remedy="Evaluate on real, varied samples.",
        checks=judged.problems,
    )
    headline = Headline(
        verdict=Verdict.ERROR,
        cause="samples",
        sentence=UNJUDGED,
        remedy="Evaluate on real, varied samples with trained weights.",
    )
    step = Step(label="Judge again on varied samples", command="gate check model.onnx --reference torchvision.models:resnet18 --inputs varied.npy")  # fmt: skip
    absent_change = Change(absent="no champion serves under this name yet")
    summary = _summary(headline, judged, observed, findings=(finding,), steps=(step,))
    return Report(summary.model_copy(update={"change": absent_change}), observed, judged)


def hostile() -> Report:
    """Return a report in which every external text is malicious."""
    case = rejected()
    observed = case.evidence
    runtimes = tuple(
        r.model_copy(
            update={
                "outputs": tuple(o.model_copy(update={"name": HOSTILE}) for o in r.outputs),
                "absent_reason": r.absent_reason and HOSTILE,
            }
        )
        for r in observed.runtimes
    )
    observed = observed.model_copy(
        update={
            "runtimes": runtimes,
            "source": observed.source.model_copy(update={"factory": HOSTILE}),
            "environment": observed.environment.model_copy(update={"cpu": HOSTILE}),
            "subject": observed.subject.model_copy(update={"producer": HOSTILE}),
            "preprocessing": _preprocessing(HOSTILE),
        }
    )
    judged = decide(policy(), observed, decided_at=HOSTILE)
    headline = Headline(
        verdict=Verdict.FAIL, cause="layer", blamed=HOSTILE, sentence=HOSTILE, remedy=HOSTILE
    )
    finding = Finding(
        cause="layer", verdict=Verdict.FAIL, title=HOSTILE, sentence=HOSTILE, remedy=HOSTILE,
        checks=judged.problems,
    )  # fmt: skip
    step = Step(label=HOSTILE, command=HOSTILE, address=f"javascript:alert('{HOSTILE}')")
    summary = _summary(headline, judged, observed, findings=(finding,), steps=(step,))
    row = ChangeRow(name=HOSTILE, before=HOSTILE, now=HOSTILE, changed=True)
    summary = summary.model_copy(
        update={
            "change": Change(version=HOSTILE, rows=(row,)),
            "notes": (HOSTILE,),
            "subject": summary.subject.model_copy(
                update={"name": HOSTILE, "signed_by": HOSTILE, "machine": HOSTILE}
            ),
        }
    )  # fmt: skip
    result = _layers(HOSTILE)
    return Report(summary, observed, judged, Explanation(localisation=result), pictures())


def pictures() -> dict[int, bytes]:
    """Return thumbnails of the worst samples."""
    created = {}
    for index in range(8):
        stream = io.BytesIO()
        Image.linear_gradient("L").rotate(40 * index).resize((64, 64)).save(stream, "PNG")
        created[17 * index + 3] = stream.getvalue()
    return created


def _summary(headline, judged, measured, *, findings=(), steps=()):
    rows = (
        ChangeRow(name="accuracy", before="0.9712", now="0.9711", changed=True, sense="worse"),
        ChangeRow(name="noise_ratio", before="1.2", now="1.1", changed=True, sense="better"),
        ChangeRow(name="latency, ort-cpu", before="21.2 ms", now="20.0 ms", changed=True, sense="better"),
        ChangeRow(name="versions", before="torch 2.14.0", now="torch 2.15.0", changed=True),
        ChangeRow(name="opset", before="13", now="13", changed=False),
        ChangeRow(name="policy", before="sha256:1234", now="sha256:1234", changed=False),
    )  # fmt: skip
    change = Change(version="11", sha256=digest("before"), rows=rows)
    summary = summarize(judged, measured, change=change).about(name="resnet-digits")
    update = {"headline": headline, "findings": findings, "steps": steps}
    return summary.signed("release-2026 (ed25519 4f1c…)").model_copy(update=update)


def word(check: CheckResult) -> CheckRow:
    return check_row(check, evidence())


def _evidence(*, wrong: bool) -> Evidence:
    def output(scale: float) -> Any:
        noise = (
            {"ratio": 33.7, "peak": 41.0, "diff": 88.0, "candidate_rms": 3.4e-5} if wrong else {}
        )
        numbers = {"max_abs_diff": 6e-4, "mean_abs_diff": 3e-5, "l2_max": 2e-3, "scaled_diff": 2e-4}
        per_class = tuple(
            ConfidenceOfClass(
                label=label, samples=40, mean=abs(shift), max=2 * abs(shift), signed_mean=shift,
                reference_mean=0.97 - 0.01 * label, candidate_mean=0.97 - 0.01 * label + shift,
            )
            for label in range(10)
            for shift in [scale * 1e-7 * (label - 4) * (300 if wrong else 1)]
        )  # fmt: skip
        worst = tuple(
            WorstSample(
                sample=17 * index + 3,
                max_abs_diff=(6e-4 if wrong else 1.7e-5) / (index + 1),
                label=index % 10,
                reference=SideAnswer(top1=index % 10, probability=0.93 - 0.05 * index, margin=2.1),
                candidate=SideAnswer(top1=9 if wrong and index == 0 else index % 10, probability=0.92 - 0.05 * index, margin=1.9),
            )
            for index in range(8)
        )  # fmt: skip
        counts = tuple(round(900 * math.exp(-(((index - 20) / 7) ** 2))) for index in range(40))
        return output_parity(
            noise=noise_parity(**noise),
            classification=class_parity(
                confidence=Confidence(mean=1e-7, min=0.0, max=3e-7, bands=(1.0, 0.0, 0.0, 0.0), per_class=per_class)
            ),
            differences=Histogram(zeros=120, first=-88 + (20 if wrong else 0), counts=counts),
            worst=worst,
            **(numbers if wrong else {}),
        )  # fmt: skip

    probes = runtime_evidence("ort-cpu").probes
    if wrong:
        probes = tuple(
            p if p.inapplicable else p.model_copy(update={"noise_ratio": 60.0 + index})
            for index, p in enumerate(probes)
        )
        probes += tuple(probe_parity(name, noise_ratio=71.0) for name in ("ones", "ramp"))
    return evidence(
        runtimes=tuple(
            runtime_evidence(
                name,
                outputs=(output(1.0 + index),),
                probes=probes,
                latency=Latency(batch_size=32, batches=13, median_ms=20.0 - 4 * index, p95_ms=25.0 - 3 * index),
                memory_bytes=90_000_000 - 9_000_000 * index,
                cost=Cost(
                    open_ms=40.0 + 30 * index, first_ms=9.0, first_batch_size=1,
                    single=Latency(batch_size=1, batches=19, median_ms=1.2 - 0.4 * index, p95_ms=1.5),
                    peak_bytes=812_000_000,
                ),
            )
            for index, name in enumerate(CPU)
        )
        + tuple(absent(name) for name in ("torch-cuda", "ort-cuda", "ort-cuda-optimized")),
        reference_latency=Latency(batch_size=32, batches=13, median_ms=31.0, p95_ms=36.0),
        reference_cost=Cost(
            first_ms=21.0, first_batch_size=1,
            single=Latency(batch_size=1, batches=19, median_ms=3.1, p95_ms=3.6),
        ),
        preprocessing=_preprocessing(),
    )  # fmt: skip


def _layers(module: str = LAYER) -> Localization:
    names = ["conv1", "bn1", "relu", "maxpool"]
    names += [f"layer{s}.{b}.{n}" for s in (1, 2, 3, 4) for b in (0, 1)
              for n in ("conv1", "bn1", "relu", "conv2", "bn2")]  # fmt: skip
    names += ["avgpool", "fc"]
    at = names.index(LAYER)
    rows = tuple(
        LayerRow(
            module=module if index == at else name,
            kind="Conv2d",
            tensor=f"/{name}/Conv_output_0",
            max_abs_diff=1e-6,
            mean_abs_diff=1e-7,
            noise_ratio=(420.0 / (1 + 0.3 * (index - at))) if index >= at else 0.9 + 0.05 * (index % 5),
            local_ratio=400.0 if index == at else 1.0,
            amplification=1.0,
            verdict="source" if index == at else "propagated" if index > at else "ok",
            detail="4608 weights differ" if index == at else None,
        )
        for index, name in enumerate(names)
    )  # fmt: skip
    return Localization(
        subject_sha256=digest("model.onnx"),
        runtime="ort-cpu",
        samples=8,
        layers=rows,
        first_divergence=module,
        cause=f"The weight of {module} is the model's rounded to float16.",
        remedy="Export from the float32 weights.",
    )


def _preprocessing(picture: str = "cat.jpg") -> PreprocessingParity:
    summary = TensorSummary(min=-2.1, max=2.6, mean=0.1, first=(0.1, 0.2))
    good = ConsumerParity(
        consumer="onnx", images=50, shape=(3, 64, 64), values=summary, max_diff=0.02, mean_diff=0.001,
        over_one_step=0.0, channels=(ChannelDifference(max=0.02, mean=0.001),), worst=picture,
        decisions=Decisions(images=50, flips=0, confidence_diff_max=1e-4, confidence_diff_mean=1e-5),
    )  # fmt: skip
    bad = good.model_copy(update={"consumer": "opencv", "max_diff": 61.0, "mean_diff": 2.4, "over_one_step": 0.41, "causes": (f"no antialias ({picture})",), "explained": 0.98})  # fmt: skip
    away = ConsumerParity(consumer="canvas", unavailable="Chromium is not installed")
    return PreprocessingParity(
        spec_sha256=digest("spec"), reference="pillow", reference_values=summary, images=50,
        images_sha256=digest("images"), distinct=50, consumers=(good, bad, away),
    )  # fmt: skip
