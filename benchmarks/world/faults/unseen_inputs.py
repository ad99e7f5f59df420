"""Section 4: faults that no sample shows, with the inputs that show them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.world import sample_generators
from benchmarks.world.fault import DYNAMO_18, AppliedAfter, AppliedBefore, fault_of

_EMBEDDING_TABLES = {
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


def _ids_name(arrays: Arrays) -> str:
    return next(name for name in ("input_ids", "history", "categories") if name in arrays)


def _find_unused_row(architecture: Architecture) -> int:
    """Return the largest row of the table that no sample looks up."""
    arrays = architecture.draw(architecture.count or 24, 0)
    ids = arrays[_ids_name(arrays)]
    table = architecture.make().get_submodule(_EMBEDDING_TABLES[architecture.name])
    looked_up = set((ids[:, 0] if "categories" in arrays else ids).flatten().tolist())
    return max(set(range(table.weight.shape[0])) - looked_up)


def _draw_with_unused_row(architecture: Architecture) -> Arrays:
    arrays = architecture.draw(8, 0)
    ids = arrays[_ids_name(arrays)].copy()
    ids[:, 0] = _find_unused_row(architecture)
    return {**arrays, _ids_name(arrays): ids}


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


@fault_of("rare element", *_TABLE_LAYERS[:6], reach=_draw_with_unused_row)
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


def _draw_for_rare_expert(architecture: Architecture) -> Arrays:
    rows = architecture.draw(16, 0)["rows"].copy()
    rows[:, 2] = 10.0
    return {"rows": rows}


@fault_of(
    "unused expert",
    ("own-experts", "experts.3"),
    ("own-experts", "experts.3", DYNAMO_18),
    reach=_draw_for_rare_expert,
)
def unused_expert(layer: nn.Module, _architecture: Architecture) -> None:
    """Reverse the rows of the weights of an expert that no sample uses."""
    layer.weight.copy_(layer.weight.flip(0))


@fault_of("unused expert", ("own-experts", "experts.3"), reach=_draw_for_rare_expert)
def unused_bias(layer: nn.Module, _architecture: Architecture) -> None:
    """Set one bias of an expert that no sample uses to zero."""
    layer.bias[int(layer.bias.abs().argmax())] = 0.0


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
    return AppliedBefore(model, lambda ids, mask: (ids, mask * 0 + 1))


def _draw_large(architecture: Architecture) -> Arrays:
    return {"rows": architecture.draw(32, 0)["rows"] * np.float32(8.0)}


@fault_of(
    "missing clip", ("own-limited", "clip"), ("own-limited", "clip", DYNAMO_18), reach=_draw_large
)
def clip_left_out(_layer: nn.Module, _architecture: Architecture) -> nn.Module:
    """Remove the clipping of readings, whose limit no sample reaches."""
    return nn.Identity()


@fault_of("other clip", ("own-limited", "clip"), reach=_draw_large)
def wider_clip(_layer: nn.Module, _architecture: Architecture) -> nn.Module:
    """Clip readings at 10 instead of 6; no sample reaches the limit."""
    return nn.Hardtanh(-10.0, 10.0)


def _draw_zeros(architecture: Architecture) -> Arrays:
    return {name: array * 0 for name, array in architecture.draw(4, 0).items()}


@fault_of("epsilon of a length", "own-blocks", reach=_draw_zeros)
def without_epsilon(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Divide a constant series by its standard deviation of zero."""

    class WithoutEpsilon(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, past: torch.Tensor) -> torch.Tensor:
            series = past[:, :, 0]
            deviation = series.std(1, keepdim=True)
            return self.model(past) * (deviation / deviation)

    return WithoutEpsilon(model)


def _draw_large_batch(architecture: Architecture) -> Arrays:
    return architecture.draw(48, 3)


@fault_of(
    "batches beyond forty",
    "own-money",
    "own-embedded",
    "timm-resnet26d",
    "hf-bert",
    reach=_draw_large_batch,
)
def large_batch(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Repeat the output of the first sample for all samples of a batch from the fortieth on."""

    def change_outputs(outputs: torch.Tensor) -> torch.Tensor:
        is_late = (torch.arange(outputs.shape[0]) >= 40)[:, None]
        return torch.where(is_late, outputs[:1], outputs)

    return AppliedAfter(model, change_outputs)


def _draw_loud(architecture: Architecture) -> Arrays:
    return {name: array * np.float32(40.0) for name, array in architecture.draw(8, 0).items()}


@fault_of("saturation", "own-m5", "own-mel-front", "own-separator", reach=_draw_loud)
def saturated(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Clip the waveform at 4, which no sample reaches."""
    return AppliedBefore(model, lambda wave: wave.clamp(-4.0, 4.0))


@fault_of("saturation", "timm-convnext-atto", "timm-vit-tiny-patch16-224", reach=_draw_loud)
def bright(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Clip pixels at 20 standard deviations, which no sample reaches."""
    return AppliedBefore(model, lambda pixels: functional.hardtanh(pixels, -20.0, 20.0))
