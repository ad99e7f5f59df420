from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from gate.errors import CheckpointError, StorageError
from gate.model.checkpoint import load_checkpoint, save_checkpoint
from gate.storage.digest import Digest
from tests.export.nets import Masked, Small, TiedWeights, seeded

State = dict[str, Any]


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def rename_for_data_parallel(state: State) -> State:
    return {f"module.{key}": value for key, value in state.items()}


def rename_for_compiled(state: State) -> State:
    first, *rest = state.items()
    path, _, name = first[0].rpartition(".")
    return {f"_orig_mod.{path}._orig_mod.{name}": first[1]} | {f"_orig_mod.{k}": v for k, v in rest}


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        rename_for_compiled,
        lambda state: rename_for_data_parallel(rename_for_compiled(state)),
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
        lambda state: {"model_state_dict": state},
        rename_for_data_parallel,
        lambda state: {"state_dict": rename_for_data_parallel(state)},
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_common_checkpoint_layouts_are_loaded(
    tmp_path: Path, wrap: Callable[[State], State], suffix: str
) -> None:
    trained, fresh = seeded(seed=1), seeded(seed=2)
    path = tmp_path / f"model{suffix}"
    torch.save(wrap(trained.state_dict()), path)
    assert load_checkpoint(fresh, path) == Digest.from_file(path)
    assert same_weights(trained, fresh)


@pytest.mark.parametrize("kind", [Small, TiedWeights, Masked])
def test_safetensors_round_trip(tmp_path: Path, kind: type[nn.Module]) -> None:
    trained, fresh = seeded(kind, seed=1), seeded(kind, seed=2)
    path = tmp_path / "model.safetensors"
    assert save_checkpoint(trained, path) == load_checkpoint(fresh, path) == Digest.from_file(path)
    assert same_weights(trained, fresh)


def test_equal_weights_give_equal_bytes(tmp_path: Path) -> None:
    first = save_checkpoint(seeded(seed=1), tmp_path / "one.safetensors")
    resaved = save_checkpoint(seeded(seed=1), tmp_path / "again.safetensors")
    second = save_checkpoint(seeded(seed=2), tmp_path / "other.safetensors")
    assert first == resaved != second


def test_omitted_tied_weights_are_restored(tmp_path: Path) -> None:
    trained, fresh = seeded(TiedWeights, seed=1), seeded(TiedWeights, seed=2)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(trained, str(path))
    assert len(safetensors.torch.load_file(path)) == 1
    load_checkpoint(fresh, path)
    assert same_weights(trained, fresh)
    assert fresh.encode.weight is fresh.decode.weight


def test_prefix_module_of_the_model_is_kept(tmp_path: Path) -> None:
    trained, fresh = (nn.DataParallel(seeded(seed=seed)) for seed in (1, 2))
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    load_checkpoint(fresh, tmp_path / "model.pt")
    assert same_weights(trained, fresh)


class RunsCode:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def save_as_zip(state: State, path: Path) -> None:
    torch.save(state, path)


def save_as_legacy(state: State, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [save_as_zip, save_as_legacy])
def test_malicious_checkpoint_does_not_run_code(
    tmp_path: Path, write: Callable[[State, Path], None]
) -> None:
    path, proof = tmp_path / "model.pt", tmp_path / "proof"
    write(seeded().state_dict() | {"extra": RunsCode(proof)}, path)
    model = seeded(seed=2)
    with pytest.raises(
        CheckpointError, match=r"would run when it is loaded.*mkdir.*did not run it"
    ):
        load_checkpoint(model, path)
    assert not proof.exists()
    assert same_weights(model, seeded(seed=2))
    torch.load(path, weights_only=False)  # the file does run code if unpickled
    assert proof.exists()


@pytest.mark.parametrize("protocol", [0, 5])
def test_malicious_pickle_does_not_run_code(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "model.pt").write_bytes(pickle.dumps(RunsCode(tmp_path / "proof"), protocol))
    with pytest.raises(CheckpointError):
        load_checkpoint(seeded(), tmp_path / "model.pt")
    assert not (tmp_path / "proof").exists()


