"""Built-in metrics equal those of other libraries, and do not depend on how a batch is split."""

import warnings
from typing import Any

import numpy as np
import pytest

from gate.errors import DataError, PolicyError
from gate.metrics.builtin import built_in
from gate.metrics.metric import State

rng = np.random.default_rng(7)
N = 60
LOGITS = rng.normal(size=(N, 4))
CLASSES = rng.integers(4, size=N)


def value(name: str, outputs: Any, labels: Any, **options: Any) -> float:
    metric = built_in(name, options)

    def part(start: int, stop: int) -> State:
        if isinstance(outputs, dict):
            return metric.update({k: v[start:stop] for k, v in outputs.items()}, labels[start:stop])
        return metric.update(outputs[start:stop], labels[start:stop])

    complete = part(0, len(labels))
    halves = State.joined([part(0, 17), part(17, len(labels))])
    assert np.array_equal(complete.rows, halves.rows)
    statistic = metric.statistic(complete)
    blocks = complete.samples
    result = float(statistic(np.ones((1, blocks)))[0])
    # A weight of 2 counts a sample twice; a weight of 0 omits it.
    kept = np.arange(blocks) % 3 != 0
    without = metric.statistic(complete.take(kept))(np.ones((1, int(kept.sum()))))[0]
    assert statistic(kept[None].astype(float))[0] == pytest.approx(without)
    return result


def test_classes():
    from sklearn import metrics as sk

    best = LOGITS.argmax(axis=1)
    assert value("accuracy", LOGITS, CLASSES) == sk.accuracy_score(CLASSES, best)
    top = sk.top_k_accuracy_score(CLASSES, LOGITS, k=2)
    assert value("accuracy", LOGITS, CLASSES, k=2) == pytest.approx(top)
    for average in ("macro", "micro"):
        peer = sk.f1_score(CLASSES, best, average=average)
        assert value("f1", LOGITS, CLASSES, average=average) == pytest.approx(peer)
    binary = (CLASSES == 1).astype(int)
    peer = sk.f1_score(binary, best == 1)
    assert value("f1", (best == 1).astype(int), binary, average="binary") == pytest.approx(peer)


def test_auroc_with_ties():
    from sklearn.metrics import roc_auc_score

    scores = rng.integers(5, size=N).astype(float)
    binary = rng.integers(2, size=N)
    assert value("auroc", scores, binary) == pytest.approx(roc_auc_score(binary, scores))
    logits = np.column_stack([np.zeros(N), scores])
    assert value("auroc", logits, binary) == pytest.approx(roc_auc_score(binary, scores))


def test_numbers():
    outputs, labels = rng.normal(size=(2, N, 3, 5))
    flat = (outputs.reshape(N, -1), labels.reshape(N, -1))
    assert value("mse", outputs, labels) == pytest.approx(((outputs - labels) ** 2).mean())
    assert value("mae", outputs, labels) == pytest.approx(np.abs(outputs - labels).mean())
    norms = np.linalg.norm(flat[0], axis=1) * np.linalg.norm(flat[1], axis=1)
    assert value("cosine", outputs, labels) == pytest.approx(
        ((flat[0] * flat[1]).sum(1) / norms).mean()
    )
    error = ((flat[0] - flat[1]) ** 2).mean(axis=1)
    assert value("psnr", outputs, labels, data_range=2.0) == pytest.approx(
        (10 * np.log10(4 / error)).mean()
    )
    assert value("psnr", outputs, outputs) == 100.0


def test_segments():
    import torch
    from torchmetrics.functional import jaccard_index

    logits, masks = rng.normal(size=(N, 3, 4, 4)), rng.integers(3, size=(N, 4, 4))
    peer = jaccard_index(
        torch.tensor(logits), torch.tensor(masks), task="multiclass", num_classes=3
    )
    assert value("iou", logits, masks) == pytest.approx(float(peer))
    assert value("iou", masks, masks) == 1.0


