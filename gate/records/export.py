"""Export settings, lint findings, results of `gate export compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, StringConstraints, model_validator

from gate.records.runtime import RuntimeName
from gate.storage.record import Count, Measured, Record, Sha256, added_field

LintLevel = Literal["error", "warning", "note"]
"""`error`: the file computes something else for valid inputs of the model. `warning`: it may do so
for dynamic axes or other callers. `note`: information."""

LEVELS: tuple[LintLevel, ...] = ("error", "warning", "note")
"""Levels in descending order of severity."""


class LintFinding(Record):
    """A location in the model's source that an export translates incorrectly."""

    code: Annotated[str, StringConstraints(pattern=r"^TRC\d{3}$")]
    level: LintLevel
    path: str
    """Path relative to the import path, which is independent of the machine."""
    line: Annotated[int, Field(ge=1)]
    module: str
    """Dotted path of the first module that reaches the code; empty for the model itself."""
    expression: str
    """The source expression on one line."""
    message: str
    rewrite: str
    """Suggested replacement."""
    suppressed: bool = added_field(False)
    """True for a line with `# noqa: TRC…`. Suppressed findings are shown but have no effect."""

    @property
    def page(self) -> str:
        """Return the path of the rule's page, relative to the root of the project."""
        return f"docs/lint/{self.code}.md"

    @property
    def location(self) -> str:
        """Return `path:line`."""
        return f"{self.path}:{self.line}"


def at_least(level: LintLevel) -> tuple[LintLevel, ...]:
    """Return the levels that are at least as severe as this one."""
    return LEVELS[: LEVELS.index(level) + 1]


TensorName = Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=200)]
"""Name of an input or output, without white space."""

Labels = dict[Annotated[int, Field(ge=0)], TensorName]
"""Names of dynamic axes by axis number."""

Names = Annotated[tuple[TensorName, ...], Field(min_length=1)]

Strategy = Literal["traced", "direct", "scripted", "dynamo"]
"""traced: `torch.jit.trace`, then the TorchScript-based exporter. direct: that exporter on the
module itself. scripted: `torch.jit.script`, then that exporter. dynamo: `torch.export`."""

Domain = Annotated[str, StringConstraints(pattern=r"^[\w-]+(\.[\w-]+)*$", max_length=200)]
"""Domain of ONNX operators: words separated by dots."""

