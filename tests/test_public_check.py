"""gate.check and `gate check` on complete files."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel
from PIL import Image
from torch import nn

from gate import cli
from gate.api import check as check_
from gate.data.samples import SampleSet
from gate.decision.champion import Champion
from gate.decision.check_result import Verdict
from gate.errors import DataError, DigestMismatch, EvidenceError, GateError, PolicyError
from gate.golden.folder import read_golden
from gate.measure.job import EvaluationData, Reference
from gate.model.loading import build_model
from gate.onnx_file.tested_file import ExportNote
from gate.policy.policy import Policy
from gate.policy.sections import ChampionPolicy, PreprocessingPolicy
from gate.preprocess.implementations import pillow_preprocess
from gate.preprocess.pictures import pictures_in
from gate.preprocess.spec import PreprocessSpec, Resize
from gate.records.evidence import Evidence, Source
from gate.storage.digest import Digest
from tests.small_project import SAMPLES, create_project

SOURCE = Source(factory="tests:built")


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = create_project()
    monkeypatch.chdir(folder)
    return folder


def test_good_file_passes_with_complete_evidence(project: Path) -> None:
    reference = Reference.from_factory(
        "small_models:build", checkpoint=project / "weights.safetensors"
    )
    workload = EvaluationData.open(
        project / "images.npy", labels=project / "labels.npy", batch_size=24
    )
    observed: list[tuple[int, int]] = []
    verdicted = check_(
        project / "good.onnx",
        reference=reference,
        data=workload,
        progress=lambda done, total: observed.append((done, total)),
    )
    evidence, decision = verdicted.evidence, verdicted.decision
    assert decision.verdict is Verdict.PASS
    assert decision.runtimes == ("ort-cpu", "ort-cpu-optimized")
    assert decision.subject_sha256 == Digest.from_file(project / "good.onnx")
    assert decision.evidence_sha256 == evidence.digest()
    assert decision.policy_sha256 == verdicted.policy.digest()
    assert evidence.source.checkpoint_sha256 == Digest.from_file(project / "weights.safetensors")
    assert evidence.source.labels_sha256 == Digest.from_file(project / "labels.npy")
    assert evidence.dataset.labelled
    done, total = observed[-1]
    assert done == total > SAMPLES


def test_policy_of_another_type_is_refused() -> None:
    with pytest.raises(PolicyError, match="dict"):
        check_("model.onnx", nn.Linear(2, 2), np.zeros((4, 2)), {"min_samples": 3})  # type: ignore[arg-type]


def test_columns_give_the_same_result_as_arrays(project: Path) -> None:
    images, labels = (np.load(project / f"{name}.npy") for name in ("images", "labels"))
    pixels = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    pq.write_table(pa.table({"input": pixels, "label": labels}), project / "samples.parquet")
    reference = Reference.from_factory("small_models:build")
    plain, columns = (
        check_(project / "good.onnx", reference=reference, data=workload).evidence
        for workload in (
            EvaluationData.open(project / "images.npy", labels=project / "labels.npy"),
            EvaluationData.open("samples.parquet"),
        )
    )
    assert columns.dataset == plain.dataset
    assert (
        columns.source.labels_sha256
        == SampleSet.from_arrays({"label": labels.astype(int)}).digest()
    )
    for item, second in zip(plain.runtimes, columns.runtimes, strict=True):
        assert item.outputs == second.outputs


def test_pictures_are_preprocessed_by_the_recorded_spec(project: Path) -> None:
    (project / "small_data.py").write_text(
        "from PIL import Image\n"
        "def eval_set():\n"
        "    return [(Image.new('RGB', (9, 12), (i, 2 * i, 3 * i)), i % 5) for i in range(32)]\n"
    )
    spec = PreprocessSpec(resize=Resize(size=(8, 8)))
    (project / "spec.json").write_text(spec.to_json())
    workload = EvaluationData.open("small_data:eval_set", preprocessing=project / "spec.json")
    expected = pillow_preprocess(np.full((12, 9, 3), (7, 14, 21), np.uint8), spec)
    np.testing.assert_array_equal(workload.samples.at([7])["input"], expected[None])
    assert workload.labels is not None
    assert workload.labels.tolist() == [i % 5 for i in range(32)]

    model = project / "coloured.onnx"
    evidence = check_(
        model, reference=Reference.from_factory("small_models:coloured"), data=workload
    ).evidence
    assert evidence.source.preprocess_sha256 == spec.digest()
    (project / "other.json").write_text(PreprocessSpec.imagenet().to_json())
    second = Reference.from_factory("small_models:coloured", preprocessing=project / "other.json")
    with pytest.raises(DataError, match="different preprocessing specs"):
        check_(model, reference=second, data=workload)


def test_failing_champion_matters_only_when_a_comparison_is_required(project: Path) -> None:
    reference = Reference.from_factory("small_models:build")
    workload = EvaluationData.open(project / "images.npy")
    plain = check_(project / "good.onnx", reference=reference, data=workload)
    subject = plain.evidence.subject.model_copy(update={"sha256": Digest.from_bytes(b"another")})
    champion = Champion(
        state="proven", version="1", sha256=subject.sha256, onnx_path=project / "lost.onnx",
        evidence=plain.evidence.model_copy(update={"subject": subject}),
    )  # fmt: skip
    data = replace(workload, against=champion)
    verdicted = check_(project / "good.onnx", reference=reference, data=data)
    assert verdicted.decision.passed
    assert "lost.onnx" in str(verdicted.change.absent)
    strict_policy = verdicted.policy.model_copy(
        update={"incumbent": ChampionPolicy(min_agreement=0.9)}
    )
    with pytest.raises(GateError, match=r"lost\.onnx"):
        check_(project / "good.onnx", reference=reference, data=data, policy=strict_policy)


def convert_to_float16(path: Path, converted: Path) -> Path:
    """Convert the file with ONNX Runtime's tool."""
    half = OnnxModel(convert_float_to_float16(onnx.load(path), keep_io_types=True))
    half.topological_sort()
    onnx.save(half.model, converted)
    return converted


