"""Whether the reference keeps what the model has in float64, or is the model in float32."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from gate.records.evidence import Subject

_DOUBLE = "float64"


def keeps_double(model: nn.Module, subject: Subject) -> bool:
    """True where the model itself is in float64 in parts, or the file takes or gives float64
    because the whole model is: then its weights and inputs of float64 stay what they are.

    Else they become float32, as the file has them: a model that was built in float64 and exported
    as a copy in float32, or one of float32 that casts inputs of float64.
    """
    own = {
        tensor.dtype
        for tensor in itertools.chain(model.parameters(), model.buffers())
        if tensor.is_floating_point()
    }
    if own >= {torch.float32, torch.float64}:  # a date or a coordinate is lost in float32
        return True
    floats = {spec.dtype for spec in subject.inputs if spec.dtype.startswith("float")}
    gives = any(spec.dtype == _DOUBLE for spec in subject.outputs)
    if _DOUBLE in floats:
        return gives or own != {torch.float32}
    return gives and (own != {torch.float64} or not floats)
