"""Heads, recommenders, forecasters and sound models as companies write them.

The models are in `benchmarks.world.models`.
"""

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
    """Return rows of a table, float32 (count, 12), with columns of unit scale."""
    values = np.random.default_rng(seed).normal(size=(count, heads.FEATURES))
    return {"rows": values.astype(np.float32)}


def clicks(count: int, seed: int) -> Arrays:
    """Return the categories and numbers of a recommender."""
    return sample_generators.clicks(
        count, seed, sizes=recommenders.SIZES, numbers=recommenders.NUMBERS
    )


def _categories(count: int, seed: int) -> Arrays:
    return {"categories": clicks(count, seed)["categories"]}


def _history(count: int, seed: int) -> Arrays:
    return {"history": samples.tokens(count, 12, vocabulary=recommenders.ITEMS, seed=seed)}


def _pictures(count: int, seed: int) -> Arrays:
    return {"picture": samples.normalized(count, 32, seed=seed)}


def _past(count: int, seed: int) -> Arrays:
    return {"past": sample_generators.past(count, seed, length=series.PAST)}


def _sound(count: int, seed: int) -> Arrays:
    return sample_generators.sound(count, seed, name="wave")


def _steps(count: int, seed: int) -> Arrays:
    return {"steps": samples.series(count, 4096, 1, seed=seed)[:, :, 0] + np.float32(0.5)}


def _custom(
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


def _custom_head(
    name: str, make: Callable[[], nn.Module], *outputs: str, count: int = 64
) -> Architecture:
    return _custom(name, make, rows, *outputs, head="head", count=count)


ARCHITECTURES: list[Architecture] = [
    _custom_head("money", heads.Amounts, count=200),
    _custom_head("weather", heads.WeatherUnits, count=100),
    _custom_head("place", heads.Coordinates),
    _custom_head("sorted-scores", heads.SortedScores),
    _custom_head("boxes-and-score", heads.BoxesAndScore, count=100),
    _custom_head("tagger", heads.Tagger, count=100),
    _custom_head("fraud", heads.FraudProbability, count=500),
    _custom_head("masked-words", heads.MaskedWords, "logits"),
    _custom_head("least-words", heads.LowestFloatMaskedWords, "logits"),
    _custom_head("lost-words", heads.InfinityMaskedWords, "logits"),
    _custom_head("log-probabilities", heads.LogProbabilities, "logits"),
    _custom_head("log-likelihood", heads.LogLikelihood, count=100),
    _custom_head("small-increase", heads.SmallIncrease),
    _custom_head("heavy-tail", heads.HeavyTail, count=500),
    _custom_head("embedded", heads.UnitEmbedding),
    _custom_head("ranked", heads.TopThree, "best", "who", count=300),
    _custom_head(
        "with-constants", heads.WithConstants, "logits", "temperature", "grid", "positions", "kept"
    ),
    replace(_custom_head("gaps", heads.MissingValues), gaps=True),
    _custom_head("limited", heads.ClippedInput, "logits"),
    _custom_head("softened", heads.EarlySoftplus),
    _custom("experts", heads.Experts, rows, "logits", count=100),
    _custom("running", heads.RunningSum, _steps, count=32),
    _custom("class-map", pictures.ClassMap, _pictures, "map", head="head"),
    _custom("map-and-scores", pictures.MapAndScores, _pictures, "scores", "map", head="head"),
    _custom("bytes", pictures.ByteImage, _pictures, "shown", head="head"),
    _custom("depth", pictures.Depth, _pictures, "metres", head="head", count=32),
    _custom("centre-net", pictures.CenterNet, _pictures, "heat", "boxes", head="head", count=32),
    _custom("dlrm", recommenders.Dlrm, clicks, "click", count=300),
    _custom("wide-and-deep", recommenders.WideAndDeep, clicks, "score", count=200),
    _custom("cross-network", recommenders.CrossNetwork, clicks, "click", "buy", count=200),
    _custom("factorisation-machine", recommenders.FactorizationMachine, clicks, "score"),
    _custom("matrix-factorisation", recommenders.MatrixFactorization, _categories, "rating"),
    _custom("two-towers", recommenders.TwoTowers, clicks, "user", "item", "cosine", count=100),
    _custom("next-item", recommenders.NextItem, _history, "logits", head="head"),
    _custom("blocks", series.NBeats, _past, "forecast", count=100),
    _custom("causal", series.CausalConvolutions, _past, "forecast"),
    _custom("deep-ar", series.DeepAr, _past, "expected", "spread", count=48),
    _custom("sequences", series.EncoderDecoder, _past, "forecast", "hidden", "cell"),
    _custom("both-ways", series.BidirectionalGru, _past, "logits", head="head"),
    _custom("m5", series.M5, _sound, "logits", head="head", count=32),
    _custom("mel-front", series.MelFrontend, _sound, "logits", head="head", count=32),
    _custom("separator", series.Separator, _sound, "speakers", count=32),
]
