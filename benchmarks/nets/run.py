"""Run the selected seeds one by one, or in several processes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.nets.judge import Outcome, judge


def outcomes(
    seeds: Sequence[int],
    *,
    jobs: int = 1,
    judged: Callable[[int], Outcome] = judge,
) -> Iterator[Outcome]:
    """Yield the outcomes in the order of the seeds, each as soon as it is there."""
    one = functools.partial(_quietly, judged=judged)
    if jobs == 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(one, seeds)


def _quietly(seed: int, *, judged: Callable[[int], Outcome]) -> Outcome:
    """One thread: more of them wait for each other longer than nets as small compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return judged(seed)
    finally:
        torch.set_num_threads(before)
