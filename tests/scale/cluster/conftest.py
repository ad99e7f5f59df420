"""Ray reads its switches when it is imported, which the tests of this folder do first."""

from __future__ import annotations

from gate.distributed.cluster_early import set_switches

set_switches()
