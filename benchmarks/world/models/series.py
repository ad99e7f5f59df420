"""Forecasters and sound models: recurrent, convolutional and in residual blocks."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

CHANNELS, PAST, FUTURE = 4, 32, 8


def standardize(past: torch.Tensor) -> torch.Tensor:
    """Standardize each channel of each sample to mean 0 and variance 1."""
    mean = past.mean(1, keepdim=True)
    variance = (past - mean).square().mean(1, keepdim=True)
    return (past - mean) * torch.rsqrt(variance + 1e-5)


class NBeats(nn.Module):
    """N-BEATS: each block forecasts the residual of the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(PAST, 32), nn.ReLU(), nn.Linear(32, PAST + FUTURE))
            for _ in range(3)
        )

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        residual = past[:, :, 0]
        mean, scale = residual.mean(1, keepdim=True), residual.std(1, keepdim=True) + 1e-3
        residual = (residual - mean) / scale
        forecast = torch.zeros_like(residual[:, :FUTURE])
        for block in self.blocks:
            output = block(residual)
            residual = residual - output[:, :PAST]
            forecast = forecast + output[:, PAST:]
        return forecast * scale + mean


class CausalConvolutions(nn.Module):
    """TCN: dilated causal convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(CHANNELS, 16, 1)
        self.layers = nn.ModuleList(nn.Conv1d(16, 16, 3, dilation=2**k) for k in range(3))
        self.head = nn.Conv1d(16, 2, 1)

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(standardize(past).transpose(1, 2))
        for power, layer in enumerate(self.layers):
            hidden = hidden + functional.relu(layer(functional.pad(hidden, (2 * 2**power, 0))))
        return self.head(hidden)


class DeepAr(nn.Module):
    """DeepAR: the mean and the deviation of the next step in the unit of the series."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(CHANNELS, 24, num_layers=2, batch_first=True)
        self.mean, self.deviation = nn.Linear(24, CHANNELS), nn.Linear(24, CHANNELS)

    def forward(self, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        level = past.mean(1, keepdim=True)
        scale = (past - level).abs().mean(1, keepdim=True) + 1e-6
        states, _ = self.lstm((past - level) / scale)
        mean = self.mean(states) * scale + level
        return mean, functional.softplus(self.deviation(states) - 1.0) * scale


class EncoderDecoder(nn.Module):
    """An LSTM encoder and an LSTM decoder of eight steps; returns the last states too."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.LSTM(CHANNELS, 16, batch_first=True)
        self.writer = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, CHANNELS)

    def forward(self, past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, (hidden, cell) = self.reader(standardize(past))
        repeated = hidden[0].unsqueeze(1).expand(-1, FUTURE, -1)
        written, _ = self.writer(repeated)
        return self.head(written), hidden[0], cell[0]


class BidirectionalGru(nn.Module):
    """A bidirectional GRU with attention over time."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(CHANNELS, 12, batch_first=True, bidirectional=True)
        self.weigh = nn.Linear(24, 1)
        self.head = nn.Linear(24, 5)

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(standardize(past))
        weights = torch.softmax(self.weigh(states), dim=1)
        return self.head((weights * states).sum(1))


class M5(nn.Module):
    """M5: convolutions on the waveform, (batch, 1 600), to class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 16, 40, stride=8)
        self.first = nn.BatchNorm1d(16)
        self.middle = nn.Conv1d(16, 24, 3)
        self.second = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 8)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.first(self.enter(wave.unsqueeze(1))))
        hidden = functional.max_pool1d(hidden, 4)
        hidden = functional.relu(self.second(self.middle(hidden)))
        return functional.log_softmax(self.head(hidden.mean(2)), dim=1)


class MelFrontend(nn.Module):
    """A spectrum by convolution with sines, a mel-like filter bank, a log and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        time = torch.arange(128) / 128.0
        phase = torch.arange(33)[:, None] * time * 2 * math.pi
        window = torch.hann_window(128)
        self.register_buffer("waves", torch.cat([phase.cos(), phase.sin()])[:, None] * window)
        bank = torch.relu(1 - (torch.arange(33)[:, None] / 2.0 - torch.arange(16)).abs())
        self.register_buffer("bank", bank)
        self.convolution = nn.Conv1d(16, 24, 3, padding=1)
        self.head = nn.Linear(24, 8)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        spectrum = functional.conv1d(wave.unsqueeze(1), self.waves, stride=64)
        power = spectrum[:, :33].square() + spectrum[:, 33:].square()
        mel = torch.log(power.transpose(1, 2) @ self.bank + 1e-6).transpose(1, 2)
        return self.head(functional.gelu(self.convolution(mel)).mean(2))


class Separator(nn.Module):
    """Conv-TasNet: an encoder, masks of two speakers and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 16, 16, stride=8, bias=False)
        self.norm = nn.GroupNorm(1, 16, eps=1e-8)
        self.depthwise = nn.Conv1d(16, 16, 3, padding=2, dilation=2, groups=16)
        self.activation = nn.PReLU()
        self.masks = nn.Conv1d(16, 32, 1)
        self.decoder = nn.ConvTranspose1d(16, 1, 16, stride=8, bias=False)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(wave.unsqueeze(1))
        hidden = self.activation(self.depthwise(self.norm(encoded)))
        masks = torch.sigmoid(self.masks(hidden)).chunk(2, dim=1)
        return torch.cat([self.decoder(encoded * mask) for mask in masks], dim=1)