@pytest.mark.further
@pytest.mark.parametrize(
    ("file", "precision", "code"),
    [
        ("good.onnx", None, 1),
        ("good.onnx", "reduced", 0),
        ("worse.onnx", "reduced", 1),
    ],
)
def test_float16_file_passes_with_reduced_precision_only(
    project: Path, tmp_path: Path, file: str, precision: str | None, code: int, capsys
) -> None:
    """`worse.onnx` has a different bias, by 1 % of the logits."""
    worse = onnx.load(project / "good.onnx")
    bias = next(t for t in worse.graph.initializer if list(t.dims) == [5])
    moved = numpy_helper.to_array(bias) + np.float32(0.05)
    bias.CopyFrom(numpy_helper.from_array(moved, bias.name))
    onnx.save(worse, tmp_path / "worse.onnx")
    source = {"good.onnx": project / "good.onnx", "worse.onnx": tmp_path / "worse.onnx"}[file]
    half = convert_to_float16(source, tmp_path / "half.onnx")
    command = ["check", str(half), "--reference", "small_models:build", "--inputs", "images.npy"]
    chosen = ["--precision", precision] if precision else []
    assert cli.main([*command, *chosen]) == code
    out = capsys.readouterr().out
    assert ("on purpose by --precision reduced" in out) is (precision is None)
    if code and precision:
        (looking,) = (line for line in out.splitlines() if "gate locate" in line)
        assert looking.endswith("--precision reduced")
        arguments = shlex.split(looking.partition("gate ")[2])
        assert cli.main([*arguments, "--json"]) == 1
        layers = json.loads(capsys.readouterr().out)["layers"]
        assert [layer["module"] for layer in layers if layer["verdict"] == "source"] == ["4"]


@pytest.mark.parametrize("name", ["check", "locate"])
def test_custom_policy_states_its_precision(project: Path, name: str, capsys) -> None:
    command = [name, "good.onnx", "--reference", "small_models:build", "--inputs", "images.npy"]
    (project / "own.yaml").write_text("runtimes: {}\n")
    assert cli.main([*command, "--policy", "own.yaml", "--precision", "reduced"]) == 2
    assert "combined with own.yaml. Set" in capsys.readouterr().err


