"""The process that computes metrics: its failures, and the units of several workers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load

from gate.errors import DataError
from gate.metrics.process import MetricRun
from gate.metrics.slices import Annotations
from gate.policy.metrics import MetricPolicy
from tests.metrics.project import METRICS

OUTPUTS = np.random.default_rng(2).normal(size=(80, 2)).astype(np.float32)

LABELS = OUTPUTS.argmax(axis=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymetrics.py").write_text(f"{METRICS}\nMARKED = {OUTPUTS[37].tolist()}\n")
    return tmp_path


def policies(*texts: str) -> list[MetricPolicy]:
    return [
        MetricPolicy.model_validate_json(_json(f"{{name: m{index}, max_drop: 0.3, {text}}}"))
        for index, text in enumerate(texts)
    ]


def _json(text: str) -> str:
    import json

    return json.dumps(yaml.safe_load(text))


def create_run(metrics: list[MetricPolicy], annotations: Annotations | None = None) -> MetricRun:
    return MetricRun(metrics, outputs=["logits"], annotations=annotations or Annotations(LABELS))


def feed(run: MetricRun, start: int = 0, stop: int = 80, size: int = 20) -> MetricRun:
    for at in range(start, stop, size):
        batch = OUTPUTS[at : min(at + size, stop)]
        run.update({"reference": [batch], "ort-cpu": [batch + 0.0]}, start=at, count=len(batch))
    return run


def failures(*texts: str, annotations: Annotations | None = None) -> list[str]:
    run = feed(create_run(policies(*texts), annotations))
    result, _ = run.evidence(samples=80)
    run.close()
    assert all(not each.groups for each in result if each.failure is not None)
    return [each.failure or "" for each in result]


BROKEN = [
    ("function: 'mymetrics:raises'", ["sample 37", "no such class", "mymetrics.py:", "raise KeyError"]),
    ("function: 'mymetrics:is_nan'", ["sample 3 of reference", "nan"]),
    ("function: 'mymetrics:short'", ["shape ()", "expected (samples,)", "aggregate: dataset"]),
    ("function: 'mymetrics:missing'", ["mymetrics:missing cannot be imported"]),
    ("function: 'nowhere:f'", ["No module named 'nowhere'"]),
    ("function: accuracy, output: boxes", ["no output 'boxes'", "logits"]),
    ("function: 'mymetrics:hit', aggregate: dataset", ["update(outputs, labels)"]),
    ("function: mse", ["labels have shape"]),
    ("function: accuracy, options: {k: 0}", ["k is 0"]),
]  # fmt: skip


def test_a_metric_that_breaks_says_where_and_spoils_no_other():
    result = failures(*(text for text, _ in BROKEN), "function: 'mymetrics:hit'")
    assert result[-1] == ""
    for (_, words), failure in zip(BROKEN, result, strict=False):
        for word in words:
            assert word in failure


def test_a_function_that_writes_into_its_arguments_changes_nothing_else(folder: Path):
    (folder / "writes.py").write_text(
        "def f(outputs, labels):\n"
        "    hit = outputs.argmax(axis=1) == labels\n"
        "    outputs *= -1.0\n"
        "    labels[:] = 0\n"
        "    return hit\n"
    )
    run = feed(create_run(policies("function: 'writes:f'", "function: accuracy")))
    result, _ = run.evidence(samples=80)
    run.close()
    for metric in result:
        (group,) = metric.groups
        assert (group.reference.value, group.runtimes["ort-cpu"].value) == (1.0, 1.0)


@pytest.mark.further
@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("function: 'mymetrics:sleeps', time_limit_s: 1.5", "took longer than 1.5 s"),
        ("function: 'mymetrics:eats', memory_limit_mb: 500", "took more than 500 MB"),
        ("function: 'mymetrics:leaves'", "ended with code 3"),
    ],
)
def test_limits_of_time_and_memory(metric: str, words: str):
    limited = "function: 'mymetrics:hit', memory_limit_mb: 500"
    blamed, second = failures(metric, limited)
    assert words in blamed
    assert "ended with m0" in second


@pytest.mark.further
def test_a_module_that_ends_the_process_fails_all_metrics(folder: Path):
    (folder / "ends.py").write_text("import os\nos._exit(3)\n")
    assert "ended with code 3" in failures("function: 'ends:f'")[0]
    result = failures("function: 'mymetrics:hit'", "function: 'ends:f'", "function: accuracy")
    assert ["ended with code 3" in each for each in result] == [True] * 3
    assert ["ended with m1" in each for each in result] == [True, False, True]


@pytest.mark.further
def test_a_data_set_metric_without_a_value_on_some_resamples_has_no_bound(folder: Path):
    """Four of 80 samples are positive: many resamples contain none."""
    (folder / "rare.py").write_text(
        "import numpy as np\n"
        "class Recall:\n"
        "    def update(self, outputs, labels):\n"
        "        positive = np.arange(len(outputs)) == 3\n"
        "        return np.stack([positive & (outputs[:, 0] < 9), positive], axis=1)\n"
        "    def compute(self, sums):\n"
        "        return sums[0] / sums[1] if sums[1] else float('nan')\n"
    )
    metrics = policies("function: 'rare:Recall', aggregate: dataset")
    run = create_run(metrics)
    for at in range(0, 80, 20):
        batch = OUTPUTS[at : at + 20]
        worse = batch + (99.0 if at == 0 else 0.0)
        run.update({"reference": [batch], "ort-cpu": [worse]}, start=at, count=20)
    ((result,), _) = run.evidence(samples=80)
    run.close()
    side = result.groups[0].runtimes["ort-cpu"]
    assert side.change.drop == pytest.approx(0.25)
    assert np.isnan([*side.change.bounds, side.low, side.high]).all()


def test_a_function_sees_single_batches_with_their_labels_and_aligned_sides(folder: Path):
    """The function receives batches of different sizes and sample shapes, which can't be
    concatenated."""
    (folder / "sees.py").write_text(
        "import numpy as np\n"
        "def f(outputs, labels):\n"
        "    texts, logits = outputs['texts'], outputs['logits']\n"
        "    assert len(texts) == len(logits) == len(labels)\n"
        "    row = 1e6 * len(labels) + 1e3 * texts.shape[1] + labels\n"
        "    return row + np.abs(logits).sum(axis=1)\n"
    )
    run = MetricRun(
        policies("function: 'sees:f'", "function: accuracy, output: logits"),
        outputs=["texts", "logits"],
        annotations=Annotations(LABELS),
    )
    expected, start = [], 0
    for count, width in ((20, 3), (20, 3), (7, 3), (13, 5), (20, 3)):
        rows = slice(start, start + count)
        outputs = [np.zeros((count, width), dtype=np.float32), OUTPUTS[rows]]
        run.update({"reference": outputs, "ort-cpu": outputs}, start=start, count=count)
        values = 1e6 * count + 1e3 * width + LABELS[rows]
        expected += list(values + np.abs(OUTPUTS[rows]).sum(axis=1))
        start += count
    result, values = run.evidence(samples=80)
    run.close()
    assert [each.failure for each in result] == [None, None]
    for side in ("reference", "ort-cpu"):
        np.testing.assert_array_equal(load(values)[f"m0/rows/{side}"][:, 0], expected)
        np.testing.assert_array_equal(load(values)[f"m1/rows/{side}"][:, 0], 1.0)


@pytest.mark.further
def test_an_output_that_is_not_per_sample_reaches_a_function_whole(folder: Path):
    (folder / "table.py").write_text(
        "import numpy as np\n"
        "def f(outputs, labels):\n"
        "    return np.full(len(labels), outputs['table'].sum() + outputs['scale'])\n"
    )
    table, scale = np.ones(100, dtype=np.float32), np.float32(0.5)
    run = MetricRun(
        policies("function: 'table:f'"),
        outputs=["logits", "table", "scale"],
        annotations=Annotations(LABELS),
    )
    for start in range(0, 80, 20):
        outputs = [OUTPUTS[start : start + 20], table, scale]
        run.update({"reference": outputs, "ort-cpu": outputs}, start=start, count=20)
    ((result,), _) = run.evidence(samples=80)
    run.close()
    assert (result.failure, result.groups[0].reference.value) == (None, 100.5)


@pytest.mark.further
def test_a_runtime_without_outputs_for_some_samples_has_no_values(folder: Path):
    run = create_run(policies("function: 'mymetrics:hit'", "function: f1"))
    for start in range(0, 80, 20):
        batch = [OUTPUTS[start : start + 20]]
        second = None if start == 40 else batch
        run.update({"reference": batch, "ort-cpu": batch, "other": second}, start=start, count=20)
    result, _ = run.evidence(samples=80)
    run.close()
    assert [list(each.groups[0].runtimes) for each in result] == [["ort-cpu"]] * 2


@pytest.mark.further
@pytest.mark.slow
def test_the_limit_of_time_is_that_of_one_batch(folder: Path):
    (folder / "slow.py").write_text(
        "import time\ndef f(outputs, labels):\n    time.sleep(0.6)\n    return labels * 1.0\n"
    )
    metric = "function: 'slow:f', time_limit_s: 4"
    assert failures(metric) == [""]  # 0.6 s for each of two sides and four batches


@pytest.mark.further
def test_without_the_columns_of_its_slices_nothing_is_measured():
    (result,) = failures("function: 'mymetrics:hit', slices: [camera]")
    assert "no column 'camera'" in result


@pytest.mark.further
def test_a_slice_of_one_class_has_no_auroc_and_is_named():
    columns = {"camera": tuple("a" if label else "b" for label in LABELS)}
    annotations = Annotations(LABELS, columns)
    result = failures(
        "function: auroc, slices: [camera]",
        "function: f1, slices: [camera]",
        annotations=annotations,
    )
    assert "camera=a" in result[0]
    assert "nan" in result[0]
    assert result[1] == ""


@pytest.mark.further
def test_a_reference_that_is_never_right_proves_no_drop():
    wrong = Annotations(OUTPUTS.argmin(axis=1))
    texts = ("function: accuracy", "function: f1, options: {average: micro}", "function: auroc",
             "function: 'mymetrics:hit'")  # fmt: skip
    for failure in failures(*texts, annotations=wrong):
        assert "the value of reference is 0" in failure


@pytest.mark.further
def test_without_labels_nothing_is_measured():
    (result,) = failures("function: accuracy", annotations=Annotations())
    assert "Pass --labels" in result


def summary(run: MetricRun) -> tuple[Any, bytes]:
    result = run.evidence(samples=80)
    run.close()
    return result


@pytest.mark.further
def test_units_of_other_processes_give_the_same_bytes():
    metrics = policies("function: 'mymetrics:margin'", "function: f1", "function: auroc")
    complete = summary(feed(create_run(metrics)))
    first, second = feed(create_run(metrics), 0, 40), feed(create_run(metrics), 40, 80)
    first.take(second.drain(), samples=40)
    second.close()
    assert summary(first) == complete
    assert [each.failure for each in complete[0]] == [None] * 3


@pytest.mark.further
def test_a_unit_without_values_or_with_another_source_does_not_count(folder: Path):
    metrics = policies("function: 'mymetrics:hit'")
    for broken in ("none", "count", "source"):
        first, second = feed(create_run(metrics), 0, 40), feed(create_run(metrics), 40, 80)
        drained = second.drain()
        second.close()
        if broken == "none":
            drained = None
        elif broken == "count":
            drained["states"]["m0"][1] = 39
        else:
            drained["sources"]["m0"]["mymetrics"] = "sha256:" + "0" * 64
        first.take(drained, samples=40)
        ((result,), values) = summary(first)
        assert result.failure
        assert (result.groups, result.values_sha256, values) == ((), None, b"")


@pytest.mark.further
def test_not_all_samples_is_not_measured():
    ((result,), _) = summary(feed(create_run(policies("function: 'mymetrics:hit'")), 0, 60))
    assert "not all samples" in (result.failure or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"label": 1}\n', "1 entries, the data set has 2"),
        ('{"label": 1}\n{"label": ]\n', "labels.jsonl:2: not JSON"),
        ('{"label": 1, "c": [1]}\n{"label": 1, "c": [2]}\n', "expected a text, a number"),
        ('{"label": 1, "d": 1}\n{"label": 1, "c": 2}\n', "the entry 1 has no 'c'"),
        ('{"label": 1, "c": 1}\n{"c": 2}\n', "the entry 2 has no 'label'"),
        ('{"label": "\udce9", "c": 1}\n', "is not UTF-8"),
    ],
)
def test_wrong_labels_are_refused(folder: Path, text: str, message: str):
    path = folder / "labels.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        Annotations.open(labels=path, slices=None, names=["c"], samples=2)


def test_labels_and_columns_of_all_kinds(folder: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    np.save("labels.npy", np.ones((3, 2, 2)))
    (folder / "lines.jsonl").write_text('{"boxes": [], "night": true}\n' * 3)
    pq.write_table(pa.table({"label": ["a", "b", "c"], "night": [1, 0, 1]}), "t.parquet")
    npy = Annotations.open(
        labels=Path("labels.npy"), slices=Path("t.parquet"), names=["night"], samples=3
    )
    assert np.shape(npy.labels) == (3, 2, 2)
    assert [(part.label, part.mask.tolist()) for part in npy.slices(["night"])] == [
        ("0", [False, True, False]), ("1", [True, False, True]),
    ]  # fmt: skip
    lines = Annotations.open(labels=Path("lines.jsonl"), slices=None, names=["night"], samples=3)
    assert lines.rows(0, 1) == [{"boxes": [], "night": True}]
    assert [part.label for part in lines.slices(["night"])] == ["true"]
    assert Annotations.open(labels=Path("t.parquet"), slices=None, names=[], samples=3).labels == [
        "a",
        "b",
        "c",
    ]
    texts = ['{"label": "a\u2028b"}', "", '{"label": "c"}']
    (folder / "texts.jsonl").write_bytes("\r\n".join(texts).encode("utf-8-sig"))
    read = Annotations.open(labels=Path("texts.jsonl"), slices=None, names=[], samples=2)
    assert read.labels == ["a\u2028b", "c"]
    (folder / "numbers.jsonl").write_text("2\n1\n2\n")  # an array, so that == compares per sample
    numbers = Annotations.open(labels=Path("numbers.jsonl"), slices=None, names=[], samples=3)
    assert (np.zeros(3) + 2 == numbers.labels).tolist() == [True, False, True]
    assert isinstance(numbers.labels, np.ndarray)
    many = "".join(f'{{"label": 1, "c": {n}}}\n' for n in range(60))
    (folder / "many.jsonl").write_text(many)
    with pytest.raises(DataError, match="60 distinct values"):
        Annotations.open(labels=folder / "many.jsonl", slices=None, names=["c"], samples=60)


def test_parquet_of_dates_and_decimals_is_as_json_lines_have_them(folder: Path):
    import datetime as dt
    from decimal import Decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    day, time = dt.date(2026, 1, 2), dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC)
    label = [{"at": time, "price": Decimal("1.50"), "parts": [Decimal(2)]}] * 2
    columns = {"label": label, "day": [day] * 2, "price": [Decimal("0.50"), Decimal("1.00")]}
    nanoseconds = pa.array([1, 2], pa.timestamp("ns"))
    pq.write_table(pa.table({**columns, "at": nanoseconds, "raw": [b"a", b"b"]}), "t.parquet")
    names = ["day", "price", "at"]
    read = Annotations.open(labels=Path("t.parquet"), slices=None, names=names, samples=2)
    plain = {"at": "2026-01-02T03:04:00+00:00", "price": 1.5, "parts": [2]}
    assert read.labels == [plain, plain]
    assert dict(read.columns) == {
        "day": ("2026-01-02",) * 2,
        "price": ("0.5", "1"),
        "at": ("1970-01-01T00:00:00.000000001", "1970-01-01T00:00:00.000000002"),
    }
    for table, words in (
        ({"label": [b"a", b"b"]}, "the column 'label' is of binary"),
        ({"day": [day] * 2}, "has no column 'label'; it has: day"),
        ({"label": [1, 2], "raw": [b"a", b"b"]}, "has no column 'raw'"),
    ):
        pq.write_table(pa.table(table), "t.parquet")
        with pytest.raises(DataError, match=words):
            Annotations.open(labels=Path("t.parquet"), slices=None, names=["raw"], samples=2)
