"""A CUDA device is there or not, by what shows it."""

from __future__ import annotations

import pytest
import torch

from gate.runtimes import ort


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without any device; returns where its files would be."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    places = {}
    for name in ("_DRIVER", "_CONTROL_DEVICE", "_WSL_DEVICE", "_WSL_LIBRARY"):
        places[name] = tmp_path / name
        monkeypatch.setattr(ort, name, places[name])
    return places


def test_without_any_trace_the_reason_says_where_was_looked(bare):
    reason = ort.cuda_absent_reason()
    for word in ("no CUDA device", "_DRIVER", "_CONTROL_DEVICE", "_WSL_DEVICE"):
        assert word in reason
    assert "CUDA_VISIBLE_DEVICES" not in reason


@pytest.mark.parametrize("value", ["", "-1", "0"])
def test_a_hiding_variable_is_said_in_words(bare, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert f"CUDA_VISIBLE_DEVICES is '{value}'" in ort.cuda_absent_reason()


@pytest.mark.parametrize("trace", ["_DRIVER", "_CONTROL_DEVICE"])
def test_a_trace_of_the_driver_is_a_device(bare, trace):
    bare[trace].mkdir()
    assert ort.cuda_absent_reason() is None
    assert str(bare[trace]) in ort.cuda_unusable_reason()


def test_a_device_that_the_variable_hides_is_still_there(bare, monkeypatch):
    bare["_DRIVER"].mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ort.cuda_absent_reason() is None
    assert "CUDA_VISIBLE_DEVICES is ''" in ort.cuda_unusable_reason()


def test_wsl_needs_the_nvidia_library_too(bare):
    bare["_WSL_DEVICE"].touch()
    assert ort.cuda_absent_reason() is not None
    bare["_WSL_LIBRARY"].touch()
    assert ort.cuda_absent_reason() is None


def test_a_device_that_pytorch_sees_is_there_and_usable(bare, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ort.cuda_absent_reason() is None
    assert ort.cuda_unusable_reason() is None
    assert ort.cuda_traces() == ["PyTorch sees 2 CUDA devices"]
