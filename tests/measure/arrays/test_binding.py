import pytest

from gate.data.input_binding import InputBinding, bind_inputs
from gate.errors import InputMismatch
from gate.records.evidence import TensorSpec


def spec(name, *shape, dtype="float32"):
    return TensorSpec(name=name, dtype=dtype, shape=shape)


A, B = spec("a", "n", 3), spec("b", "n", 4)
ARGUMENTS = {"count": 10, "batch_size": 4}


@pytest.mark.parametrize(("samples", "pairs"), [
    ((spec("a", "s", 3), spec("b", "s", 4)), (("a", "a"), ("b", "b"))),
    ((spec("b", "s", 4), spec("a", "s", 3)), (("a", "a"), ("b", "b"))),
    ((spec("x", "s", 3), spec("y", "s", 4)), (("a", "x"), ("b", "y"))),
])  # fmt: skip
def test_inputs_bind_by_equal_names_or_position(samples, pairs):
    binding = bind_inputs((A, B), samples, **ARGUMENTS)
    assert binding == InputBinding(pairs, 4, fixed=False)


@pytest.mark.parametrize(("parameters", "samples", "pairs"), [
    (("A", "B"), (spec("B", "s", 3), spec("A", "s", 3)), (("a", "A"), ("b", "B"))),
    (("x", "y"), (spec("y", "s", 3), spec("x", "s", 3)), (("a", "x"), ("b", "y"))),
    (("x", "z"), (spec("y", "s", 3), spec("x", "s", 3)), (("a", "y"), ("b", "x"))),
])  # fmt: skip
def test_samples_named_after_parameters_bind_in_their_order(parameters, samples, pairs):
    inputs = (A, spec("b", "n", 3))
    assert bind_inputs(inputs, samples, **ARGUMENTS, parameters=parameters).pairs == pairs


@pytest.mark.parametrize("parameters", [None, ("a", "b", "mask")])
def test_model_only_input_is_not_bound_to_the_file(parameters):
    samples = (spec("mask.0", "s"), spec("b", "s", 4), spec("a", "s", 3))
    binding = bind_inputs((A, B), samples, **ARGUMENTS, parameters=parameters)
    assert binding.pairs == (("a", "a"), ("b", "b"))
    assert binding.model_only == ("mask.0",)
    assert binding.arguments == ("mask.0", "b", "a")


def test_unknown_input_name_is_refused():
    with pytest.raises(
        InputMismatch,
        match=r"\['labels'\] is neither an input of the file, 'a'.*nor a parameter of",
    ):
        bind_inputs((A,), (A, spec("labels", "s")), **ARGUMENTS, parameters=("a",))


@pytest.mark.parametrize(("inputs", "samples", "words"), [
    ((A,), (spec("c", "s", 3), spec("b", "s", 4)), "has 1 inputs"),
    ((A, B), (spec("a", "s", 3),), "has 2 inputs"),
    ((A, spec("A", "n", 3)), (spec("A", "s", 3),), "has 2 inputs"),
    ((), (A,), "has 0 inputs, none"),
    ((A, B), (spec("b", "s", 3), spec("c", "s", 4)), r"share only the names \['b'\]"),
    ((A,), (spec("a", "s", 4),), "doesn't fit"),
    ((A,), (spec("a", "s"),), "doesn't fit"),
    ((A,), (spec("a", "s", 3, 1),), "doesn't fit"),
    ((spec("a"),), (spec("a", "s"),), "doesn't fit"),
    ((A,), (spec("a", "s", 3, dtype="float16"),), "Save the samples as float32"),
    ((spec("a", 4, 3),), (spec("a", "s", 3),), "10 samples are not a multiple"),
    ((spec("a", 0, 3),), (spec("a", "s", 3),), "fixed batch size of 0"),
    ((spec("a", 2, 3), spec("b", 5, 4)), (A, B), "different fixed batch sizes"),
])  # fmt: skip
def test_mismatching_inputs_are_refused(inputs, samples, words):
    with pytest.raises(InputMismatch, match=words):
        bind_inputs(inputs, samples, **ARGUMENTS)


@pytest.mark.parametrize(("inputs", "size", "fixed"), [
    ((spec("a", 5, 3), spec("b", "n", 4)), 5, True),
    ((spec("a", 1, 3), spec("b", 1, 4)), 1, True),
    ((A, spec("b", "m", "k")), 4, False),
])  # fmt: skip
def test_fixed_batch_axis_sets_the_batch_size(inputs, size, fixed):
    binding = bind_inputs(inputs, (A, B), **ARGUMENTS)
    assert (binding.batch_size, binding.fixed) == (size, fixed)


def test_fewer_samples_than_the_batch_size_are_one_batch():
    assert bind_inputs((A,), (A,), count=3, batch_size=32).batch_size == 3
