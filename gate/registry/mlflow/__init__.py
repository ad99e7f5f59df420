"""The MLflow model registry."""
