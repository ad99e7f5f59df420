"""Generate random weights with the statistics of trained ones within a second.

Training would produce similar numbers more slowly: BatchNorm statistics that fit the data, channels
that differ, and scores that vary between samples.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays

_CALIBRATION, _BATCH = 64, 16
_SPREAD = 2.0
"""Standard deviation of the scores over samples and classes."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d)


def build_trained(architecture: Architecture, *, seed: int = 0) -> nn.Module:
    """Return the model in eval mode with weights that depend only on the seed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = architecture.make().eval()
        arrays = architecture.draw(_CALIBRATION, 1000 + seed)
        settle = architecture.settle or _settle
        settle(model, architecture, arrays)
    return model


def _settle(model: nn.Module, architecture: Architecture, arrays: Arrays) -> None:
    for module in model.modules():
        _randomize(module)
    calibrate(model, arrays)
    center_logits(model, model.get_submodule(architecture.head), arrays)


def calibrate(model: nn.Module, arrays: Arrays) -> None:
    """Set the running statistics of each BatchNorm to the mean over batches of `arrays`."""
    batch_norms = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    norms = [m for m in model.modules() if isinstance(m, batch_norms)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    count = len(next(iter(arrays.values())))
    with torch.no_grad():
        for start in range(0, count, _BATCH):
            model(*to_tensors(arrays, start, start + _BATCH))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def train_further(model: nn.Module, arrays: Arrays, *, steps: int) -> nn.Module:
    """Return a copy in eval mode after `steps` more steps of SGD (rate 0.01) on random classes."""
    copied = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.01, momentum=0.9)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for step in range(steps):
            scores = copied(*to_tensors(arrays, step * 4, step * 4 + 8))
            labels = torch.randint(0, scores.shape[1], (8,))
            loss = functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return copied.eval()


def to_tensors(arrays: Arrays, start: int, stop: int) -> tuple[torch.Tensor, ...]:
    """Return samples `start` to `stop` as tensors, in the order of the inputs."""
    return tuple(torch.from_numpy(array[start:stop].copy()) for array in arrays.values())


def _randomize(module: nn.Module) -> None:
    """Randomize the affine parameters of norms, and set biases to values other than zero."""
    if isinstance(module, _NORMS) and module.weight is not None:
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, 0.0, 0.2)
    elif isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.normal_(module.bias, 0.0, 0.1)


def center_logits(model: nn.Module, head: nn.Module, arrays: Arrays) -> None:
    """Set the mean of each class's scores to 0 and the deviation of all to `_SPREAD`."""
    outputs: list[torch.Tensor] = []
    handle = head.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    model(*to_tensors(arrays, 0, _CALIBRATION))
    handle.remove()
    channel_axis = -1 if isinstance(head, nn.Linear) else 1
    scores = outputs[0].movedim(channel_axis, -1).flatten(0, -2)
    mean = scores.mean(0)
    scale = _SPREAD / (scores - mean).std()
    head.weight.mul_(scale)
    if head.bias is not None:
        head.bias.sub_(mean).mul_(scale)
