"""A session has the properties that its runtime's name promises, or raises an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gate import TestedFile
from gate.errors import EvidenceError
from gate.onnx_file.reading import read_subject
from gate.onnx_file.sessions import open_on_cpu, open_session, quiet_options, session_options
from gate.policy.runtime_options import plain_setup
from gate.records.runtime import CPU_PROVIDER
from tests.export.graphs import create_adder, write_external_adder, write_model
from tests.measure.test_cuda_logic import NO_DEVICE

X = np.ones((1, 4), np.float32)


def test_session_opens_bytes_and_paths(tmp_path: Path) -> None:
    path = write_model(create_adder(), tmp_path / "model.onnx")
    for model in (path, path.read_bytes()):
        session = open_on_cpu(model)
        assert session.get_providers() == [CPU_PROVIDER]
        (name,) = (item.name for item in session.get_inputs())
        assert session.run(None, {name: X})[0].shape == X.shape


def test_linked_data_is_passed_in_memory(tmp_path: Path) -> None:
    path = write_external_adder(tmp_path / "model.onnx")
    straight = open_on_cpu(path)
    (tmp_path / "w.bin").rename(tmp_path / "blob")
    (tmp_path / "w.bin").symlink_to(tmp_path / "blob")
    loadable = TestedFile(path, read_subject(path)).loadable()
    linked = open_session(loadable, quiet_options(), plain_setup("ort-cpu"))
    feed = {item.name: X for item in straight.get_inputs()}
    assert np.array_equal(linked.run(None, feed)[0], straight.run(None, feed)[0])


@pytest.mark.parametrize(
    ("name", "level"), [("ort-cpu", "ORT_DISABLE_ALL"), ("ort-cpu-optimized", "ORT_ENABLE_ALL")]
)
def test_session_options_match_the_runtime(name, level) -> None:
    options = session_options(plain_setup(name), threads=3, deterministic=True)
    assert options.graph_optimization_level.name == level
    assert options.intra_op_num_threads == 3
    assert options.use_deterministic_compute
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@NO_DEVICE
def test_provider_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    model = write_model(create_adder(), tmp_path / "model.onnx").read_bytes()
    with pytest.raises(EvidenceError, match="could not load CUDAExecutionProvider and used CPU"):
        open_session(model, quiet_options(), plain_setup("ort-cuda"))
