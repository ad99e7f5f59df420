"""Section 4: faults that no sample shows. Each names the inputs that show it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.world import sample_generators
from benchmarks.world.fault import DYNAMO_18, AppliedAfter, AppliedBefore, fault_of

_WORDS = {
    "hf-bert": "model.bert.embeddings.word_embeddings",
    "hf-distilbert": "model.distilbert.embeddings.word_embeddings",
    "hf-albert": "model.albert.embeddings.word_embeddings",
    "hf-llama": "model.model.embed_tokens",
    "hf-mpnet": "model.embeddings.word_embeddings",
    "hf-electra": "model.electra.embeddings.word_embeddings",
    "own-matrix-factorisation": "users",
    "own-dlrm": "tables.tables.0",
    "own-wide-and-deep": "deep.tables.0",
    "own-two-towers": "tables.tables.0",
    "own-next-item": "items",
}


def _tokens_of(arrays: Arrays) -> str:
    return next(name for name in ("input_ids", "history", "categories") if name in arrays)


def _unused(architecture: Architecture) -> int:
    """The largest row of the table that no sample looks up."""
    arrays = architecture.draw(architecture.count or 24, 0)
    ids = arrays[_tokens_of(arrays)]
    table = architecture.make().get_submodule(_WORDS[architecture.name])
    looked_up = set((ids[:, 0] if "categories" in arrays else ids).flatten().tolist())
    return max(set(range(table.weight.shape[0])) - looked_up)


def _looking_up(architecture: Architecture) -> Arrays:
    arrays = architecture.draw(8, 0)
    ids = arrays[_tokens_of(arrays)].copy()
    ids[:, 0] = _unused(architecture)
    return {**arrays, _tokens_of(arrays): ids}


_PLACES = tuple(_WORDS.items())


@fault_of("rare row", *_PLACES, ("hf-bert", _WORDS["hf-bert"], DYNAMO_18), reach=_looking_up)
def rare_row(layer: nn.Module, architecture: Architecture) -> None:
    """The row of the table that no sample looks up is zero."""
    layer.weight[_unused(architecture)] = 0.0


@fault_of("rare element", *_PLACES[:6], reach=_looking_up)
def rare_element(layer: nn.Module, architecture: Architecture) -> None:
    """One number of a row that no sample looks up has the other sign."""
    row = layer.weight[_unused(architecture)]
    row[int(row.abs().argmax())] *= -1


_POSITIONS = {
    "hf-bert": "model.bert.embeddings.position_embeddings",
    "hf-distilbert": "model.distilbert.embeddings.position_embeddings",
    "hf-gpt2": "model.transformer.wpe",
    "hf-opt": "model.model.decoder.embed_positions",
    "hf-bart": "model.embed_positions",
}


def _longer(_architecture: Architecture) -> Arrays:
    return sample_generators.text(8, 0, length=48, masked=False)


@fault_of("positions behind the samples", *_POSITIONS.items(), reach=_longer)
def far_positions(layer: nn.Module, _architecture: Architecture) -> None:
    """Positions from 30 on are those of another training; all samples have 16 words."""
    layer.weight[30:] = layer.weight[30:].flip(0)


def _rare_rows(architecture: Architecture) -> Arrays:
    rows = architecture.draw(16, 0)["rows"].copy()
    rows[:, 2] = 10.0
    return {"rows": rows}


@fault_of(
    "unused expert",
    ("own-experts", "experts.3"),
    ("own-experts", "experts.3", DYNAMO_18),
    reach=_rare_rows,
)
def unused_expert(layer: nn.Module, _architecture: Architecture) -> None:
    """The expert to which no sample is sent is that of another training."""
    layer.weight.copy_(layer.weight.flip(0))


@fault_of("unused expert", ("own-experts", "experts.3"), reach=_rare_rows)
def unused_bias(layer: nn.Module, _architecture: Architecture) -> None:
    """One bias of the expert to which no sample is sent is lost."""
    layer.bias[int(layer.bias.abs().argmax())] = 0.0


def _padded(_architecture: Architecture) -> Arrays:
    return sample_generators.text(16, 0)


@fault_of(
    "mask ignored",
    "hf-bert-unpadded",
    "hf-electra-unpadded",
    ("hf-bert-unpadded", "", DYNAMO_18),
    reach=_padded,
)
def mask_ignored(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The mask of the attention is taken for all ones, as it is in all samples."""
    return AppliedBefore(model, lambda ids, mask: (ids, mask * 0 + 1))


def _far(architecture: Architecture) -> Arrays:
    return {"rows": architecture.draw(32, 0)["rows"] * np.float32(8.0)}


@fault_of("missing clip", ("own-limited", "clip"), ("own-limited", "clip", DYNAMO_18), reach=_far)
def clip_left_out(_layer: nn.Module, _architecture: Architecture) -> nn.Module:
    """Readings are not clipped where the instrument ends; no sample gets there."""
    return nn.Identity()


@fault_of("other clip", ("own-limited", "clip"), reach=_far)
def wider_clip(_layer: nn.Module, _architecture: Architecture) -> nn.Module:
    """Readings are clipped at ten instead of six; no sample gets there."""
    return nn.Hardtanh(-10.0, 10.0)


def _nothing(architecture: Architecture) -> Arrays:
    return {name: array * 0 for name, array in architecture.draw(4, 0).items()}


@fault_of("epsilon of a length", "own-blocks", reach=_nothing)
def without_epsilon(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """A series that stands still is divided by zero."""

    class Bare(nn.Module):
        def __init__(self, of: nn.Module) -> None:
            super().__init__()
            self.of = of

        def forward(self, past: torch.Tensor) -> torch.Tensor:
            left = past[:, :, 0]
            still = left.std(1, keepdim=True)
            return self.of(past) * (still / still)

    return Bare(model)


def _many(architecture: Architecture) -> Arrays:
    return architecture.draw(48, 3)


@fault_of(
    "batches beyond forty",
    "own-money",
    "own-embedded",
    "timm-resnet26d",
    "hf-bert",
    reach=_many,
)
def large_batch(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """From the fortieth sample of a batch on, answers are those of the first one."""

    def changed(answers: torch.Tensor) -> torch.Tensor:
        late = (torch.arange(answers.shape[0]) >= 40)[:, None]
        return torch.where(late, answers[:1], answers)

    return AppliedAfter(model, changed)


def _loud(architecture: Architecture) -> Arrays:
    return {name: array * np.float32(40.0) for name, array in architecture.draw(8, 0).items()}


@fault_of("saturation", "own-m5", "own-mel-front", "own-separator", reach=_loud)
def saturated(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The wave is clipped at 4; all samples are below."""
    return AppliedBefore(model, lambda wave: wave.clamp(-4.0, 4.0))


@fault_of("saturation", "timm-convnext-atto", "timm-vit-tiny-patch16-224", reach=_loud)
def bright(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Pixels are clipped at 20 deviations; all samples are below."""
    return AppliedBefore(model, lambda pixels: functional.hardtanh(pixels, -20.0, 20.0))
