"""Plug-ins of other programs: pytest, MLflow."""
