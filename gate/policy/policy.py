"""The policy: what the gate requires of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, PrivateAttr, ValidationError, model_validator

from gate.errors import PolicyError
from gate.policy.defaults import (
    ANSWERS_ONLY,
    BFLOAT16,
    REDUCED,
    bfloat16_bounds,
    exact_runtimes,
    quantized_runtimes,
    reduced_runtimes,
    with_default_sections,
)
from gate.policy.metrics import MetricPolicy, check_metrics
from gate.policy.runtime_options import UNREPEATED, check_runtime, servers_of
from gate.policy.sections import (
    Bounds,
    ChampionPolicy,
    CudaProviderPolicy,
    DeterminismPolicy,
    ExportFindings,
    Instruments,
    NonFinite,
    OperatingPoint,
    OperatingPoints,
    PolicyRecord,
    PreprocessingPolicy,
    ReviewTag,
    Role,
    RuntimePolicy,
    Waivable,
    Waivers,
    points_of,
)
from gate.records.evidence import Subject
from gate.records.runtime import RuntimeName, traits_of
from gate.storage.record import added_field
from gate.storage.yaml_section import first_problem, has_section, load_section

Task = Literal["auto", "classification", "tensors"]

Precision = Literal["exact", "reduced", "quantized"]

CROSSINGS = ("threshold_crossing", "threshold_crossing_bound")
"""Bounds that need operating points."""

_CLASS_BOUNDS = ("l2_probabilities", "confidence_diff", "confidence_bands", "top1_agreement",
            "top1_lower_bound", "top5_agreement", "accuracy_drop", *CROSSINGS)  # fmt: skip
"""Bounds on predicted classes."""

_NOISE_BOUNDS = ("noise_ratio", "noise_peak", "noise_diff")

_ROUNDING_BOUNDS = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_logits", *_NOISE_BOUNDS)


_RELEASE_HINT = (
    "A policy applies to any release: list the parts and their chain in a release file "
    "(release.yaml), or in the section 'release:' of params.yaml; see docs/releases.md"
)


# Refused: unknown keys, strings for numbers, negative, NaN or infinite bounds, a policy without a
# runtime, a runtime without a bound.
class Policy(PolicyRecord):
    """Everything that the gate requires of a file."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    task: Task = "classification"
    """`classification`: outputs of shape (batch, classes >= 2) are logits, and at least one must
    exist. `tensors`: any outputs, only numeric bounds. `auto`: such an output is judged as logits
    if the samples have at least two classes, and need not exist."""
    precision: Precision = "exact"
    """`exact`: model and file compute in float32. `reduced`: the file computes in float16, bfloat16
    or TF32. `quantized`: the file computes in 8 bits and is judged by its answers."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Confidence level of `top1_lower_bound` and `threshold_crossing_bound` (one-sided
    Clopper-Pearson)."""
    min_samples: Annotated[int, Field(ge=1)] = 1
    """Fewer samples are an ERROR. One sample is enough only if probes were computed."""
    logits: tuple[str, ...] = ()
    """Names of the outputs that are logits; empty: all of shape (batch, classes >= 2)."""
    outputs: dict[str, Role] = added_field({})
    """Role of each output by name: `logits`, `probabilities`, `scores`, `embedding`, `boxes`,
    `indices`, `mask` or `tensor` (docs/roles.md)."""
    operating_points: OperatingPoints = added_field(())
    """Confidence thresholds of your application, such as [0.5], or by class index: {3: [0.7]}.
    `threshold_crossing` bounds how many samples cross them."""
    nonfinite: NonFinite = added_field("refuse")
    """`refuse`: NaN in outputs fails. `same_places`: NaN and infinity are accepted where model and
    file both return them. On one side only they always fail."""
    determinism: DeterminismPolicy = DeterminismPolicy()
    """Switches of PyTorch and ONNX Runtime during the measurement."""
    cuda_provider: CudaProviderPolicy = CudaProviderPolicy()
    """Options of ONNX Runtime's CUDA provider."""
    instruments: Instruments = added_field(Instruments())
    """What is measured in addition to the differences on the samples."""
    waive: Waivers = added_field(())
    """Checks that are WAIVED instead of ERROR if they could not be measured, for all outputs
    (`[noise_ratio]`) or by output (`{boxes: [empty]}`). `empty`: the output has no element in any
    sample. `nonfinite`: it has no finite element. A measured number is never waived."""
    export_findings: ExportFindings = added_field(ExportFindings())
    """Which warnings of the export refuse the file."""
    preprocessing: PreprocessingPolicy | None = added_field(None)
    """Comparison of preprocessing implementations (docs/preprocessing.md). None: not compared."""
    metrics: tuple[MetricPolicy, ...] = added_field(())
    """Metrics of your task, and how much each may drop (docs/task-metrics.md)."""
    incumbent: ChampionPolicy | None = added_field(None)
    """Bounds relative to the champion. None: not compared."""
    review: Literal["automatic", "required", "signed"] = added_field("automatic")
    """`automatic`: a version that passes is promoted. `required`: it becomes `candidate` and waits
    for a reviewer, who sets a tag. `signed`: it waits for the signed approvals of as many reviewers
    as the service's trust file requires."""
    review_tag: ReviewTag = added_field(ReviewTag())
    """The tag that reviewers set."""
    max_age_days: Annotated[float, Field(gt=0.0)] = added_field(90.0)
    """Maximum age of the evidence when its version becomes `champion`."""
    promotion: Literal["direct", "by_service"] = added_field("direct")
    """`direct`: `gate promote` moves `champion`. `by_service`: it only creates a candidate, which
    the service judges and promotes."""
    after_deploy: Literal["nothing", "replay_golden"] = added_field("nothing")
    """`replay_golden`: after a deployment the service runs the golden vectors through each runtime
    of kind `server` (also with `required: never`), and deploys the previous release again if the
    answers differ."""
    environments: Literal["same", "any"] = added_field("same")
    """Machines that measure units of one check under precision `exact`. `same`: they need the same
    processor, libraries and switches. `any`: they may differ."""
    confidential: bool = added_field(False)
    """True: `gate reproduce` leaves out weights and samples unless options request them."""
    tried: dict[str, JsonValue] = added_field({})
    """Values that `gate check --set` overrides, by their path. A verdict with overrides is not
    promoted."""
    twin: Policy | None = added_field(None)
    """The policy of the quantized twin, the int8 file that is promoted and deployed together with
    this file. None: there is no twin."""
    runtimes: Annotated[dict[RuntimeName, RuntimePolicy], Field(min_length=1)]
    """The runtimes to measure, by name, with their bounds."""
    # Not a field, because only `for_part` sets it, never a file.
    _judged_in_chain: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _has_a_fitting_twin(self) -> Self:
        if self.twin is None:
            return self
        if self.precision == "quantized" or self.twin.precision != "quantized":
            raise ValueError(
                f"precision is '{self.precision}' with a twin of precision "
                f"'{self.twin.precision}'; only the twin may be quantized, and it must be"
            )
        if self.twin.preprocessing is not None:
            raise ValueError("twin and file share their inputs: set preprocessing outside twin")
        twin = self.twin
        promotion_settings = (twin.review, twin.review_tag, twin.max_age_days, twin.incumbent)
        if promotion_settings != ("automatic", ReviewTag(), 90.0, None):
            raise ValueError(
                "review, review_tag, max_age_days and incumbent apply to both files; set them "
                "outside twin"
            )
        if self.twin.promotion != "direct":
            raise ValueError("promotion applies to both files; set it outside twin")
        if self.task not in ("auto", self.twin.task):
            raise ValueError(f"the twin's task is '{self.twin.task}', expected '{self.task}'")
        return self

    @model_validator(mode="after")
    def _roles_agree(self) -> Self:
        for name, role in self.outputs.items():
            if name in self.logits and role != "logits":
                raise ValueError(
                    f"'{name}' is in logits, but its role is '{role}'; keep only one of them"
                )
            if self.task == "tensors" and role in ("logits", "probabilities"):
                raise ValueError(
                    f"the role of '{name}' is '{role}', but task 'tensors' has no classes; set "
                    "task: auto, or task: classification"
                )
        return self

    @model_validator(mode="after")
    def _has_answers_to_compare(self) -> Self:
        section = self.incumbent
        if self.task == "tensors" and section is not None and section.asks_for_answers:
            raise ValueError(
                "incumbent: max_accuracy_drop and min_agreement need classes, and task 'tensors' "
                "has none; bound max_latency_ratio alone, or set another task"
            )
        return self

    @model_validator(mode="after")
    def _has_servers_to_replay(self) -> Self:
        if self.after_deploy == "nothing":
            return self
        servers = servers_of(self)
        if not servers:
            raise ValueError("after_deploy: replay_golden needs a runtime of kind 'server'")
        for name in servers:
            if self.runtimes[name].options.get("allow_unproven_file"):
                raise ValueError(
                    f"after_deploy: replay_golden must be able to check that '{name}' has loaded "
                    "the file; leave out allow_unproven_file"
                )
        return self

    @model_validator(mode="after")
    def _metrics_fit(self) -> Self:
        check_metrics(self.metrics)
        bounded = [each.name for each in self.metrics if each.max_drop_from_champion is not None]
        if bounded and self.incumbent is None:
            raise ValueError(
                f"metrics: {bounded[0]} has max_drop_from_champion, but nothing says what happens "
                "without a champion; set incumbent: {first_release: allow}, or refuse"
            )
        if self.incumbent is not None and not (self.incumbent.is_bounded or bounded):
            raise ValueError(
                "incumbent: no bound is set, so everything would pass; set max_accuracy_drop, "
                "min_agreement or max_latency_ratio, or max_drop_from_champion of a metric"
            )
        return self

    @model_validator(mode="after")
    def _can_refuse(self) -> Self:
        for name, runtime in self.runtimes.items():
            check_runtime(name, runtime, exact=self.precision == "exact")
        active = {n: r for n, r in self.runtimes.items() if r.required != "never"}
        if not active:
            raise ValueError(
                "every runtime is 'never'; at least one must be always or when_present"
            )
        if not any(r.required == "always" for r in active.values()):
            raise ValueError(
                "no runtime is required 'always', so a check without any runtime would pass"
            )
        if all(r.required != "always" or traits_of(n).engine == "torch" for n, r in active.items()):
            raise ValueError(
                "only torch-cuda is required 'always', which never runs the file; "
                "require a runtime of ONNX Runtime too, such as ort-cpu"
            )
        for name, runtime in active.items():
            self._check_bounds(name, runtime.bounds)
        return self

    @model_validator(mode="after")
    def _check_operating_points(self) -> Self:
        bounded = [
            f"{name}: {', '.join(stated)}"
            for name, runtime in self.runtimes.items()
            if runtime.required != "never" and (stated := runtime.bounds.configured(CROSSINGS))
        ]
        if bounded and not self.operating_points:
            raise ValueError(
                f"{bounded[0]} needs operating_points, such as [0.5], or {{3: [0.7]}} for class 3"
            )
        if self.operating_points and not bounded:
            raise ValueError(
                "operating_points are set, but no runtime bounds threshold_crossing or "
                "threshold_crossing_bound, so they have no effect"
            )
        return self

    def _check_bounds(self, runtime: str, bounds: Bounds) -> None:
        """Raise ValueError if a bound of this runtime is missing or can't be judged."""
        if bounds.empty and not (self.is_bounded_by_metrics and self.metrics):
            raise ValueError(
                f"{runtime}: no bound is set on outputs, so everything would pass; set noise_ratio "
                "or max_abs_diff"
            )
        waived = () if isinstance(self.waive, dict) else self.waive
        exact = {"max_abs_diff", "scaled_diff", "noise_ratio"}.difference(waived)
        if self.precision == "exact" and not bounds.configured(exact):
            raise ValueError(
                f"{runtime}: precision 'exact' needs a bound noise_ratio (not waived), "
                "max_abs_diff or scaled_diff"
            )
        self._check_quantized(runtime, bounds)
        if self.instruments.noise_samples == 0 and bounds.configured(_NOISE_BOUNDS):
            raise ValueError(f"{runtime}: a bound on noise needs instruments.noise_samples above 0")
        if self.instruments.stability_samples == 0 and bounds.configured(UNREPEATED):
            raise ValueError(
                f"{runtime}: a bound on repeatability or batch invariance needs "
                "instruments.stability_samples above 1"
            )
        self._check_classes(runtime, bounds)

    def _check_classes(self, runtime: str, bounds: Bounds) -> None:
        bounded = bounds.configured(_CLASS_BOUNDS)
        if "top1_agreement" not in bounded and (
            self.task == "classification" or (self.task == "auto" and self._names_classes)
        ):
            if self.task == "classification":
                why, instead = "task 'classification'", ", or set task: auto"
            else:
                why, instead = "the role of logits", ""
            raise ValueError(f"{runtime}: {why} needs a bound top1_agreement{instead}")
        if self.task == "tensors" and bounded:
            raise ValueError(
                f"{runtime}: {', '.join(sorted(bounded))} need logits; set task: classification"
            )
        extra = sorted(set(bounded) - {"top1_agreement"})
        if self.task == "auto" and extra and not self._names_classes:
            raise ValueError(
                f"{runtime}: {', '.join(extra)} need logits, and an inferred role is not enough; "
                "name the output (outputs: {NAME: logits}), or set task: classification"
            )

    def _check_quantized(self, runtime: str, bounds: Bounds) -> None:
        """Raise ValueError for bounds on rounding: a quantized file is judged by its
        predictions."""
        if self.precision != "quantized" or self.task != "classification":
            return
        exact = bounds.configured(_ROUNDING_BOUNDS)
        if exact:
            raise ValueError(
                f"{runtime}: {', '.join(exact)} are for exact files; a quantized one is judged by "
                "top1_agreement, confidence_bands and accuracy_drop"
            )
        if bounds.confidence_bands is None:
            raise ValueError(f"{runtime}: precision 'quantized' needs a bound confidence_bands")

    @property
    def is_bounded_by_metrics(self) -> bool:
        """True if an output needs no bound when a metric judges it, as for a quantized detector."""
        return self.precision == "quantized" and self.task == "tensors"

    @property
    def _names_classes(self) -> bool:
        """True if the policy gives an output a role with classes by its name."""
        roles = self.outputs.values()
        return bool(self.logits) or not {"logits", "probabilities"}.isdisjoint(roles)

    @classmethod
    def load(cls, path: Path, *, section: str | None = "gate") -> Self:
        """Read the policy from a YAML file. Raises PolicyError with one line per wrong field."""
        return load_section(
            cls,
            path,
            section,
            complete=with_default_sections,
            misplaced=dict.fromkeys(("parts", "chain"), _RELEASE_HINT),
        )

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read the policy from the `gate:` section of a file like params.yaml, or from a policy
        file."""
        return cls.load(path, section="gate" if has_section(path, "gate") else None)

    @property
    def points(self) -> tuple[OperatingPoint, ...]:
        """The operating points, ordered by class and threshold."""
        return points_of(self.operating_points)

    def role_for(self, name: str) -> Role | None:
        """Return the role that the policy gives the output of this name, or None."""
        return self.outputs.get(name) or ("logits" if name in self.logits else None)

    def waives(self, name: Waivable, output: str) -> bool:
        """Return whether this check may be unmeasured for an output."""
        waived = self.waive.get(output, ()) if isinstance(self.waive, dict) else self.waive
        return name in waived

    def counts_classes(self, name: str) -> bool:
        """Return whether the output holds class scores if its shape is (batch, classes >= 2).

        The policy states it or leaves it to inference.
        """
        role = self.role_for(name)
        if role is not None:
            return role in ("logits", "probabilities")
        return self.task != "tensors" and not self.logits

    def with_answers(self, *, outputs: Mapping[str, Role], task: Task | None = None) -> Self:
        """Return the policy with these roles and this task. Raises PolicyError."""
        changes = {"outputs": {**self.outputs, **outputs}} | ({"task": task} if task else {})
        try:
            return type(self).model_validate_json(json.dumps(self.to_plain() | changes))
        except ValidationError as error:
            raise PolicyError(
                f"invalid policy after adding roles and task: {first_problem(error)}"
            ) from error

    def for_part(self, outputs: Sequence[str]) -> Self:
        """Return the policy for a part of a release with these outputs.

        It has no settings for other outputs, images or the champion. Outputs of a quantized part
        that feed other parts are not results: their numbers are judged only if the policy names the
        output (`judges`), and no class scores are inferred. The effect of the part's rounding is
        judged at the outputs of the chain.
        """
        quantized = self.precision == "quantized"
        update = {
            "task": "tensors" if quantized else "auto",
            "outputs": {name: role for name, role in self.outputs.items() if name in outputs},
            "logits": tuple(name for name in self.logits if name in outputs),
            "waive": _restricted(self.waive, outputs),
            "operating_points": (),
            "preprocessing": None,
            "metrics": (),
            "incumbent": None,
            "twin": None,
        }
        part = self.model_copy(update=update)
        part._judged_in_chain = quantized
        return part

    def judges(self, name: str) -> bool:
        """Return whether this policy bounds an output, rather than the policy of the chain."""
        return not self._judged_in_chain or self.role_for(name) is not None

    def bounds_for(self, runtime: RuntimeName, output: str) -> Bounds:
        """Return the bounds of an output in a runtime of the policy."""
        return self.runtimes[runtime].bounds if self.judges(output) else Bounds()

    @classmethod
    def default(cls, *, task: Task = "auto") -> Self:
        """Return the built-in policy: exact float32, CPU, CUDA if available, all instruments."""
        return cls(task=task, runtimes=exact_runtimes(classes=task != "tensors"))

    @classmethod
    def reduced(cls, *, task: Task = "auto") -> Self:
        """Return the built-in policy for intentional float16 or TF32.

        Classes are not inferred, because near-ties change in 16 bits.
        """
        runtimes = reduced_runtimes(top1_agreement=0.95 if task == "classification" else None)
        return cls(task=task, precision="reduced", instruments=REDUCED, runtimes=runtimes)

    @classmethod
    def built_in(cls, precision: Precision = "exact", *, task: Task | None = None) -> Self:
        """Return the built-in policy of a precision; the quantized one is for classifiers."""
        if precision == "quantized":
            return cls.quantized()
        return {"exact": cls.default, "reduced": cls.reduced}[precision](task=task or "auto")

    def for_file(self, subject: Subject) -> Self:
        """Return the policy for a file: built-in float16 bounds are scaled for bfloat16 files."""
        if self.precision != "reduced" or not subject.has_bfloat16:
            return self
        runtimes = {
            name: runtime.model_copy(update={"bounds": bfloat16_bounds(runtime.bounds)})
            for name, runtime in self.runtimes.items()
        }
        instruments = self.instruments
        if instruments.probe_noise_ratio == REDUCED.probe_noise_ratio:
            update = {"probe_noise_ratio": REDUCED.probe_noise_ratio * BFLOAT16}
            instruments = instruments.model_copy(update=update)
        return self.model_copy(update={"runtimes": runtimes, "instruments": instruments})

    @classmethod
    def quantized(cls) -> Self:
        """Return the built-in policy of a quantized classifier, which bounds top-1 agreement."""
        return cls(precision="quantized", instruments=ANSWERS_ONLY, runtimes=quantized_runtimes())


def _restricted(waived: Waivers, outputs: Sequence[str]) -> Waivers:
    if not isinstance(waived, dict):
        return waived
    return {name: checks for name, checks in waived.items() if name in outputs}
