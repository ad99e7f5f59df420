from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import ShuffleNet_V2_X0_5_Weights, shufflenet_v2_x0_5

from gate.errors import CheckpointError, ModelError
from gate.model.loading import torchvision_model
from gate.storage.digest import Digest

NAME = "shufflenet_v2_x0_5"
ENTRY = ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(3)
    return shufflenet_v2_x0_5(weights=None)


class FakeWeightServer:
    """A source of weights for torchvision: file:// addresses and an empty hub cache."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.cache = folder / "torch_home" / "hub" / "checkpoints"
        monkeypatch.setenv("TORCH_HOME", str(folder / "torch_home"))

    def offer(self, content: Any) -> str:
        """Serve `content` under a name with its hash; return the name."""
        self.folder.mkdir(exist_ok=True)
        torch.save(content, self.folder / "file.pth")
        name = f"tiny-{Digest.from_file(self.folder / 'file.pth').hex[:8]}.pth"
        (self.folder / "file.pth").rename(self.folder / name)
        self.monkeypatch.setattr(ENTRY.value, "url", (self.folder / name).as_uri())
        return name


@pytest.fixture
def weights_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWeightServer:
    return FakeWeightServer(tmp_path / "shelf", monkeypatch)


@pytest.mark.parametrize("classes", [None, 7])
def test_model_without_weights(classes: int | None) -> None:
    model = torchvision_model(NAME, weights=None, num_classes=classes)
    assert model.fc.out_features == (classes or 1000)


@pytest.mark.parametrize("weights", ["IMAGENET1K_V1", "DEFAULT", f"{type(ENTRY).__name__}.DEFAULT"])
def test_named_weights_are_downloaded(
    weights_cache: FakeWeightServer,
    trained: nn.Module,
    weights: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name = weights_cache.offer(trained.state_dict())
    model = torchvision_model(NAME, weights=weights, num_classes=None)
    for key, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    assert (weights_cache.cache / name).exists()
    assert capfd.readouterr().out == ""


def test_cached_weights_are_used(weights_cache: FakeWeightServer, trained: nn.Module) -> None:
    name = weights_cache.offer(trained.state_dict())
    weights_cache.cache.mkdir(parents=True)
    (weights_cache.folder / name).rename(weights_cache.cache / name)
    model = torchvision_model(NAME, weights="IMAGENET1K_V1", num_classes=1000)
    assert torch.equal(model.fc.weight, trained.fc.weight)


def test_different_number_of_classes_replaces_the_head(
    weights_cache: FakeWeightServer, trained: nn.Module
) -> None:
    weights_cache.offer(trained.state_dict())
    model = torchvision_model(NAME, weights="IMAGENET1K_V1", num_classes=10)
    for key, value in trained.state_dict().items():
        if key.startswith("fc."):
            assert model.state_dict()[key].shape[0] == 10
        else:
            assert torch.equal(model.state_dict()[key], value)
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_failed_download_names_the_remedy(
    weights_cache: FakeWeightServer, trained: nn.Module
) -> None:
    name = weights_cache.offer(trained.state_dict())
    (weights_cache.folder / name).unlink()
    says = rf"cannot download.*Place the file {name} in .*checkpoints.*local checkpoint"
    with pytest.raises(CheckpointError, match=says):
        torchvision_model(NAME, weights="IMAGENET1K_V1", num_classes=None)


def test_truncated_cached_weights_are_refused(
    weights_cache: FakeWeightServer, trained: nn.Module
) -> None:
    name = weights_cache.offer(trained.state_dict())
    weights_cache.cache.mkdir(parents=True)
    (weights_cache.cache / name).write_bytes((weights_cache.folder / name).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="its name promises"):
        torchvision_model(NAME, weights="IMAGENET1K_V1", num_classes=None)


class RunsCode:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_malicious_weights_file_does_not_run_code(
    weights_cache: FakeWeightServer, trained: nn.Module, tmp_path: Path
) -> None:
    weights_cache.offer(dict(trained.state_dict()) | {"extra": RunsCode(tmp_path / "proof")})
    with pytest.raises(CheckpointError, match="UnpicklingError"):
        torchvision_model(NAME, weights="IMAGENET1K_V1", num_classes=None)
    assert not (tmp_path / "proof").exists()


def test_weights_of_a_different_model_are_refused(weights_cache: FakeWeightServer) -> None:
    weights_cache.offer(nn.Linear(2, 2).state_dict())
    with pytest.raises(ModelError, match=f"cannot build {NAME}"):
        torchvision_model(NAME, weights="IMAGENET1K_V1", num_classes=None)


@pytest.mark.parametrize(
    ("name", "weights", "classes", "says"),
    [
        ("resnet1", None, None, "Did you mean resnet18"),
        ("%$", None, None, "list_models"),
        (NAME, "IMAGENET", None, "it has: IMAGENET1K_V1, DEFAULT"),
        (NAME, None, 0, "expected at least 1"),
    ],
)
def test_unknown_names_are_refused(
    name: str, weights: str | None, classes: int | None, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        torchvision_model(name, weights=weights, num_classes=classes)


@pytest.mark.parametrize("name", ["googlenet", "lraspp_mobilenet_v3_large"])
def test_builders_do_not_warn_or_download(weights_cache: FakeWeightServer, name: str) -> None:
    assert isinstance(torchvision_model(name, weights=None, num_classes=4), nn.Module)
    assert not weights_cache.cache.exists()
