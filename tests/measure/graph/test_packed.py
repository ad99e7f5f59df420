"""The weights of recurrent layers as files have them, and what of them is at another place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.weights.layouts import match_packed_rnn, misplaced


@pytest.fixture(scope="module", params=[nn.LSTM, nn.GRU])
def memory(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = request.param(3, 2, 2, bidirectional=True)
    return module


def constants(memory: nn.Module) -> list[np.ndarray]:
    return [np.array(stored.values) for stored in match_packed_rnn(memory)]


def test_what_is_in_its_place(memory):
    assert misplaced(memory, constants(memory)) == {}
    assert misplaced(memory, []) == {}


def test_other_elements_are_not_misplaced(memory):
    assert misplaced(memory, [array + 1.0 for array in constants(memory)]) == {}


def test_directions_that_are_exchanged(memory):
    weight, *others = constants(memory)
    names = ["weight_ih_l0", "weight_ih_l0_reverse"]
    assert misplaced(memory, [weight[::-1], *others]) == {"directions": names}


def test_gates_in_another_order(memory):
    weight, hidden, *others = constants(memory)
    hidden[1] = np.roll(hidden[1], 2, axis=0)
    found = misplaced(memory, [weight, hidden, *others])
    assert found == {"gates": ["weight_hh_l0_reverse"]}


def test_each_name_is_there_once(memory):
    (names,) = misplaced(memory, [array[::-1] for array in constants(memory)]).values()
    assert len(names) == len(set(names)) > 4
