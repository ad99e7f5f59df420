"""Files with text inputs are judged: the reference receives a list of str."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate.api import EvaluationResult, check
from gate.data.samples import SampleSet
from gate.decision.check_result import Verdict
from gate.errors import DataError, InputMismatch
from gate.localize.locate import locate
from gate.measure.artifacts import has_golden
from gate.measure.job import EvaluationData, MeasurementJob, Reference
from gate.policy.policy import Policy
from gate.records.evidence import Source
from gate.runtimes.selection import with_runtime

WORDS = ("red", "green", "blue", "yellow", "Straße")
SWAPPED_WORDS = ("red", "blue", "green", "yellow", "Straße")
RANDOM = np.random.default_rng(0)
DRAWN_WORDS = RANDOM.choice(np.array([*WORDS, "no word of the vocabulary"]), (40, 3))
NUMBERS = RANDOM.normal(size=(40, 3)).astype(np.float32)


class WordEmbeddings(nn.Module):
    """Average word embeddings; concatenate numbers if the file has them as an input."""

    def __init__(self, *, with_numbers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4 + 3 * with_numbers, 2)
        self.ids = {word: index for index, word in enumerate(WORDS, start=1)}

    def forward(self, words: list, x: torch.Tensor | None = None) -> torch.Tensor:
        ids = torch.tensor([self.of(word) for word in words])
        result = self.table(ids) if ids.ndim == 1 else self.table(ids).mean(1)
        return self.head(result if x is None else torch.cat([result, x], 1))

    def of(self, word: str | list[str]) -> int | list[int]:
        return [self.of(w) for w in word] if isinstance(word, list) else self.ids.get(word, 0)  # type: ignore[misc]


def write_model(path: Path, *, with_numbers: bool, vocabulary: tuple[str, ...] = WORDS) -> Path:
    """Write a file that takes one word and three numbers per sample, or three words."""
    weights = {
        n: p.detach().numpy()
        for n, p in WordEmbeddings(with_numbers=with_numbers).named_parameters()
    }
    nodes = [
        helper.make_node(
            "LabelEncoder", ["words"], ["ids"], domain="ai.onnx.ml", default_int64=0,
            keys_strings=list(vocabulary), values_int64s=list(range(1, 6)),
        ),
        helper.make_node("Gather", ["table.weight", "ids"], ["found"]),
        helper.make_node("Concat", ["found", "x"], ["both"], axis=1)
        if with_numbers
        else helper.make_node("ReduceMean", ["found"], ["both"], axes=[1], keepdims=0),
        helper.make_node("Gemm", ["both", "head.weight", "head.bias"], ["y"], transB=1),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    words = value("words", TensorProto.STRING, ["batch"] if with_numbers else ["batch", 3])
    graph = helper.make_graph(
        nodes,
        "words",
        [words, *([value("x", TensorProto.FLOAT, ["batch", 3])] if with_numbers else [])],
        [value("y", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def arrays(*, with_numbers: bool) -> dict[str, np.ndarray]:
    return {"words": DRAWN_WORDS[:, 0], "x": NUMBERS} if with_numbers else {"words": DRAWN_WORDS}


def check_file(
    file: Path, samples: SampleSet, *, with_numbers: bool, policy: Policy | None = None
) -> EvaluationResult:
    return check(
        file,
        reference=Reference(
            WordEmbeddings(with_numbers=with_numbers), Source(factory="tests:words")
        ),
        data=EvaluationData(samples),
        **({} if policy is None else {"policy": policy}),
    )


@pytest.mark.parametrize("with_numbers", [True, False])
@pytest.mark.parametrize("vocabulary", [WORDS, SWAPPED_WORDS])
def test_verdict_depends_on_the_vocabulary(tmp_path, with_numbers, vocabulary):
    file = write_model(tmp_path / "words.onnx", with_numbers=with_numbers, vocabulary=vocabulary)
    result = check_file(
        file, SampleSet.from_arrays(arrays(with_numbers=with_numbers)), with_numbers=with_numbers
    )
    verdict = Verdict.PASS if vocabulary == WORDS else Verdict.FAIL
    assert result.decision.verdict is verdict, result.decision.problems
    runtime = next(r for r in result.evidence.runtimes if r.runtime == "ort-cpu")
    assert [probe for probe in runtime.probes if probe.kind == "batch"]
    assert all(output.noise is not None for output in runtime.outputs)
    assert not has_golden(result.job)


def test_wrong_vocabulary_is_located(tmp_path):
    file = write_model(tmp_path / "words.onnx", with_numbers=True, vocabulary=SWAPPED_WORDS)
    data = EvaluationData(SampleSet.from_arrays(arrays(with_numbers=True)))
    model = WordEmbeddings(with_numbers=True).eval()
    job = MeasurementJob.from_files(file, model=model, data=data, policy=Policy.default())
    result = locate(job, runtime="ort-cpu")
    assert result.first_divergence is not None
    assert "LabelEncoder" in result.to_json()


def sources(folder: Path) -> dict[str, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    np.savez(folder / "one.npz", **arrays(with_numbers=True))
    (folder / "shards").mkdir()
    for at in (0, 20):  # the longest text is only in one shard
        part = {name: array[at : at + 20] for name, array in arrays(with_numbers=True).items()}
        part["words"] = part["words"].astype("U30" if at else str)
        np.savez(folder / "shards" / f"{at:02}.npz", **part)
    columns = {"words": DRAWN_WORDS[:, 0].tolist(), "x": NUMBERS.tolist()}
    pq.write_table(
        pa.table({**columns, "x": pa.array(columns["x"], pa.list_(pa.float32(), 3))}),
        folder / "one.parquet",
    )
    return {
        "npz": str(folder / "one.npz"),
        "shards": str(folder / "shards"),
        "parquet": f"{folder / 'one.parquet'}#inputs=words,x",
        "data set": f"{__name__}:Pairs#inputs=words,x",
    }


class Pairs(torch.utils.data.Dataset[dict[str, object]]):
    def __len__(self) -> int:
        return len(DRAWN_WORDS)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"words": str(DRAWN_WORDS[index, 0]), "x": NUMBERS[index]}


@pytest.mark.further
def test_all_sources_give_the_same_samples(tmp_path):
    complete = SampleSet.from_arrays(arrays(with_numbers=True))
    file = write_model(tmp_path / "words.onnx", with_numbers=True)
    (tmp_path / "samples").mkdir()
    for name, inputs in sources(tmp_path / "samples").items():
        samples = SampleSet.open(inputs)
        assert samples.digest() == complete.digest(), name
        assert samples.specs[0].dtype == "string"
        assert check_file(file, samples, with_numbers=True).decision.passed, name


def test_python_strings_become_texts():
    samples = SampleSet.from_arrays({"words": np.array(["a", "bcd"], object)})
    assert samples.digest() == SampleSet.from_arrays({"words": np.array(["a", "bcd"])}).digest()


@pytest.mark.further
@pytest.mark.parametrize("kind", ["openvino", "tract"])
def test_runtime_that_gets_numbers_only_is_not_measured(tmp_path, kind):
    pytest.importorskip(kind)
    file = write_model(tmp_path / "words.onnx", with_numbers=True)
    policy = with_runtime(Policy.default(), kind)
    result = check_file(
        file, SampleSet.from_arrays(arrays(with_numbers=True)), with_numbers=True, policy=policy
    )
    assert result.decision.verdict is Verdict.ERROR
    runtime = next(each for each in result.evidence.runtimes if each.runtime == kind)
    assert runtime.unusable
    assert "words" in str(runtime.failure)


WRONG = {
    "numbers for texts": {"words": np.arange(40), "x": NUMBERS},
    "texts for numbers": {"words": DRAWN_WORDS[:, 0], "x": DRAWN_WORDS},
    "swapped": {"words": NUMBERS, "x": DRAWN_WORDS},
    "texts with another axis": {"words": DRAWN_WORDS, "x": NUMBERS},
    "objects": {"words": np.array([*["a"] * 39, 1], object), "x": NUMBERS},
    "bytes": {"words": np.array([b"red"] * 40), "x": NUMBERS},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_text_samples_are_refused(tmp_path, wrong):
    file = write_model(tmp_path / "words.onnx", with_numbers=True)
    with pytest.raises((InputMismatch, DataError)) as raised:
        check_file(file, SampleSet.from_arrays(WRONG[wrong]), with_numbers=True)
    assert "\n" not in str(raised.value)


def test_pickled_array_is_refused_with_the_remedy(tmp_path):
    np.savez(tmp_path / "x.npz", words=np.array(["a", "b"], object))
    with pytest.raises(DataError, match="astype"):
        SampleSet.open(tmp_path / "x.npz")
