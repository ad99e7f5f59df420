"""The sections of params.yaml that belong to the pipeline, strictly typed.

`gate:` is `gate.policy.policy.Policy`, `export:` is `gate.records.export.ExportSettings`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from gate.errors import PolicyError
from gate.export.quantize import QuantizeSettings
from gate.onnx_file.release_file import PartName
from gate.policy.policy import Policy
from gate.preprocess.implementations import pillow_incapable
from gate.preprocess.spec import PreprocessSpec
from gate.records.export import ExportSettings, Labels, Names, TensorName
from gate.storage.record import Record
from gate.storage.yaml_section import first_problem, has_section, load_section
from pipelines import paths

Positive = Annotated[int, Field(ge=1)]
T = TypeVar("T")


class _Section(Record):
    model_config = ConfigDict(allow_inf_nan=False)
    section: ClassVar[str]

    @classmethod
    def load(cls, path: Path = paths.PARAMS) -> Self:
        """Read the section from params.yaml. Raises PolicyError, one line per wrong field."""
        return load_section(cls, path, cls.section)


class PrepareParams(_Section):
    """Source of the images, and their conversion to tensors."""

    section = "prepare"
    source: Literal["digits", "folder", "npz"]
    path: str
    """Folder of `class/image.png`, or a .npz file with `images` and `labels`; digits need none."""
    preprocessing: PreprocessSpec
    """Conversion of an image to the model's input, a tensor of fixed size."""
    pictures: Annotated[int, Field(ge=0)]
    """Number of held-out images that are also kept as images."""
    eval_share: Annotated[float, Field(gt=0.0, lt=1.0)]
    seed: int

    @model_validator(mode="after")
    def _stackable(self) -> Self:
        spec = self.preprocessing
        if spec.size is None or spec.layout != "nchw" or spec.dtype != "float32":
            raise ValueError(
                "preprocessing must make tensors of one size (resize.size, or a crop), of layout "
                "nchw and dtype float32: the samples are stacked and trained on"
            )
        problem = pillow_incapable(spec)
        if problem is not None:
            raise ValueError(f"preprocessing is done by Pillow here: {problem}")
        return self


class ModelParams(_Section):
    """The architecture of the network, and its initial weights."""

    section = "model"
    architecture: str | None
    num_classes: Positive | None
    weights: str | None
    checkpoint: str | None
    factory: str | None

    @model_validator(mode="after")
    def _has_single_source(self) -> Self:
        if (self.architecture is None) == (self.factory is None):
            raise ValueError("set exactly one of architecture and factory; the other is null")
        if self.factory is not None and self.weights is not None:
            raise ValueError("weights by name belong to an architecture, not to a factory")
        if self.weights is not None and self.checkpoint is not None:
            raise ValueError("set at most one of weights and checkpoint")
        return self

    @property
    def name(self) -> str:
        """The name of the reference in the evidence."""
        return self.factory or f"torchvision:{self.architecture}"


class TrainParams(_Section):
    """Training by plain SGD. `epochs: 0` saves the model's initial weights."""

    section = "train"
    epochs: Annotated[int, Field(ge=0)]
    batch_size: Positive
    learning_rate: Annotated[float, Field(gt=0.0)]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)]
    threads: Positive
    seed: int


class ParityParams(_Section):
    """Settings of the measurement; the requirements are in `gate:`."""

    section = "parity"
    batch_size: Positive
    engine: Literal["processes", "ray"] = "processes"
    jobs: Positive | None = None
    """Number of processes or Ray workers; None: as many as are useful, or as the cluster has."""


_SET_BY_PIPELINE = {
    "file": "The stage export writes NAME.onnx for each part",
    "inputs": "A part is exported and judged on what the chain gives it",
}
"""Fields of a part in a release file that the pipeline sets."""


