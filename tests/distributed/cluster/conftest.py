"""Set Ray's environment variables before these tests import Ray, which reads them once."""

from __future__ import annotations

from gate.distributed.worker_pool import set_switches

set_switches()
