"""Stage `train`: train a checkpoint here, or copy an existing one, reproducibly."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from gate.commands.progress import Bar, progress_bar
from gate.commands.result import ExitCode
from gate.errors import DataError, ModelError
from gate.mlflow_client.runs import RunLogger
from gate.model.checkpoint import load_checkpoint, save_checkpoint
from gate.storage import files
from pipelines import ci_files, paths, stage
from pipelines.model import build, check_labels
from pipelines.params import ModelParams, RegistryParams, TrainParams
from pipelines.run import Tracker

EVAL_BATCH = 128


@dataclass(frozen=True)
class Epoch:
    """Means over one epoch; `eval_*` are of the held-out split, accuracy in [0, 1]."""

    epoch: int
    train_loss: float
    eval_loss: float
    eval_accuracy: float


@dataclass(frozen=True)
class Split:
    """Images float32 (n, c, h, w), memory-mapped, and labels int64 (n,)."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples at these indices as tensors that own their memory."""
        chosen = indices.numpy()
        return torch.from_numpy(self.images[chosen]), torch.from_numpy(self.labels[chosen])


@ci_files.record_failure("train")
def main() -> int:
    """Write models/model.safetensors, the curves, and a separate MLflow run."""
    params, model_params = TrainParams.load(), ModelParams.load()
    tracker = Tracker(RegistryParams.load().experiment)
    _make_deterministic(params)
    model = build(model_params)
    if model_params.checkpoint is not None:
        load_checkpoint(model, Path(model_params.checkpoint))
    with tracker.new_run("train") as page:
        page.params(_settings(params, model_params))
        page.note("Training for the gate; the run 'gate' has the verdict.")
        history = _fit(model, params, page) if params.epochs else []
        model.eval()
        digest = save_checkpoint(model, paths.CHECKPOINT)
        _write_reports(history)
        page.tags({"checkpoint.sha256": digest})
        for report in (paths.TRAIN_METRICS, paths.TRAIN_CURVES):
            page.file(report)
    trained = f"{history[-1].eval_accuracy:.2%} on held-out samples" if history else "not trained"
    print(f"{model_params.name}, {trained}: {paths.CHECKPOINT} {digest}")
    return ExitCode.DONE


def _make_deterministic(params: TrainParams) -> None:
    """Set the seed and the number of threads, which changes the order of sums."""
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(params.threads)
    torch.manual_seed(params.seed)


def _fit(model: nn.Module, params: TrainParams, page: RunLogger) -> list[Epoch]:
    train = Split(np.load(paths.TRAIN_IMAGES, mmap_mode="r"), np.load(paths.TRAIN_LABELS))
    evaluation = Split(np.load(paths.EVAL_IMAGES, mmap_mode="r"), np.load(paths.EVAL_LABELS))
    _check_outputs(model, train, evaluation)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=params.learning_rate, momentum=params.momentum
    )
    shuffle = torch.Generator().manual_seed(params.seed)
    batches = -(-len(train.labels) // params.batch_size)
    # Decay the learning rate to zero, so that the last steps hardly depend on chance.
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, params.epochs)
    history: list[Epoch] = []
    with progress_bar("train", total=params.epochs * batches) as progress:
        for number in range(1, params.epochs + 1):
            shuffled = torch.randperm(len(train.labels), generator=shuffle)
            order = torch.split(shuffled, params.batch_size)
            loss = _train_epoch(model, optimizer, train, order, progress)
            decay.step()
            eval_loss, accuracy = _evaluate(model, evaluation)
            epoch = Epoch(number, loss, eval_loss, accuracy)
            history.append(epoch)
            progress.step(f"epoch {number}: {accuracy:.2%} held out", steps=0)
            numbers = {key: value for key, value in asdict(epoch).items() if key != "epoch"}
            page.metrics(numbers, step=number)
    return history


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Split,
    order: tuple[torch.Tensor, ...],
    progress: Bar,
) -> float:
    """Run one epoch and return the mean loss. Raises ModelError as soon as it is not finite."""
    model.train()
    total, samples = 0.0, 0
    for indices in order:
        if len(indices) == 1 and len(order) > 1:
            progress.step()
            continue  # BatchNorm can't compute a variance from one sample
        images, labels = train.batch(indices)
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(images), labels)
        if not torch.isfinite(loss):
            raise ModelError(
                f"the training loss is {loss.item()}: training diverged. "
                "Lower train.learning_rate, or look at the data."
            )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total, samples = total + loss.item() * len(indices), samples + len(indices)
        progress.step(f"loss {loss.item():.3f}")
    return total / samples


@torch.no_grad()
def _evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Return the mean cross entropy and the top-1 accuracy."""
    model.eval()
    loss, right = 0.0, 0
    for indices in torch.split(torch.arange(len(split.labels)), EVAL_BATCH):
        images, labels = split.batch(indices)
        logits = model(images)
        loss += functional.cross_entropy(logits, labels, reduction="sum").item()
        right += int((logits.argmax(1) == labels).sum())
    return loss / len(split.labels), right / len(split.labels)


@torch.no_grad()
def _check_outputs(model: nn.Module, *splits: Split) -> None:
    images, _ = splits[0].batch(torch.arange(1))
    model.eval()
    logits = model(images)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        raise DataError(
            "training needs a model that returns logits (batch, classes). "
            "Set train.epochs: 0 to use this model as it is."
        )
    for split, name in zip(splits, ("training", "evaluation"), strict=True):
        check_labels(split.labels, logits.shape[1], split=name)


def _settings(params: TrainParams, model: ModelParams) -> dict[str, object]:
    sections = (("train", params), ("model", model))
    return {f"{name}.{key}": value for name, section in sections for key, value in section}


def _write_reports(history: list[Epoch]) -> None:
    last = asdict(history[-1]) if history else {"epoch": 0}
    files.write_text(paths.TRAIN_METRICS, json.dumps(last, indent=2) + "\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(_rows(history))
    files.write_text(paths.TRAIN_CURVES, text.getvalue())


def _rows(history: list[Epoch]) -> Iterator[list[object]]:
    yield [field.name for field in fields(Epoch)]
    for epoch in history:
        yield list(asdict(epoch).values())


if __name__ == "__main__":
    stage.run(main)