ClassName = Annotated[str, StringConstraints(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]
"""`Block`, or `package.module.Block`."""

_ONNX = "ai.onnx"

OperatorExportType = Literal["ONNX", "ONNX_ATEN", "ONNX_ATEN_FALLBACK", "ONNX_FALLTHROUGH"]

LOWEST_OPSET, LOWEST_AUTO = 9, 13

LOWEST_WITH_FUNCTIONS = 15
"""Functions need IR version 8, which PyTorch's exporter writes from this opset on."""

HIGHEST_OPSET: dict[Strategy, int] = {"traced": 20, "direct": 20, "scripted": 20, "dynamo": 23}
"""Highest opset that PyTorch's exporters support."""


def _opset(value: Any) -> Any:
    highest = max(HIGHEST_OPSET.values())
    number = type(value) is int and LOWEST_OPSET <= value <= highest
    if not number and value != "auto":
        raise ValueError(f"expected auto, or a number from {LOWEST_OPSET} to {highest}")
    return value


Opset = Annotated[int | Literal["auto"], PlainValidator(_opset)]


class ExportSettings(Record):
    """All settings of an export; none is left to the exporter's defaults.

    Raises pydantic's ValidationError for an unsupported opset, empty or repeated names, an empty
    ladder or repeated strategies, and a batch size below 1.
    """

    strategy: Strategy | Literal["ladder"] = "ladder"
    ladder: Annotated[tuple[Strategy, ...], Field(min_length=1)] = (
        "traced",
        "direct",
        "scripted",
        "dynamo",
    )
    """The strategies that `strategy: ladder` tries, in this order."""
    opset: Opset = 13
    """Opset of the file. auto: the lowest one from 13 that works."""
    export_params: bool = True
    """If false, the file has no weights: they become inputs."""
    do_constant_folding: bool = True
    training: Literal["eval"] = "eval"
    input_names: Names | None = None
    """Names of the inputs, in the order of `forward`'s positional arguments, or the names of its
    arguments; dotted for the items of a dict or tuple. None: the names in the example."""
    output_names: Names | None = None
    """Names of the outputs, in the order of the returned tensors, with nested ones flattened. None:
    named by their position in the return value; see `gate.model.forward_signature`."""
    dynamic_batch: bool = True
    """Axis 0 of all inputs may have any size."""
    dynamic_axes: dict[TensorName, Labels] = Field(default={})
    """Further dynamic axes of inputs, with their names: {input: {2: height}}. The axes of outputs
    follow from them. An output axis that is listed here must change with the inputs."""
    batch_axes: dict[TensorName, Annotated[int, Field(ge=0)] | None] = Field(default={})
    """Batch axis of each input whose batch axis is not 0. None: the input has no batch axis."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 4
    """Batch size of the traced example. At least 2 for a dynamic batch: an axis of size 1 is
    squeezed and broadcast silently, so a trace with one sample bakes in more values."""
    lint: Literal["error", "warning", "off"] = "error"
    """A strategy is skipped if `gate.lint` has a finding of this level or worse for it."""
    custom_symbolics: str | None = None
    """`package.module:register`, called before each export to register custom operators."""
    keep_initializers_as_inputs: bool = False
    """Also list the weights as inputs, so that a caller can replace them."""
    custom_opsets: dict[Domain, Annotated[int, Field(ge=1)]] = Field(default={})
    """Opset versions of custom domains: {com.microsoft: 1}. The TorchScript-based exporter writes 1
    for domains that are not listed."""
    autograd_inlining: bool = True
    """Export the operators inside an `autograd.Function`. If false, each function becomes one
    `prim::PythonOp`, which `custom_symbolics` must translate."""
    export_modules_as_functions: bool | Annotated[tuple[ClassName, ...], Field(min_length=1)] = (
        False
    )
    """Export modules as ONNX functions: true for all of them, or a list of classes."""
    operator_export_type: OperatorExportType = "ONNX"
    """How operators without an ONNX equivalent are exported; ONNX: the export is refused."""
    verbose: bool = False
    """Save the exporter's log, including the graph with source lines, as MODEL.onnx.export.log. The
    exported file is the same."""

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies to try, in order."""
        return self.ladder if self.strategy == "ladder" else (self.strategy,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in (*self._contradictions(), *self._ignored()):
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        counts = Counter((*(self.input_names or ()), *(self.output_names or ())))
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            yield f"the names of inputs and outputs must differ, repeated: {', '.join(repeated)}"
        if len(set(self.ladder)) < len(self.ladder):
            yield f"the ladder repeats a strategy: {', '.join(self.ladder)}"
        highest = max(HIGHEST_OPSET[strategy] for strategy in self.strategies)
        if self.opset != "auto" and self.opset > highest:
            strategies = ", ".join(self.strategies)
            yield f"{strategies} support at most opset {highest}, not {self.opset}"
        if self.dynamic_batch and self.batch_size < 2:
            yield (
                "batch_size 1 with dynamic_batch: true bakes the batch in too easily; "
                "set batch_size to 2 or more, or dynamic_batch: false"
            )
        if self.keep_initializers_as_inputs and not self.export_params:
            yield (
                "keep_initializers_as_inputs: true with export_params: false: without weights in "
                "the file they are inputs already; set one of the two"
            )

    def _ignored(self) -> Iterator[str]:
        """Yield settings that an exporter silently ignores or does not support."""
        for field in ("custom_opsets", "autograd_inlining", "operator_export_type"):
            is_set = getattr(self, field) != ExportSettings.model_fields[field].default
            if is_set and "dynamo" in self.strategies:
                yield (
                    f"{field} is an option of the TorchScript-based exporter, and dynamo silently "
                    "ignores it; set strategy: direct, or a ladder without dynamo"
                )
        if _ONNX in self.custom_opsets:
            yield f"custom_opsets names {_ONNX}, the standard domain; set its version with opset"
        if self.export_modules_as_functions and self.strategies != ("direct",):
            strategies = ", ".join(self.strategies)
            yield (
                "export_modules_as_functions works only with strategy direct, not with "
                f"{strategies}: a trace contains no modules, those of TorchScript can't be "
                "hooked, and dynamo silently ignores the option; set strategy: direct"
            )
        opset = LOWEST_WITH_FUNCTIONS if self.opset == "auto" else self.opset
        if self.export_modules_as_functions and opset < LOWEST_WITH_FUNCTIONS:
            yield (
                f"export_modules_as_functions needs opset {LOWEST_WITH_FUNCTIONS} or more, "
                f"not {opset}; set opset: auto"
            )
        if self.operator_export_type != "ONNX" and self.strategy == "ladder":
            yield (
                f"operator_export_type {self.operator_export_type} does not work with strategy: "
                "ladder, which runs each file, because runtimes may not support the operators; set "
                "strategy: direct"
            )


TrialVerdict = Literal["PASS", "FAIL", "ERROR", "not exported"]


class TrialParity(Record):
    """The result of one runtime on the file of one trial; the worst over the outputs.

    `gate.records.evidence` has the definitions. None: not measured (no logits, no floats, or the
    runtime failed).
    """

    runtime: RuntimeName
    verdict: TrialVerdict
    max_abs_diff: Measured | None = None
    l2_logits: Measured | None = None
    l2_probabilities: Measured | None = None
    noise_ratio: Measured | None = None
    top1_agreement: Measured | None = None
    latency_ms: Measured | None = None
    """Median latency of one batch."""
    failure: str | None = None


class ExportTrialRecord(Record):
    """One export with one choice of strategy, opset and constant folding."""

    strategy: str
    opset_asked: Count
    constant_folding: bool
    seconds: Measured
    """Wall-clock time of the export in seconds."""
    failure: str | None = None
    """Why there is no file."""
    sha256: Sha256 | None = None
    opset: Count | None = None
    """Opset of the file."""
    nodes: Count | None = None
    size_bytes: Count | None = None
    same_as: str | None = None
    """Title of an earlier trial with the same graph and weights, which was measured instead."""
    warnings: tuple[str, ...] = ()
    """Warnings of tracer and exporter."""
    parities: tuple[TrialParity, ...] = ()

    @property
    def title(self) -> str:
        """Return a title such as `traced, opset 13, folded`."""
        folding = "folded" if self.constant_folding else "not folded"
        return f"{self.strategy}, opset {self.opset_asked}, {folding}"

    @property
    def verdict(self) -> TrialVerdict:
        """Return the worst verdict of the runtimes."""
        order: tuple[TrialVerdict, ...] = ("not exported", "ERROR", "FAIL", "PASS")
        if self.failure is not None or not self.parities:
            return "not exported"
        return min((parity.verdict for parity in self.parities), key=order.index)


class Trials(Record):
    """All trials of one model."""

    schema_version: Literal[1] = 1
    factory: str
    samples: Count
    batch_size: Count
    bound: Measured
    """Upper bound of `noise_ratio` for a PASS."""
    trials: tuple[ExportTrialRecord, ...]
