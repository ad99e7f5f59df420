"""Ray reads its switches when it is imported, which the tests of this folder do first."""

from __future__ import annotations

from gate.distributed.worker_pool import set_switches

set_switches()
