"""Inputs beside the samples, chosen to unmask what an export baked in."""
