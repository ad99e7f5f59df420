"""Promotion of exactly the measured bytes in a model registry."""
