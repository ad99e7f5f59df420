"""The only package that imports mlflow."""
