"""The policy: what must hold before a file is promoted. The `gate:` section of params.yaml.

Strict on purpose: unknown keys, text for numbers, negative, NaN or infinite bounds, a policy
without a runtime and a runtime without a bound are all refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from gate.instruments import GraphCode
from gate.preprocessing_parity import ConsumerName, ImplementationName
from gate.record import Record, later
from gate.runtime import RUNTIMES, RuntimeName
from gate.settings import has_section, load_section

Bound = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Required = Literal["always", "when_present", "never"]
Task = Literal["classification", "tensors"]

_EXACT = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_logits",
          "noise_ratio", "noise_peak", "noise_diff")  # fmt: skip


class _PolicyRecord(Record):
    model_config = ConfigDict(allow_inf_nan=False)


class ConfidenceBands(_PolicyRecord):
    """Largest allowed share of samples whose confidence moved by more than 1, 5, 10 points."""

    over_1_percent: Share
    over_5_percent: Share
    over_10_percent: Share


class Bounds(_PolicyRecord):
    """Bounds on the metrics of one runtime. None: not asked for. Definitions: `gate.evidence`."""

    max_abs_diff: Bound | None = None
    mean_abs_diff: Bound | None = None
    scaled_diff: Bound | None = None
    l2_logits: Bound | None = None
    l2_probabilities: Bound | None = None
    confidence_diff: Bound | None = None
    confidence_bands: ConfidenceBands | None = None
    top1_agreement: Share | None = None
    top1_lower_bound: Share | None = None
    top5_agreement: Share | None = None
    accuracy_drop: Bound | None = None
    noise_ratio: Bound | None = later(None)
    noise_peak: Bound | None = later(None)
    noise_diff: Bound | None = later(None)
    repeatability: Bound | None = later(None)
    repeatability_ratio: Bound | None = later(None)
    batch_invariance: Bound | None = later(None)
    batch_invariance_ratio: Bound | None = later(None)

    @property
    def empty(self) -> bool:
        """True if nothing at all is bounded."""
        return all(value is None for _, value in self)


class RuntimePolicy(_PolicyRecord):
    """Whether a runtime must be measured, and within which bounds."""

    required: Required
    bounds: Bounds = Bounds()

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.required != "never" and self.bounds.empty:
            raise ValueError("no bound is set, so everything would pass; set at least max_abs_diff")
        return self


class DeterminismPolicy(_PolicyRecord):
    """Switches that are in force while measuring, on the PyTorch and the ONNX Runtime side."""

    tf32: bool = False
    cudnn_deterministic: bool = True
    cudnn_benchmark: bool = False
    seed: int = 0
    threads: Annotated[int, Field(ge=1)] | None = later(None)
    """Threads of PyTorch and of each session of ONNX Runtime; None: as PyTorch has them."""
    algorithms: bool = later(False)
    """`torch.use_deterministic_algorithms(True)`: operators without a deterministic one raise."""


class Instruments(_PolicyRecord):
    """What is measured beside the samples, and what the probes and the graph must hold.

    All of it is on by default: a policy that says nothing gets every instrument.
    """

    noise_samples: Annotated[int, Field(ge=0)] = 32
    """Samples on which the float64 twin runs; 0: no noise floor."""
    stability_samples: Annotated[int, Field(ge=0)] = 8
    """Samples for repeatability and batch invariance; 0: not measured."""
    probes: bool = True
    """Inputs that unmask baked-in behaviour."""
    probe_batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (1, 4, 7)
    """Where the batch axis is dynamic: one, the export's batch, an odd one."""
    probe_noise_ratio: Bound = 64.0
    """Bound for probes: they look for other answers, not for lost bits, and have few elements."""
    probe_relative_diff: Bound = 1e-3
    """Bound where no float64 twin runs, and where the precision is not exact."""
    search_inputs: Annotated[int, Field(ge=0)] = 64
    """Inputs on which the traced and the eager module are compared; 0: no search."""
    graph: bool = True
    """Read the ONNX graph."""
    graph_forbid: tuple[GraphCode, ...] = (
        "training_mode",
        "fixed_batch",
        "zero_initializer",
        "nonfinite_initializer",
        "float16",
        "quantized",
        "external_data",
    )
    """Findings that refuse the file; the others are shown only."""

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.stability_samples == 1:
            raise ValueError(
                "stability_samples is 1: one sample has no other batch; 0 or 2 and more"
            )
        return self

    @classmethod
    def none(cls) -> Self:
        """Nothing beside the samples."""
        return cls(noise_samples=0, stability_samples=0, probes=False, search_inputs=0, graph=False)


