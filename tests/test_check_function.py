"""gate.check accepts common Python objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gate
from gate.errors import DataError, ModelError, PolicyError
from tests.small_project import create_project

Images = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = create_project()
    monkeypatch.chdir(folder)
    return folder


class Named(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input": self.images[index]}


def loader(images: Images, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.from_numpy(images)), **options)


def labelled(images: Images) -> DataLoader[Any]:
    labels = torch.arange(len(images)) % 5
    return DataLoader(TensorDataset(torch.from_numpy(images), labels), batch_size=7)


SAMPLES: dict[str, Callable[[Images], Any]] = {
    "path": lambda _: Path("images.npy"),
    "text": lambda _: "images.npy",
    "array": lambda images: images,
    "tensor": torch.from_numpy,
    "dict": lambda images: {"input": images},
    "dict of tensors": lambda images: {"input": torch.from_numpy(images).requires_grad_()},
    "loader": lambda images: loader(images, batch_size=7),
    "loader of dicts": lambda images: DataLoader(Named(torch.from_numpy(images)), batch_size=7),
    "loader with labels": labelled,
    "loader of single samples": lambda images: loader(images, batch_size=None),
    "dataset": lambda images: TensorDataset(torch.from_numpy(images)),
    "sample set": lambda images: gate.SampleSet.from_arrays({"input": images}),
}


@pytest.mark.parametrize("samples", SAMPLES)
def test_accepted_samples(project: Path, samples: str) -> None:
    images = np.load("images.npy")
    data = gate.EvaluationData.from_data(SAMPLES[samples](images))
    complete = {"input": images}
    assert data.samples.digest() == gate.SampleSet.from_arrays(complete).digest()
    assert (data.labels is not None) == (samples == "loader with labels")


def test_good_and_bad_file(project: Path) -> None:
    import small_models

    assert gate.check("good.onnx", "small_models:build", "images.npy").decision.passed
    policy = gate.Policy.default(task="tensors")
    wrong = gate.check("bad.onnx", small_models.build(), np.load("images.npy"), policy)
    assert not wrong.decision.passed
    assert wrong.policy == policy


def test_policy_by_path(project: Path, tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("task: tensors\nmin_samples: 65\n")
    result = gate.check(
        "good.onnx", "small_models:build", "images.npy", str(tmp_path / "gate.yaml")
    )
    assert "samples" in [check.name for check in result.decision.problems]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("good.onnx", 7, "images.npy"), ModelError),
        (("good.onnx", "small_models:nothing", "images.npy"), ModelError),
        (("good.onnx", "small_models:build", 7), DataError),
        (("good.onnx", "small_models:build", []), DataError),
        (("good.onnx", "small_models:build", "nosuch.npy"), DataError),
        (("good.onnx", "small_models:build", "images.npy", "nosuch.yaml"), PolicyError),
    ],
)
def test_invalid_argument_is_refused(
    project: Path, arguments: tuple[Any, ...], error: type
) -> None:
    with pytest.raises(error):
        gate.check(*arguments)


def test_commands_name_a_factory_only_if_the_caller_did(project: Path) -> None:
    import small_models

    for reference, shown in (("small_models:build", "small_models:build"),
                             (small_models.build(), "PKG.MODULE:FACTORY")):  # fmt: skip
        steps = gate.check("bad.onnx", reference, "images.npy").summary.steps
        commands = [step.command for step in steps if "--reference" in (step.command or "")]
        assert commands
        assert all(f"--reference {shown}" in command for command in commands)