class PartParams(Record):
    """One module of the model as a separate file."""

    reference: str | None = None
    """Path of the module in the model; None: the part's name."""
    input_names: Names | None = None
    """Names of the inputs; None: those of the chain's call."""
    output_names: Names | None = None
    dynamic_axes: dict[TensorName, Labels] = Field(default={})

    def settings(self, shared: ExportSettings) -> ExportSettings:
        """Return the export settings of the part. Raises PolicyError.

        shared: settings of `export:` for all parts.
        """
        part_settings = self.model_dump(exclude={"reference"})
        try:
            return ExportSettings.model_validate({**shared.model_dump(), **part_settings})
        except ValidationError as error:
            raise PolicyError(first_problem(error)) from error


class ReleaseParams(_Section):
    """A single file, or several files that are promoted together."""

    section = "release"
    output: Annotated[str, Field(pattern=r"^[\w-]+(\.onnx)?$")]
    """Path in models/: an ONNX file, or the folder of a release file and its parts."""
    chain: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None
    parts: dict[PartName, PartParams]

    @classmethod
    def load(cls, path: Path = paths.PARAMS) -> Self:
        """Read the section. Raises PolicyError, also if parts are outside of it, where no stage
        reads them."""
        for name in ("parts", "chain"):
            if has_section(path, name):
                raise PolicyError(
                    f"{path}: '{name}:' stands beside the sections, where no stage reads it. Move "
                    "it into 'release:' (docs/releases.md)."
                )
        return load_section(cls, path, cls.section, misplaced=_SET_BY_PIPELINE)

    @model_validator(mode="after")
    def _has_parts_or_file(self) -> Self:
        several = bool(self.parts)
        if (self.chain is not None) != several:
            raise ValueError("parts and chain go together: which function runs the parts?")
        if self.output.endswith(".onnx") == several:
            raise ValueError(
                "output is a folder with parts, such as release, and a file without them, such as "
                f"model.onnx; it is {self.output}"
            )
        return self

    @property
    def path(self) -> Path:
        """The measured and promoted file; for several files, the release file."""
        path = paths.MODELS / self.output
        return path / paths.RELEASE_FILE if self.parts else path


class RegistryParams(_Section):
    """Names in MLflow."""

    section = "registry"
    model_name: Annotated[str, Field(min_length=1)]
    experiment: Annotated[str, Field(min_length=1)]


def load_policy(path: Path = paths.PARAMS) -> Policy:
    """Return the policy in params.yaml. Raises PolicyError."""
    return Policy.load(path)


def load_export(path: Path = paths.PARAMS) -> ExportSettings:
    """Return the export settings in params.yaml. Raises PolicyError."""
    return load_section(ExportSettings, path, "export")


def load_quantize(path: Path = paths.PARAMS) -> QuantizeSettings:
    """Return the quantizer settings in params.yaml. Raises PolicyError."""
    return QuantizeSettings.load(path)


def check_release(
    release: ReleaseParams, export: ExportSettings, *, path: Path = paths.PARAMS
) -> None:
    """Raise PolicyError if a release of several files has settings for a single file. `path`: the
    file that contains the settings."""
    if not release.parts:
        return
    for name in ("input_names", "output_names", "dynamic_axes"):
        if getattr(export, name):
            empty = "{}" if name == "dynamic_axes" else "null"
            raise PolicyError(
                f"{path}: export.{name} names the tensors of one file, and release has parts. Say "
                f"it of each part (release.parts.NAME.{name}), and set it to {empty} here."
            )
    for part in release.parts.values():
        part.settings(export)


def check_all(path: Path) -> None:
    """Raise PolicyError, one line per wrong field of any section."""
    problems = []

    def loaded(load: Callable[[Path], T]) -> T | None:
        try:
            return load(path)
        except PolicyError as error:
            problems.append(str(error))
            return None

    for section in (PrepareParams, ModelParams, TrainParams, ParityParams, RegistryParams):
        loaded(section.load)
    loaded(load_quantize)
    loaded(load_policy)
    release, export = loaded(ReleaseParams.load), loaded(load_export)
    if problems or release is None or export is None:
        raise PolicyError("\n".join(problems))
    check_release(release, export, path=path)
