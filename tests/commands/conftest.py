from __future__ import annotations

from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]
