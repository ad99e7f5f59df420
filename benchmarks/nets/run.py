"""Run the selected seeds one by one, or in several processes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.nets.judge import Outcome, judge


def judge_seeds(
    seeds: Sequence[int],
    *,
    jobs: int = 1,
    judge_seed: Callable[[int], Outcome] = judge,
) -> Iterator[Outcome]:
    """Yield the outcomes in the order of the seeds, each as soon as it is available."""
    judge_one = functools.partial(_judge_single_threaded, judge_seed=judge_seed)
    if jobs == 1:
        yield from map(judge_one, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(judge_one, seeds)


def _judge_single_threaded(seed: int, *, judge_seed: Callable[[int], Outcome]) -> Outcome:
    """Judge one seed with one thread and without warnings.

    With several threads, nets as small as these spend most of the time in synchronization.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return judge_seed(seed)
    finally:
        torch.set_num_threads(before)
