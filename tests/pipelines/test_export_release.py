"""The pipeline exports, measures and promotes a model of several files as one release."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from mlflow import MlflowClient

from gate import Decision, Evidence, PreprocessSpec
from gate.api import parity_of_preprocessing
from gate.errors import ExportError, ModelError, PolicyError
from gate.onnx_file.release_file import ReleaseFile
from gate.policy.sections import PreprocessingPolicy
from pipelines import code, export, parity, paths, prepare, promote, train, twin
from pipelines.export_report import ExportReport
from pipelines.override import override
from pipelines.params import ReleaseParams, check_all
from pipelines.promotion_report import PromotionReport
from pipelines.run import tracking_uri

MULTI_FILE = (
    "model.factory=tests.pipelines.tiny:encoder_and_head",
    "export.input_names=null",
    "export.output_names=null",
    "release.output=release",
    "release.chain=tests.pipelines.tiny_chain:run",
    "release.parts={encoder: {}, head: {reference: classifier, output_names: [logits]}}",
)


@pytest.fixture(scope="module")
def exported_files(tiny_params: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project after prepare, code, train and export."""
    folder = tmp_path_factory.mktemp("exported")
    shutil.copy(tiny_params, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        override(MULTI_FILE)
        for stage in (prepare, code, train, export):
            assert stage.main() == 0, stage.__name__
    return folder


@pytest.fixture
def exported(project: Path, exported_files: Path) -> Path:
    """The release's folder in a new project."""
    shutil.copy(exported_files / "params.yaml", project)
    for name in ("data", "models", "reports"):
        shutil.copytree(exported_files / name, project / name, dirs_exist_ok=True)
    return ReleaseParams.load().path.parent


@pytest.mark.further
def test_each_part_is_exported_to_a_file(exported: Path) -> None:
    assert exported == Path("models/release")
    assert {path.name for path in exported.iterdir()} == {
        "release.yaml", "encoder.onnx", "head.onnx",
    }  # fmt: skip
    assert ReleaseFile.load(exported / "release.yaml").references == {
        "encoder": "encoder", "head": "classifier",
    }  # fmt: skip
    assert [output.name for output in onnx.load(exported / "head.onnx").graph.output] == ["logits"]
    report = ExportReport.load(paths.EXPORT_REPORT)
    assert report.record is None
    assert {name: part.record.strategy for name, part in report.parts.items()} == {
        "encoder": "traced", "head": "traced",
    }  # fmt: skip
    assert set(report.self_check_numbers()) >= {
        "self_check/encoder/max_abs_diff_export_batch", "self_check/head/max_abs_diff_other_batch",
    }  # fmt: skip
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    assert export.main() == 0
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before


@pytest.mark.proof
def test_multi_file_release_is_promoted_and_compared_with_the_champion(exported: Path) -> None:
    for stage in (parity, twin, promote):
        assert stage.main() == 0, stage.__name__
    evidence = Evidence.load(paths.EVIDENCE)
    report = ExportReport.load(paths.EXPORT_REPORT)
    assert evidence.subject.sha256 == report.subject.sha256
    assert {name: part.export for name, part in evidence.parts.items()} == report.records
    assert evidence.source.code is not None
    assert {*evidence.source.code.files} >= {"tests.pipelines.tiny", "tests.pipelines.tiny_chain"}
    first = PromotionReport.load(paths.PROMOTION)
    assert (first.outcome, first.sha256) == ("promoted", evidence.subject.sha256)
    version = MlflowClient(tracking_uri()).get_model_version_by_alias("tiny", "champion")
    assert str(version.version) == first.version

    override(["train.seed=1", "gate.incumbent={min_agreement: 0.5}"])
    for stage in (train, export, parity, promote):
        assert stage.main() == 0, stage.__name__
    compared = Decision.load(paths.DECISION).incumbent
    assert compared is not None
    assert (compared.state, compared.version) == ("compared", first.version)
    assert compared.outputs


def test_unknown_submodule_leaves_the_release_unchanged(exported: Path) -> None:
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    override(["release.parts={encoder: {}, head: {reference: nowhere}}"])
    with pytest.raises(ModelError, match="no submodule 'nowhere' for the part head"):
        export.main()
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before


def test_export_error_names_the_part(exported: Path) -> None:
    override(["release.parts={encoder: {input_names: [a, b]}, head: {reference: classifier}}"])
    with pytest.raises(ExportError, match="the part encoder: the example has 1 array"):
        export.main()
    assert len(list(exported.iterdir())) == 3


def test_max_flips_is_refused_for_a_multi_file_release(exported: Path) -> None:
    policy = PreprocessingPolicy(consumers=("opencv-linear",), max_flips=0)
    with pytest.raises(PolicyError, match="max_flips"):
        parity_of_preprocessing(
            exported / "release.yaml", PreprocessSpec.load(paths.PREPROCESSING), [], policy=policy
        )


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([s for s in MULTI_FILE if "chain" not in s], "parts and chain go together"),
        ([s for s in MULTI_FILE if "output=release" not in s], "output is a folder with parts"),
        ([s for s in MULTI_FILE if "parts=" not in s], "parts and chain go together"),
        (["release.output=release"], "output is a folder with parts"),
        (["release.output=../elsewhere"], "release.output"),
        ([s for s in MULTI_FILE if "input_names" not in s], "export.input_names names the tensors"),
        ([*MULTI_FILE, "release.chain=nonsense"], "release.chain"),
        ([*MULTI_FILE, "release.parts={1: {}}"], "release.parts"),
        ([*MULTI_FILE, "release.parts={head: {output_names: [a, a]}}"], "repeated: a"),
        ([*MULTI_FILE, "release.parts={head: {axes: 1}}"], "release.parts.head.axes"),
        ([*MULTI_FILE, "release.parts={head: {file: h.onnx}}"], "export writes NAME.onnx for each"),
        ([*MULTI_FILE, "release.parts={head: {inputs: x.npy}}"], "on what the chain gives it"),
    ],
)
def test_inconsistent_release_settings_are_refused(
    project: Path, settings: list[str], expected: str
) -> None:
    before = paths.PARAMS.read_bytes()
    with pytest.raises(PolicyError, match=expected.replace(".", r"\.")):
        override(settings)
    assert paths.PARAMS.read_bytes() == before
    check_all(paths.PARAMS)


@pytest.mark.parametrize("name", ["parts", "chain"])
def test_setting_outside_its_section_is_refused(project: Path, name: str) -> None:
    """No stage would read the setting."""
    paths.PARAMS.write_text(f"{paths.PARAMS.read_text()}\n{name}: {{encoder: {{}}}}\n")
    with pytest.raises(PolicyError, match=f"'{name}:' stands beside .* Move it into 'release:'"):
        ReleaseParams.load()
