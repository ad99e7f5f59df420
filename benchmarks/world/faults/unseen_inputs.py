"""Faults that no sample shows, with the inputs that show them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.bench import SAMPLES
from benchmarks.corpus.exporters import DYNAMO_18
from benchmarks.corpus.samples import Arrays
from benchmarks.world import sample_generators
from benchmarks.world.fault import Wrapped, fault_of

_EMBEDDING_TABLES = {
    "hf-bert": "model.bert.embeddings.word_embeddings",
    "hf-distilbert": "model.distilbert.embeddings.word_embeddings",
    "hf-albert": "model.albert.embeddings.word_embeddings",
    "hf-llama": "model.model.embed_tokens",
    "hf-mpnet": "model.embeddings.word_embeddings",
    "hf-electra": "model.electra.embeddings.word_embeddings",
}


def _find_unused_row(architecture: Architecture) -> int:
    """Return the largest row of the table that no sample looks up."""
    ids = architecture.draw(architecture.count or SAMPLES, 0)["input_ids"]
    table = architecture.make().get_submodule(_EMBEDDING_TABLES[architecture.name])
    return max(set(range(table.weight.shape[0])) - set(ids.flatten().tolist()))


def _draw_with_unused_row(architecture: Architecture) -> Arrays:
    arrays = architecture.draw(8, 0)
    arrays["input_ids"][:, 0] = _find_unused_row(architecture)
    return arrays


_TABLE_LAYERS = tuple(_EMBEDDING_TABLES.items())


@fault_of(
    "rare row",
    *_TABLE_LAYERS,
    ("hf-bert", _EMBEDDING_TABLES["hf-bert"], DYNAMO_18),
    reach=_draw_with_unused_row,
)
def rare_row(layer: nn.Module, architecture: Architecture) -> None:
    """Set a row of the table that no sample looks up to zero."""
    layer.weight[_find_unused_row(architecture)] = 0.0


@fault_of("rare element", *_TABLE_LAYERS, reach=_draw_with_unused_row)
def rare_element(layer: nn.Module, architecture: Architecture) -> None:
    """Negate one element of a row that no sample looks up."""
    row = layer.weight[_find_unused_row(architecture)]
    row[int(row.abs().argmax())] *= -1


_POSITIONS = {
    "hf-bert": "model.bert.embeddings.position_embeddings",
    "hf-distilbert": "model.distilbert.embeddings.position_embeddings",
    "hf-gpt2": "model.transformer.wpe",
    "hf-opt": "model.model.decoder.embed_positions",
    "hf-bart": "model.embed_positions",
}


def _draw_long_texts(_architecture: Architecture) -> Arrays:
    return sample_generators.text(8, 0, length=48, masked=False)


@fault_of("positions behind the samples", *_POSITIONS.items(), reach=_draw_long_texts)
def far_positions(layer: nn.Module, _architecture: Architecture) -> None:
    """Reverse the rows of positions from 30 on; all samples have 16 tokens."""
    layer.weight[30:] = layer.weight[30:].flip(0)


def _draw_padded(_architecture: Architecture) -> Arrays:
    return sample_generators.text(16, 0)


@fault_of(
    "mask ignored",
    "hf-bert-unpadded",
    "hf-electra-unpadded",
    ("hf-bert-unpadded", "", DYNAMO_18),
    reach=_draw_padded,
)
def mask_ignored(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Replace the attention mask with ones, which it is in all samples."""
    return Wrapped(model, inputs=lambda ids, mask: (ids, mask * 0 + 1))


def _draw_large_batch(architecture: Architecture) -> Arrays:
    return architecture.draw(48, 3)


@fault_of("batches beyond forty", "timm-resnet26d", "hf-bert", reach=_draw_large_batch)
def large_batch(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Repeat the output of the first sample for all samples of a batch from the fortieth on."""

    def change_outputs(outputs: torch.Tensor) -> torch.Tensor:
        is_late = (torch.arange(outputs.shape[0]) >= 40)[:, None]
        return torch.where(is_late, outputs[:1], outputs)

    return Wrapped(model, outputs=change_outputs)


def _draw_loud(architecture: Architecture) -> Arrays:
    return {name: array * np.float32(40.0) for name, array in architecture.draw(8, 0).items()}


@fault_of("saturation", "timm-convnext-atto", "timm-vit-tiny-patch16-224", reach=_draw_loud)
def bright(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Clip pixels at 20 standard deviations, which no sample reaches."""
    return Wrapped(model, inputs=lambda pixels: functional.hardtanh(pixels, -20.0, 20.0))