def test_pickled_module_is_refused(tmp_path: Path) -> None:
    torch.save(seeded(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"nets\.Small.*Save model\.state_dict"):
        load_checkpoint(seeded(), tmp_path / "model.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 1, 8, 100, -1])
def test_truncated_checkpoint_is_refused(tmp_path: Path, suffix: str, kept: int) -> None:
    path = tmp_path / f"model{suffix}"
    if suffix == ".pt":
        torch.save(seeded(seed=1).state_dict(), path)
    else:
        save_checkpoint(seeded(seed=1), path)
    path.write_bytes(path.read_bytes()[:kept])
    model = seeded(seed=2)
    with pytest.raises(CheckpointError, match="not a complete"):
        load_checkpoint(model, path)
    assert same_weights(model, seeded(seed=2))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.pt", b"this is text, no checkpoint", "not a complete PyTorch checkpoint"),
        ("model.safetensors", b"this is text, no checkpoint", "not a complete safetensors"),
        ("model.ckpt", b"anything", "expected .pt, .pth or .safetensors"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(seeded(), tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_unreadable_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match="cannot read"):
        load_checkpoint(seeded(), tmp_path / "model.pt")


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(seeded(), tmp_path / "no.pt")
    with pytest.raises(CheckpointError, match="is a folder"):
        load_checkpoint(seeded(), tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "an empty dict"),
        ([torch.ones(2)], "holds list"),
        (torch.ones(2), "holds Tensor"),
        ({"fc.weight": [1.0, 2.0]}, "'fc.weight' is list"),
        ({3: torch.ones(2)}, "the entry 3"),
        ({"state_dict": {}}, "an empty dict"),
        ({"state_dict": [1]}, "'state_dict' is list"),
    ],
)
def test_invalid_state_dict_is_refused(tmp_path: Path, content: object, says: str) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(seeded(), tmp_path / "model.pt")


def resize_weights(state: State) -> State:
    return Small(width=5).state_dict()


def remove_head(state: State) -> State:
    return {key: value for key, value in state.items() if not key.startswith("fc.")}


def replace_weights(state: State) -> State:
    return nn.Linear(3, 3).state_dict()


def add_keys(state: State) -> State:
    return state | {f"layer{index}": torch.ones(1) for index in range(5)}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            resize_weights,
            r"7 other shapes: conv.weight is 5x2x3x3, the model's is 4x2x3x3.*and 4 more",
        ),
        (remove_head, r"2 missing: fc.weight, fc.bias\."),
        (replace_weights, r"9 missing: conv.weight.*2 unexpected: weight, bias"),
        (add_keys, r"5 unexpected: layer0, layer1, layer2 and 2 more"),
    ],
)
def test_mismatching_architecture_changes_nothing(
    tmp_path: Path, spoil: Callable[[State], State], says: str
) -> None:
    torch.save(spoil(seeded(seed=1).state_dict()), tmp_path / "model.pt")
    model = seeded(seed=2)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(model, tmp_path / "model.pt")
    assert same_weights(model, seeded(seed=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["conv.weight", "fc.bias", "bn.running_var"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_nonfinite_weights_are_refused(tmp_path: Path, value: float, key: str, suffix: str) -> None:
    state = {name: tensor.clone() for name, tensor in seeded(seed=1).state_dict().items()}
    state[key].view(-1)[1] = value
    path = tmp_path / f"model{suffix}"
    if suffix == ".pt":
        torch.save(state, path)
    else:
        safetensors.torch.save_file(state, path)
    model = seeded(seed=2)
    with pytest.raises(CheckpointError, match=f"{key} has 1 of .* NaN or infinite"):
        load_checkpoint(model, path)
    assert same_weights(model, seeded(seed=2))


def test_nonfinite_weights_are_not_saved(tmp_path: Path) -> None:
    model = seeded()
    save_checkpoint(model, tmp_path / "model.safetensors")
    before = Digest.from_file(tmp_path / "model.safetensors")
    model.fc.bias.data[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"fc\.bias"):
        save_checkpoint(model, tmp_path / "model.safetensors")
    assert Digest.from_file(tmp_path / "model.safetensors") == before


def test_only_safetensors_are_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must end in \.safetensors"):
        save_checkpoint(seeded(), tmp_path / "model.pt")


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def test_extra_state_is_loaded_from_torch_files_and_not_saved(tmp_path: Path) -> None:
    model = WithExtraState(2, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    load_checkpoint(model, tmp_path / "model.pt")
    assert model.steps == 3
    with pytest.raises(CheckpointError, match="_extra_state is not a tensor"):
        save_checkpoint(model, tmp_path / "model.safetensors")


def test_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        save_checkpoint(seeded(), tmp_path / "file" / "model.safetensors")
