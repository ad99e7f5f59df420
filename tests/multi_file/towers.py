"""CLIP's two towers, and an encoder with a decoder that is called step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Parts = Mapping[str, Callable[..., Any]]


class ImageTower(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision, self.projection = model.vision_model, model.visual_projection

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.projection(self.vision(pixel_values=pixels).pooler_output)


class TextTower(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.text, self.projection = model.text_model, model.text_projection

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.projection(self.text(input_ids=tokens).pooler_output)


class Towers(nn.Module):
    def __init__(self) -> None:
        from transformers import CLIPConfig, CLIPModel

        super().__init__()
        torch.manual_seed(0)
        alike = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1,
                 "num_attention_heads": 2}  # fmt: skip
        text = alike | {"vocab_size": 32, "max_position_embeddings": 8,
                        "bos_token_id": 0, "eos_token_id": 31}  # fmt: skip
        vision = alike | {"image_size": 8, "patch_size": 4}
        config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        config._attn_implementation = "eager"
        model = CLIPModel(config)
        self.image, self.text = ImageTower(model), TextTower(model)


def match(parts: Parts, batch: Mapping[str, torch.Tensor]) -> Any:
    image, text = parts["image"](batch["pixels"]), parts["text"](batch["tokens"])
    image = image / image.norm(dim=-1, keepdim=True)
    text = text / text.norm(dim=-1, keepdim=True)
    return {"image": image, "text": text, "similarity": (image * text).sum(-1, keepdim=True)}


def towers() -> nn.Module:
    return Towers().eval()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        weights = self.query(x) @ self.key(memory).transpose(1, 2)
        return x + torch.softmax(weights / 4.0, dim=-1) @ self.value(memory)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(8)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return self.attention(source, source)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.out = nn.Embedding(12, 8), Attention(8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(self.embed(tokens), memory).mean(dim=1))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = Encoder(), Decoder()


def translate(parts: Parts, batch: Mapping[str, torch.Tensor]) -> Any:
    memory = parts["encoder"](batch["source"])
    tokens, steps = torch.zeros(len(memory), 1, dtype=torch.int64), []
    for _ in range(3):
        steps.append(parts["decoder"](tokens, memory))
        tokens = torch.cat([tokens, steps[-1].argmax(-1, keepdim=True)], dim=1)
    return {"steps": torch.stack(steps, dim=1), "tokens": tokens}


def translator() -> nn.Module:
    return Translator().eval()
