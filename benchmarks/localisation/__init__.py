"""Faults of one layer in architectures that others wrote: does `gate locate` name the layer?

Needs timm and transformers. Nothing is downloaded: small configurations with random weights.
"""