def test_task_is_not_weakened_by_a_file_without_classes(project: Path) -> None:
    """The model returns logits; a file that returns images instead is not judged as tensors."""
    images = np.random.default_rng(0).normal(size=(8, 1, 8, 8)).astype(np.float32)
    workload = EvaluationData(
        SampleSet.from_arrays({"image": images, "scale": np.ones_like(images[..., :1, :1])})
    )

    class Classifier(nn.Module):
        def forward(self, image: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (image * scale).flatten(1)

    verdicted = check_(
        project / "field.onnx", reference=Reference(Classifier(), SOURCE), data=workload
    )
    assert verdicted.decision.verdict is Verdict.FAIL


def test_model_that_fails_on_the_batch_is_an_error(project: Path) -> None:
    reference = Reference(nn.Linear(3, 2), SOURCE)
    with pytest.raises(EvidenceError, match="the reference model can't compute"):
        check_(
            project / "good.onnx",
            reference=reference,
            data=EvaluationData.open(project / "images.npy"),
        )


def test_file_changed_during_the_check_is_an_error(project: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes((project / "good.onnx").read_bytes())

    def swap(_done: int, _total: int) -> None:
        path.write_bytes((project / "bad.onnx").read_bytes())

    with pytest.raises(DigestMismatch):
        check_(
            path,
            reference=Reference.from_factory("small_models:build"),
            data=EvaluationData.open(project / "images.npy"),
            progress=swap,
        )


def policy_with_consumers(*consumers: str, images: int = 3) -> Policy:
    """Return the built-in policy, with parity of preprocessing required."""
    settings = PreprocessingPolicy(consumers=consumers, min_images=images)
    return Policy.default().model_copy(update={"preprocessing": settings})


def pictures(folder: Path) -> tuple[Path, ...]:
    """Write three images with edges that are larger than the model's input; return their folder."""
    generator = np.random.default_rng(0)
    for index in range(3):
        pixels = generator.integers(0, 255, (40 + index, 36, 3), dtype=np.uint8)
        pixels[10:20] = 255
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return (folder,)


@pytest.mark.parametrize(
    ("consumer", "given", "verdict"),
    [
        ("torchvision", True, Verdict.PASS),
        ("torchvision-no-antialias", True, Verdict.FAIL),
        ("torchvision", False, Verdict.ERROR),
    ],
)
def test_preprocessing_parity_when_required(
    project: Path, tmp_path: Path, consumer: str, given: bool, verdict: Verdict
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("resize: {size: [8, 8]}\n")
    result = pictures(tmp_path) if given else ()
    verdicted = check_(
        project / "coloured.onnx",
        reference=Reference.from_factory("small_models:coloured", preprocessing=spec),
        data=replace(EvaluationData.open(project / "coloured.npy"), pictures=result),
        policy=policy_with_consumers(consumer),
    )
    assert verdicted.decision.verdict is verdict
    source = verdicted.evidence.source
    assert source.preprocess_sha256 == PreprocessSpec.from_file(spec).digest()


def test_external_data_file_is_measured_with_its_data(project: Path, tmp_path: Path) -> None:
    path, spec = tmp_path / "large.onnx", tmp_path / "spec.yaml"
    model = onnx.load(project / "coloured.onnx")
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0, location="data")
    spec.write_text("resize: {size: [8, 8]}\n")
    settings = PreprocessingPolicy(consumers=("torchvision",), min_images=3, max_flips=1.0)
    verdicted = check_(
        path,
        reference=Reference.from_factory("small_models:coloured", preprocessing=spec),
        data=replace(EvaluationData.open(project / "coloured.npy"), pictures=pictures(tmp_path)),
        policy=Policy.default().model_copy(update={"preprocessing": settings}),
    )
    assert verdicted.decision.verdict is Verdict.PASS


def test_command_accepts_spec_and_pictures(project: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "spec.yaml").write_text("resize: {size: [8, 8]}\n")
    (tmp_path / "policy.yaml").write_text(
        "runtimes: {ort-cpu: {required: always, bounds: {noise_ratio: 1.5, top1_agreement: 1.0}}}\n"
        "preprocessing: {consumers: [torchvision], min_images: 3}\n"
    )
    (folder,) = pictures(tmp_path)
    command = ["check", "coloured.onnx", "--reference", "small_models:coloured", "--inputs", "coloured.npy",
               "--policy", str(tmp_path / "policy.yaml"), "--preprocessing",
               str(tmp_path / "spec.yaml")]  # fmt: skip
    assert cli.main(command) == 2
    assert cli.main([*command, "-v", "--pictures", str(folder)]) == 0
    assert "torchvision" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensors", "code", "says"),
    [
        (["phone=good.npy"], 0, "preprocessing_phone"),
        (["phone=bad.npy"], 1, "phone computes other pixels than in training"),
        (["phone=short.npy"], 2, "2 tensors for 3 pictures"),
        (["phone=good.npy", "laptop=good.npy"], 2, "whose consumers are phone"),
        (["phone=none.npy"], 2, "none.npy does not exist"),
        ([], 2, "there is no implementation phone"),
    ],
)
def test_command_checks_a_custom_consumer(
    project: Path, tmp_path: Path, capsys, tensors: list[str], code: int, says: str
) -> None:
    (folder,) = pictures(tmp_path)
    spec = PreprocessSpec(resize=Resize(size=(8, 8)))
    spec.save(tmp_path / "spec.json")
    (tmp_path / "policy.yaml").write_text(
        "runtimes: {ort-cpu: {required: always, bounds: {noise_ratio: 1.5, top1_agreement: 1.0}}}\n"
        "preprocessing: {consumers: [phone], min_images: 3, max_flips: 1.0}\n"
    )
    created = np.stack([pillow_preprocess(item.read(), spec) for item in pictures_in([folder])])
    for name, values in (("good", created), ("bad", created[:, ::-1]), ("short", created[:2])):
        np.save(tmp_path / f"{name}.npy", values)
    arguments = [f"--tensors={text.replace('=', f'={tmp_path}/')}" for text in tensors]
    command = ["check", "coloured.onnx", "--reference", "small_models:coloured",
               "--inputs", "coloured.npy", "--policy", str(tmp_path / "policy.yaml"),
               "--preprocessing", str(tmp_path / "spec.json"), "-v", "--pictures", str(folder), *arguments]  # fmt: skip
    assert cli.main(command) == code
    captured = capsys.readouterr()
    assert says in " ".join((captured.out + captured.err).split())


# --- The evidence contains the model's code -----------------------------------------------------


def test_evidence_and_export_record_the_model_code(project: Path, tmp_path, capsys) -> None:
    output = tmp_path / "model.onnx"
    export = ["export", "small_models:build", "--example-input", "images.npy"]
    assert cli.main([*export, "--output", str(output), "--strategy", "traced"]) == 0
    arguments = ["check", str(output), "--reference", "small_models:build", "--inputs"]
    arguments += ["images.npy", "--export-record", f"{output}.export.json"]
    assert cli.main([*arguments, "--report", str(tmp_path / "report")]) == 0
    assert "code changed between the export and the measurement" not in capsys.readouterr().out
    evidence = Evidence.load(tmp_path / "report/evidence.json")
    code = evidence.source.code
    assert code is not None
    assert code.files == {"small_models": Digest.from_file(project / "small_models.py")}
    assert set(code.packages) == {"torch"}
    assert evidence.export is not None
    assert evidence.export.code == code
    golden = read_golden(tmp_path / "report/golden").golden
    assert golden.origin.code_sha256 == code.digest()

    note_at = tmp_path / "model.onnx.export.json"
    note = ExportNote.load(note_at)
    old = code.model_copy(update={"files": {"small_models": Digest.from_bytes(b"old")}})
    record = note.record.model_copy(update={"code": old})
    note.model_copy(update={"record": record}).save(note_at)
    assert cli.main(arguments) == 0  # the measurement decides
    assert "code changed between the export and the measurement" in capsys.readouterr().out


def test_code_changed_during_the_check_is_an_error(tmp_path, monkeypatch) -> None:
    for name in ("good.onnx", "images.npy"):
        shutil.copy(create_project() / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "edited_models.py"
    source.write_text((create_project() / "small_models.py").read_text())
    reference = Reference.from_factory("edited_models:build")
    workload = EvaluationData.open(Path("images.npy"))

    def edit(done: int, total: int) -> None:
        source.write_text(source.read_text().replace("nn.ReLU", "nn.Sigmoid"))

    with pytest.raises(EvidenceError, match="changed while it was measured: edited_models"):
        check_(Path("good.onnx"), reference=reference, data=workload, progress=edit)


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input)


@pytest.mark.further
def test_model_object_records_the_code_of_its_class(project: Path) -> None:
    model = _Wrapped(build_model("small_models:build"))
    verdicted = check_(
        project / "good.onnx", reference=Reference(model, SOURCE),
        data=EvaluationData.open(project / "images.npy"),
    )  # fmt: skip
    code = verdicted.evidence.source.code
    assert code is not None
    assert __name__ in code.files