class CudaProviderPolicy(_PolicyRecord):
    """Options of ONNX Runtime's CUDA provider (`use_tf32` follows `determinism.tf32`)."""

    cudnn_conv_algo_search: Literal["DEFAULT", "HEURISTIC", "EXHAUSTIVE"] = "HEURISTIC"
    arena_extend_strategy: Literal["kNextPowerOfTwo", "kSameAsRequested"] = "kNextPowerOfTwo"
    do_copy_in_default_stream: bool = True

    def provider_options(self, *, tf32: bool) -> dict[str, str]:
        """The options as ONNX Runtime takes and reports them: text."""
        return {
            "cudnn_conv_algo_search": self.cudnn_conv_algo_search,
            "arena_extend_strategy": self.arena_extend_strategy,
            "do_copy_in_default_stream": "1" if self.do_copy_in_default_stream else "0",
            "use_tf32": "1" if tf32 else "0",
        }


class ExportFindings(_PolicyRecord):
    """What the export itself told, and what of it refuses the file; the rest is shown only."""

    tracer_warnings: Literal["show", "refuse"] = "show"
    """Warnings of the tracer about the user's code."""
    hazards: Literal["show", "refuse"] = "show"
    """What the exporter warned of, and outputs without a batch axis."""
    lint: Literal["show", "refuse_errors", "refuse_warnings"] = "refuse_errors"
    """Findings of the trace-safety rules (docs/lint) that no `# noqa` silences."""
    record: Literal["optional", "required"] = "optional"
    """`required`: evidence that does not say how the file was exported is an ERROR."""


class PreprocessingPolicy(_PolicyRecord):
    """How near those who feed the model must come to the preprocessing that it was trained with."""

    consumers: Annotated[tuple[ConsumerName, ...], Field(min_length=1)]
    """Implementations of the gate (docs/preprocessing.md), or consumers whose tensors are given."""
    training_side: ImplementationName = "pillow"
    """Whom they are compared with."""
    required: Literal["always", "when_present"] = "always"
    """`when_present`: an implementation that can't run on the measuring machine is waived."""
    max_diff: Bound = 1.0
    """Of any value, in 1/255 of the value range before normalisation."""
    max_flips: Share | None = None
    """Largest share of pictures whose top-1 class differs; None: the model is not asked."""
    min_images: Annotated[int, Field(ge=1)] = 50

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if len(set(self.consumers)) < len(self.consumers) or self.training_side in self.consumers:
            raise ValueError(
                f"consumers {list(self.consumers)}: name each once, and not the training side "
                f"'{self.training_side}', which is always the same as itself"
            )
        return self


