"""Signed statements (in-toto, SLSA), keys and trust."""
