from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file

from gate import Digest, GateError
from pipelines import paths, prepare, train
from pipelines.override import override
from pipelines.run import recorded_run, tracking_uri
from tests.exhaustive import exhaustive
from tests.pipelines.tiny import network


def training_run() -> tuple[MlflowClient, str]:
    reference = recorded_run("train")
    assert reference is not None
    return MlflowClient(tracking_uri()), reference.run_id


def test_training_learns_and_writes_its_curves(trained_files: Path) -> None:
    history = (trained_files / paths.TRAIN_CURVES).read_text().splitlines()
    metrics = json.loads((trained_files / paths.TRAIN_METRICS).read_text())
    assert history[0] == "epoch,train_loss,eval_loss,eval_accuracy"
    assert len(history) == 2
    assert metrics["eval_accuracy"] > 0.85  # one epoch of a tiny network


@exhaustive
@pytest.mark.proof
def test_training_is_reproducible_by_seed(project: Path) -> None:
    prepare.main()
    override(["train.epochs=2"])
    digests = []
    for seed in (0, 0, 1):
        override([f"train.seed={seed}"])
        assert train.main() == 0
        digests.append(Digest.from_file(paths.CHECKPOINT))
    assert digests[0] == digests[1] != digests[2]
    client, run_id = training_run()
    run = client.get_run(run_id)
    curve = client.get_metric_history(run_id, "eval_accuracy")
    assert run.info.status == "FINISHED"
    assert [point.step for point in curve] == [1, 2]
    assert run.data.tags["checkpoint.sha256"] == str(digests[2])
    assert run.data.params["train.seed"] == "1"


def test_zero_epochs_keep_the_given_weights(project: Path) -> None:
    prepare.main()
    torch.manual_seed(7)
    weights = network().state_dict()
    save_file(weights, project / "mine.safetensors")
    override(["train.epochs=0", "model.checkpoint=mine.safetensors"])
    assert train.main() == 0
    torch.testing.assert_close(load_file(paths.CHECKPOINT), weights, rtol=0, atol=0)
    assert json.loads(paths.TRAIN_METRICS.read_text()) == {"epoch": 0}


def test_architecture_by_name(project: Path) -> None:
    prepare.main()
    override(["model.factory=null", "model.architecture=squeezenet1_1", "train.epochs=0"])
    assert train.main() == 0
    assert paths.CHECKPOINT.stat().st_size > 1_000_000


def test_diverging_training_keeps_the_old_checkpoint(trained: Path) -> None:
    before = paths.CHECKPOINT.read_bytes()
    override(["train.learning_rate=1.0e+30"])
    with pytest.raises(GateError, match="diverged"):
        train.main()
    assert paths.CHECKPOINT.read_bytes() == before
    client = MlflowClient(tracking_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("parity-gate").experiment_id])
    assert run.info.status == "FAILED"


def test_labels_outside_the_classes_are_refused(trained: Path) -> None:
    labels = np.load(paths.EVAL_LABELS)
    labels[5] = 10
    np.save(paths.EVAL_LABELS, labels)
    with pytest.raises(GateError, match="reach from 0 to 10, the model has 10 classes"):
        train.main()


def test_missing_checkpoint_is_refused(trained: Path) -> None:
    override(["model.checkpoint=models/initial/none.safetensors"])
    with pytest.raises(GateError, match="does not exist"):
        train.main()