class Policy(_PolicyRecord):
    """All that the gate demands."""

    schema_version: Literal[1] = 1
    task: Task = "classification"
    """`classification`: outputs of shape (batch, classes >= 2) are logits and at least one must
    exist. `tensors`: any outputs, only numeric bounds."""
    precision: Literal["exact", "reduced", "quantized"] = "exact"
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Confidence level of `top1_lower_bound` (one-sided Clopper-Pearson)."""
    min_samples: Annotated[int, Field(ge=2)] = 2
    logits: tuple[str, ...] = ()
    """Names of the outputs that are logits; empty: all of shape (batch, classes >= 2)."""
    determinism: DeterminismPolicy = DeterminismPolicy()
    cuda_provider: CudaProviderPolicy = CudaProviderPolicy()
    instruments: Instruments = later(Instruments())
    waive: tuple[Literal["noise_ratio", "noise_peak", "noise_diff"], ...] = later(())
    """Checks that may go unmeasured, by name: what would be an ERROR for want of a measurement is
    WAIVED then, and shown. A measured number is never waived."""
    export_findings: ExportFindings = later(ExportFindings())
    preprocessing: PreprocessingPolicy | None = later(None)
    """Parity of preprocessing between the training side and named consumers; None: not asked."""
    review: Literal["automatic", "required"] = later("automatic")
    """`required`: what passes becomes `candidate` and waits until a reviewer approves it."""
    max_age_days: Annotated[float, Field(gt=0.0)] = later(90.0)
    """How old evidence may be when its version becomes `champion` after the promotion: in review,
    or by hand."""
    twin: Policy | None = later(None)
    """The policy of the quantized twin that is promoted and deployed together with the file; None:
    there is none."""
    runtimes: Annotated[dict[RuntimeName, RuntimePolicy], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_a_fitting_twin(self) -> Self:
        if self.twin is None:
            return self
        if self.precision == "quantized" or self.twin.precision != "quantized":
            raise ValueError(
                f"precision is '{self.precision}' with a twin of precision "
                f"'{self.twin.precision}'; a twin is quantized, and what it is the twin of is not"
            )
        if self.twin.task != self.task:
            raise ValueError(f"the twin's task is '{self.twin.task}', expected '{self.task}'")
        return self

    @model_validator(mode="after")
    def _can_refuse(self) -> Self:
        asked = {n: r for n, r in self.runtimes.items() if r.required != "never"}
        if not asked:
            raise ValueError(
                "every runtime is 'never'; at least one must be always or when_present"
            )
        if not any(r.required == "always" for r in asked.values()):
            raise ValueError("no runtime is required 'always', so a machine without devices passes")
        if all(r.required != "always" or RUNTIMES[n].engine == "torch" for n, r in asked.items()):
            raise ValueError(
                "only torch-cuda is required 'always', and it never runs the file; "
                "require a runtime of ONNX Runtime too, such as ort-cpu"
            )
        for name, runtime in asked.items():
            self._check_bounds(name, runtime.bounds)
        return self

    def _check_bounds(self, name: str, bounds: Bounds) -> None:
        exact = [bounds.max_abs_diff, bounds.scaled_diff]
        if "noise_ratio" not in self.waive:
            exact.append(bounds.noise_ratio)
        if self.precision == "exact" and all(bound is None for bound in exact):
            raise ValueError(
                f"{name}: precision 'exact' needs a bound noise_ratio (not waived), max_abs_diff "
                "or scaled_diff"
            )
        self._check_quantized(name, bounds)
        if self.instruments.noise_samples == 0 and any(
            bound is not None
            for bound in (bounds.noise_ratio, bounds.noise_peak, bounds.noise_diff)
        ):
            raise ValueError(f"{name}: a bound on noise needs instruments.noise_samples above 0")
        if self.instruments.stability_samples == 0 and any(
            bound is not None
            for bound in (bounds.repeatability, bounds.repeatability_ratio,
                          bounds.batch_invariance, bounds.batch_invariance_ratio)
        ):  # fmt: skip
            raise ValueError(
                f"{name}: a bound on repeatability or batch invariance needs "
                "instruments.stability_samples above 1"
            )
        if self.task == "classification" and bounds.top1_agreement is None:
            raise ValueError(f"{name}: task 'classification' needs a bound top1_agreement")
        logit_bounds = {
            field
            for field in ("l2_probabilities", "confidence_diff", "confidence_bands",
                          "top1_agreement", "top1_lower_bound", "top5_agreement", "accuracy_drop")
            if getattr(bounds, field) is not None
        }  # fmt: skip
        if self.task == "tensors" and logit_bounds:
            raise ValueError(
                f"{name}: {', '.join(sorted(logit_bounds))} need logits; set task: classification"
            )

    def _check_quantized(self, name: str, bounds: Bounds) -> None:
        """Eight bits are no rounding of 24: a quantized file is judged by its answers."""
        if self.precision != "quantized" or self.task != "classification":
            return
        exact = [field for field in _EXACT if getattr(bounds, field) is not None]
        if exact:
            raise ValueError(
                f"{name}: {', '.join(exact)} are for exact files; a quantized one is judged by "
                "top1_agreement, confidence_bands and accuracy_drop"
            )
        if bounds.confidence_bands is None:
            raise ValueError(f"{name}: precision 'quantized' needs a bound confidence_bands")

    @classmethod
    def load(cls, path: Path, *, section: str | None = "gate") -> Self:
        """Read the policy from a YAML file. Raises PolicyError with one line per wrong field."""
        return load_section(cls, path, section)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Read a file with a `gate:` section, as params.yaml has, or with the policy itself."""
        return cls.load(path, section="gate" if has_section(path, "gate") else None)

    @classmethod
    def default(cls, *, task: Task = "classification") -> Self:
        """The built-in policy: exact float32, CPU always, CUDA when present, every instrument on.

        All bounds are free of the model's scale. Where they come from: docs/adr/0008.
        """
        agreement = 1.0 if task == "classification" else None
        cpu = Bounds(
            scaled_diff=2e-2,
            top1_agreement=agreement,
            noise_ratio=1.5,
            noise_peak=6.0,
            noise_diff=32.0,
            repeatability_ratio=8.0,
            batch_invariance_ratio=16.0,
        )
        cuda = Bounds(
            scaled_diff=2e-2,
            top1_agreement=agreement,
            noise_ratio=32.0,
            noise_peak=64.0,
            noise_diff=320.0,
            repeatability_ratio=32.0,
            batch_invariance_ratio=64.0,
        )
        return cls(
            task=task,
            runtimes={
                name: RuntimePolicy(
                    required="when_present" if traits.cuda else "always",
                    bounds=cuda if traits.cuda else cpu,
                )
                for name, traits in RUNTIMES.items()
            },
        )

    @classmethod
    def quantized(cls) -> Self:
        """The built-in policy of a quantized twin of a classifier: it must answer alike.

        Where the bounds come from: docs/adr/0012.
        """
        bounds = Bounds(
            top1_agreement=0.99,
            confidence_bands=ConfidenceBands(
                over_1_percent=1.0, over_5_percent=0.05, over_10_percent=0.02
            ),
        )
        return cls(
            precision="quantized",
            instruments=Instruments(
                noise_samples=0, stability_samples=0, search_inputs=0, probe_relative_diff=0.2
            ),
            runtimes={
                name: RuntimePolicy(
                    required="always" if name == "ort-cpu-optimized" else "when_present",
                    bounds=bounds,
                )
                for name, traits in RUNTIMES.items()
                if traits.engine == "onnxruntime"
            },
        )
