"""The table of costs."""

from __future__ import annotations

import math

from gate.records.evidence import Cost, Latency
from gate.summary.summarize import COST_HEADINGS, costs_of
from gate.summary.summary import CostRow
from tests.builders import absent, evidence, runtime_evidence


def latency(median_ms: float, batch_size: int = 1) -> Latency:
    return Latency(batch_size=batch_size, batches=9, median_ms=median_ms, p95_ms=2 * median_ms)


def test_pytorch_comes_first_and_who_did_not_run_has_no_row() -> None:
    cost = Cost(open_ms=12.0, first_ms=4.0, first_batch_size=1, single=latency(1.0),
                peak_bytes=700_000_000, cuda_bytes=512_000_000)  # fmt: skip
    runtime = runtime_evidence(
        "ort-cpu", latency=latency(10.0, 32), cost=cost, memory_bytes=30_000_000
    )
    reference = Cost(first_ms=9.0, single=latency(2.0))
    rows = costs_of(
        evidence(
            runtimes=(runtime, absent("ort-cuda")),
            reference_latency=latency(40.0, 32),
            reference_cost=reference,
        )
    )
    assert [row.cells() for row in rows] == [
        ("PyTorch, CPU", "", "9 ms", "2 / 4 ms", "40 / 80 ms (32)", "", "", ""),
        ("ort-cpu", "12 ms", "4 ms", "1 / 2 ms", "10 / 20 ms (32)", "0.5 ×",
         "30 MB, CUDA 512 MB", "700 MB"),
    ]  # fmt: skip
    assert {len(row.cells()) for row in rows} == {len(COST_HEADINGS)}


def test_what_is_long_or_large_is_in_larger_units() -> None:
    row = CostRow(
        runtime="r", open_ms=3130.0, first_ms=999.4, single=latency(600.0),
        memory_bytes=999_400_000, peak_bytes=1_240_000_000,
    )  # fmt: skip
    assert row.cells() == (
        "r", "3.13 s", "999 ms", "0.6 / 1.2 s", "", "", "999 MB", "1.24 GB",
    )  # fmt: skip


def test_a_time_that_is_none_shows_as_that() -> None:
    runtime = runtime_evidence(
        "ort-cpu", latency=latency(math.nan, 32), cost=Cost(single=latency(1.0))
    )
    reference = Cost(single=latency(2.0))
    made = evidence(
        runtimes=(runtime,), reference_latency=latency(40.0, 32), reference_cost=reference
    )
    assert costs_of(made)[1].cells()[5] == "nan ×"


def test_evidence_of_before_has_no_table() -> None:
    assert costs_of(evidence()) == ()