def test_texts():
    import jiwer

    words = [rng.choice(list("abcde"), size=6) for _ in range(N)]
    ids = np.array([[ord(letter) - 97 for letter in each] for each in words])
    changed = np.where(rng.random(ids.shape) < 0.2, 0, ids)
    vocabulary = [f"{letter} " for letter in "abcde"]
    texts = [" ".join(each) for each in words]
    guessed = ["".join(vocabulary[i] for i in row) for row in changed]
    assert value("wer", changed, texts, vocabulary=vocabulary) == pytest.approx(
        jiwer.wer(texts, guessed)
    )
    blanked = np.stack([changed + 1, np.zeros_like(changed)], axis=2).reshape(N, -1)
    ctc = value("wer", blanked, texts, vocabulary=["", *vocabulary], blank=0)
    assert ctc == pytest.approx(jiwer.wer(texts, guessed))
    assert value("exact_match", changed, ids) == (changed == ids).all(axis=1).mean()


def test_perplexity():
    import torch
    from torch.nn.functional import cross_entropy

    logits, ids = rng.normal(size=(N, 7, 11)), rng.integers(11, size=(N, 7))
    ids[:, -2:] = -100
    peer = cross_entropy(torch.tensor(logits).flatten(0, 1), torch.tensor(ids).flatten())
    assert value("perplexity", logits, ids) == pytest.approx(float(peer.exp()))


