"""Heads, recommenders, forecasters and sound models as companies write them
(`benchmarks.world.models`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import nn

from benchmarks.corpus import samples
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.world import sample_generators
from benchmarks.world.initial_weights import settle
from benchmarks.world.models import heads, pictures, recommenders, series

Draw = Callable[[int, int], Arrays]


def rows(count: int, seed: int) -> Arrays:
    """Rows of a table, float32 (count, 12), each column of unit scale."""
    drawn = np.random.default_rng(seed).normal(size=(count, heads.FEATURES))
    return {"rows": drawn.astype(np.float32)}


def clicks(count: int, seed: int) -> Arrays:
    """Categories and numbers of a recommender."""
    return sample_generators.clicks(
        count, seed, sizes=recommenders.SIZES, numbers=recommenders.NUMBERS
    )


def _categories(count: int, seed: int) -> Arrays:
    return {"categories": clicks(count, seed)["categories"]}


def _history(count: int, seed: int) -> Arrays:
    return {"history": samples.tokens(count, 12, vocabulary=recommenders.ITEMS, seed=seed)}


def _pictures(count: int, seed: int) -> Arrays:
    return {"picture": samples.normalised(count, 32, seed=seed)}


def _past(count: int, seed: int) -> Arrays:
    return {"past": sample_generators.past(count, seed, length=series.PAST)}


def _sound(count: int, seed: int) -> Arrays:
    return sample_generators.sound(count, seed, name="wave")


def _steps(count: int, seed: int) -> Arrays:
    return {"steps": samples.series(count, 4096, 1, seed=seed)[:, :, 0] + np.float32(0.5)}


def _own(
    name: str,
    make: Callable[[], nn.Module],
    draw_: Draw,
    *outputs: str,
    head: str = "",
    count: int = 64,
) -> Architecture:
    return Architecture(
        f"own-{name}",
        make,
        draw_,
        outputs=outputs or ("answer",),
        classes=outputs[:1] == ("logits",),
        head=head,
        settle=settle,
        count=count,
    )


def _headed(
    name: str, make: Callable[[], nn.Module], *outputs: str, count: int = 64
) -> Architecture:
    return _own(name, make, rows, *outputs, head="head", count=count)


ARCHITECTURES: list[Architecture] = [
    _headed("money", heads.Money, count=200),
    _headed("weather", heads.Weather, count=100),
    _headed("place", heads.Place),
    _headed("sorted-scores", heads.SortedScores),
    _headed("boxes-and-score", heads.BoxesAndScore, count=100),
    _headed("tagger", heads.Tagger, count=100),
    _headed("fraud", heads.Fraud, count=500),
    _headed("masked-words", heads.MaskedWords, "logits"),
    _headed("least-words", heads.LeastWords, "logits"),
    _headed("lost-words", heads.LostWords, "logits"),
    _headed("log-probabilities", heads.LogProbabilities, "logits"),
    _headed("log-likelihood", heads.LogLikelihood, count=100),
    _headed("small-increase", heads.SmallIncrease),
    _headed("heavy-tail", heads.HeavyTail, count=500),
    _headed("embedded", heads.Embedded),
    _headed("ranked", heads.Ranked, "best", "who", count=300),
    _headed(
        "with-constants", heads.WithConstants, "logits", "temperature", "grid", "positions", "kept"
    ),
    replace(_headed("gaps", heads.Gaps), gaps=True),
    _headed("limited", heads.Limited, "logits"),
    _headed("softened", heads.Softened),
    _own("experts", heads.Experts, rows, "logits", count=100),
    _own("running", heads.Running, _steps, count=32),
    _own("class-map", pictures.ClassMap, _pictures, "map", head="head"),
    _own("map-and-scores", pictures.MapAndScores, _pictures, "scores", "map", head="head"),
    _own("bytes", pictures.Bytes, _pictures, "shown", head="head"),
    _own("depth", pictures.Depth, _pictures, "metres", head="head", count=32),
    _own("centre-net", pictures.CentreNet, _pictures, "heat", "boxes", head="head", count=32),
    _own("dlrm", recommenders.Dlrm, clicks, "click", count=300),
    _own("wide-and-deep", recommenders.WideAndDeep, clicks, "score", count=200),
    _own("cross-network", recommenders.CrossNetwork, clicks, "click", "buy", count=200),
    _own("factorisation-machine", recommenders.FactorisationMachine, clicks, "score"),
    _own("matrix-factorisation", recommenders.MatrixFactorisation, _categories, "rating"),
    _own("two-towers", recommenders.TwoTowers, clicks, "user", "item", "cosine", count=100),
    _own("next-item", recommenders.NextItem, _history, "logits", head="head"),
    _own("blocks", series.Blocks, _past, "forecast", count=100),
    _own("causal", series.Causal, _past, "forecast"),
    _own("deep-ar", series.DeepAr, _past, "expected", "spread", count=48),
    _own("sequences", series.Sequences, _past, "forecast", "hidden", "cell"),
    _own("both-ways", series.BothWays, _past, "logits", head="head"),
    _own("m5", series.M5, _sound, "logits", head="head", count=32),
    _own("mel-front", series.MelFront, _sound, "logits", head="head", count=32),
    _own("separator", series.Separator, _sound, "speakers", count=32),
]
