"""Fixtures: networks and their files, each exported once per test module."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from gate import TestedFile
from tests.localize import nets


@pytest.fixture(scope="module")
def export_net(tmp_path_factory):
    """Return a function that exports each network of `nets` once.

    With `unfolded`, BatchNorm keeps its own nodes.
    """
    folder = tmp_path_factory.mktemp("files")

    @functools.cache
    def make(
        kind: type[nn.Module], by: nets.Exporter = "direct", *, unfolded: bool = False
    ) -> tuple[nn.Module, TestedFile]:
        model, path = nets.build(kind), folder / f"{kind.__name__}-{by}-{unfolded}.onnx"
        settings: dict[str, Any] = dict(nets.UNFOLDED) if unfolded else {}
        inputs, names = nets.INPUTS.get(kind, nets.VECTORS), nets.OUTPUTS.get(kind, ("logits",))
        return model, nets.export(model, path, inputs, by=by, outputs=names, **settings)

    return make