def test_map_is_that_of_coco():
    from faster_coco_eval import COCO, COCOeval_faster

    truth, result = {"images": [], "annotations": [], "categories": [{"id": 1}, {"id": 2}]}, []
    labels, boxes, scores, classes = [], [], [], []
    for image in range(1, N + 1):
        truth["images"].append({"id": image, "width": 100, "height": 100})
        count = int(rng.integers(1, 5))
        corner, size = rng.uniform(0, 60, (count, 2)), rng.uniform(8, 30, (count, 2))
        kinds = rng.integers(1, 3, count)
        labels.append(
            {"boxes": np.hstack([corner, corner + size]).tolist(), "classes": kinds.tolist()}
        )
        for (x, y), (w, h), kind in zip(corner, size, kinds, strict=True):
            truth["annotations"].append(
                {"id": len(truth["annotations"]) + 1, "image_id": image, "category_id": int(kind),
                 "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0}
            )  # fmt: skip
        near = np.vstack([corner + rng.normal(0, 2, corner.shape), rng.uniform(0, 60, (2, 2))])
        wide = np.vstack([size * rng.uniform(0.8, 1.2, size.shape), rng.uniform(8, 30, (2, 2))])
        kind = np.concatenate([kinds, rng.integers(1, 3, 2)])
        score = rng.uniform(0.05, 1, count + 2)
        for (x, y), (w, h), k, s in zip(near, wide, kind, score, strict=True):
            result.append(
                {"image_id": image, "category_id": int(k), "bbox": [x, y, w, h], "score": s}
            )
        empty = 6 - len(near)
        boxes.append(np.vstack([np.hstack([near, near + wide]), np.zeros((empty, 4))]))
        scores.append(np.concatenate([score, np.zeros(empty)]))
        classes.append(np.concatenate([kind, np.zeros(empty)]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gt = COCO(truth)
        peer = COCOeval_faster(gt, gt.loadRes(result), "bbox")
        peer.evaluate()
        peer.accumulate()
        peer.summarize()
    outputs = {"boxes": np.array(boxes), "scores": np.array(scores), "classes": np.array(classes)}
    ours = value("map", outputs, labels)
    assert 0.1 < ours < 0.9
    assert ours == pytest.approx(peer.stats[0], abs=1e-9)
    assert value("map", outputs, labels, thresholds=[0.5]) == pytest.approx(peer.stats[1], abs=1e-9)


SCORED: list[tuple[str, dict[str, Any]]] = [
    ("accuracy", {}), ("accuracy", {"k": 2}), ("exact_match", {}), ("f1", {}), ("auroc", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), SCORED)
def test_labels_that_no_output_can_equal_are_refused(name: str, options: dict[str, Any]):
    """Both files would fail on such labels alike, so that no drop could be detected."""
    metric = built_in(name, options)
    wrong: list[Any] = [None, "2", float("nan"), 1.5, -1, 4]
    for label in wrong:
        labels = [*CLASSES[:-1].tolist(), label]
        with pytest.raises(DataError, match="a label is"):
            metric.update(LOGITS, labels)
    for right in (CLASSES.tolist(), CLASSES.astype(float), CLASSES.astype(np.uint8), CLASSES > 0):
        assert metric.update(LOGITS, right).samples == N


def is_refused(name: str, outputs: Any, labels: Any, **options: Any) -> bool:
    """Return whether a reference with these outputs is rejected, because no drop could be
    detected."""
    metric = built_in(name, options)
    try:
        metric.check_reference(metric.update(outputs, labels))
    except DataError:
        return True
    return False


LOGIT = rng.normal(size=N)
SHARE = 1.0 / (1.0 + np.exp(-3.0 * LOGIT))
BINARY = (LOGIT + rng.normal(size=N) > 0).astype(int)
MASKS = rng.normal(size=(N, 1, 4, 4))


@pytest.mark.parametrize(
    ("name", "outputs", "labels", "options"),
    [
        ("f1", SHARE, BINARY, {}),
        ("iou", 1.0 / (1.0 + np.exp(-MASKS)), MASKS[:, 0] > 0.5, {}),
        ("iou", MASKS, (MASKS[:, 0] > 0.5) * 255, {}),
        ("perplexity", SHARE[:, None, None] * [1, 0] + [0, 1] * (1 - SHARE)[:, None, None],
         BINARY[:, None], {}),
    ],
)  # fmt: skip
def test_outputs_on_which_no_drop_could_show_are_refused(name, outputs, labels, options):
    assert is_refused(name, outputs, labels, **options)


@pytest.mark.parametrize(
    ("name", "outputs", "labels", "options"),
    [
        ("f1", SHARE, BINARY, {"threshold": 0.5}),
        ("f1", SHARE, BINARY, {"threshold": 0.0}),
        ("f1", LOGIT, BINARY, {}),
        ("f1", (SHARE > 0.5).astype(np.float32), BINARY, {}),
        ("iou", 1.0 / (1.0 + np.exp(-MASKS)), MASKS[:, 0] > 0.5, {"threshold": 0.5}),
        ("iou", MASKS, (MASKS[:, 0] > 0.5) * 255, {"positive": 255}),
        ("iou", MASKS, MASKS[:, 0] > 0.5, {}),
    ],
)
def test_outputs_with_their_threshold_are_measured(name, outputs, labels, options):
    assert not is_refused(name, outputs, labels, **options)


def test_the_threshold_of_probabilities_is_that_of_their_logits():
    by_logit = value("f1", LOGIT, BINARY, average="binary")
    assert value("f1", SHARE, BINARY, average="binary", threshold=0.5) == by_logit
    for threshold in ("0.5", True):
        with pytest.raises(PolicyError, match="threshold"):
            built_in("f1", {"threshold": threshold})


def test_another_range_of_scores_is_no_change():
    metric = built_in("f1", {})
    first, second = (metric.update(LOGIT * factor, BINARY) for factor in (1.0, 5.0))
    assert first.differs(second).any()
    assert not metric.differing(first, second).any()


def test_auroc_of_probabilities_is_that_of_their_class():
    from sklearn.metrics import roc_auc_score

    shares = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    peer = roc_auc_score(CLASSES == 1, shares[:, 1])
    assert value("auroc", shares, CLASSES) == pytest.approx(peer)
    assert value("auroc", LOGITS, CLASSES) == pytest.approx(peer)
    metric = built_in("auroc", {})
    logits = metric.update(np.array([[0.3, 0.72]]), [1])  # logits whose sum is close to 1
    assert logits.rows[0, 0] == pytest.approx(0.42)


def test_a_detector_that_finds_no_object_is_refused():
    outputs = {"boxes": np.array([[[4, 4, 16, 27.0]]]), "scores": np.ones((1, 1)),
               "classes": np.ones((1, 1))}  # fmt: skip
    for box, kind, expected in (
        ([4, 4, 16, 27], 1, False), ([4, 4, 16, 27], 2, True), ([4, 4, 12, 23], 1, True),
    ):  # fmt: skip
        labels = [{"boxes": [box], "classes": [kind]}]
        assert is_refused("map", outputs, labels, thresholds=[0.75]) is expected


@pytest.mark.parametrize(("name", "options"), SCORED[:-1])
def test_nan_is_no_class(name: str, options: dict[str, Any]):
    outputs = np.where(np.arange(N)[:, None] == 5, np.nan, LOGITS)
    with pytest.raises(DataError, match="NaN"):
        built_in(name, options).update(outputs, CLASSES)


@pytest.mark.parametrize(
    ("name", "option"), [("accuracy", "k"), ("f1", "positive"), ("iou", "ignore"), ("wer", "blank")]
)
def test_options_that_are_no_integers_are_refused(name: str, option: str):
    for wrong in ("1", 1.0, True):
        with pytest.raises(PolicyError, match=f"{option} is {wrong!r}, expected an integer"):
            built_in(name, {option: wrong})


def test_one_number_per_sample_is_compared_with_one_label():
    assert value("mae", LOGIT[:, None], LOGIT + 0.5) == pytest.approx(0.5)


BOXES = {"boxes": np.zeros((2, 1, 4)), "scores": np.ones((2, 1)), "classes": np.zeros((2, 1))}


@pytest.mark.parametrize(
    ("name", "outputs", "labels", "words"),
    [
        ("accuracy", LOGITS[:2], [0, None], "a label is None"),
        ("accuracy", LOGITS[:2], [[0], [0, 1]], "different shapes"),
        ("wer", np.zeros((2, 3), dtype=np.int64), ["a", None], "a label is None"),
        ("wer", np.zeros((2, 3), dtype=np.int64), [1, 2], "a label is 1"),
        ("map", BOXES, [{"boxes": [[1, 2, 3]], "classes": [0]}] * 2, r"shape \(1, 3\)"),
    ],
)
def test_labels_of_another_kind_are_named(name: str, outputs: Any, labels: Any, words: str):
    with pytest.raises(DataError, match=words):
        built_in(name, {}).update(outputs, labels)


def test_labels_of_ids_are_texts_of_the_vocabulary():
    options = {"vocabulary": ["a ", "b "]}
    ids = np.array([[0, 1], [1, 1]])
    metric = built_in("wer", options)
    by_ids, by_text = (metric.update(ids, labels) for labels in (ids.tolist(), ["a b", "b b"]))
    assert not by_ids.differs(by_text).any()
    assert not is_refused("wer", ids, ["a b", "a a"], **options)
    assert is_refused("wer", ids, ["a b", "a a"])


def test_token_ids_beyond_the_vocabulary_are_refused():
    metric = built_in("wer", {"vocabulary": ["a ", "b "]})
    for wrong in (-1, 2):
        with pytest.raises(DataError, match=f"{wrong}, the vocabulary has 2 entries"):
            metric.update(np.array([[0, wrong]]), ["a b"])


def test_words_beyond_the_vocabulary_and_boxes_of_width_and_height_are_refused():
    logits = rng.normal(size=(2, 3, 5))
    for label in (-1, 5):
        with pytest.raises(DataError, match=f"a label is {label}"):
            built_in("perplexity", {}).update(logits, np.full((2, 3), label))
    outputs = {"boxes": np.zeros((1, 1, 4)), "scores": np.ones((1, 1)), "classes": np.ones((1, 1))}
    for box in ([20, 30, 10, 10], [0, 0, float("nan"), 3]):
        with pytest.raises(DataError, match="x1 <= x2"):
            built_in("map", {}).update(outputs, [{"boxes": [box], "classes": [1]}])
    outputs["scores"][0] = np.nan
    with pytest.raises(DataError, match="NaN"):
        built_in("map", {}).update(outputs, [{"boxes": [[0, 0, 5, 5]], "classes": [1]}])
