"""Releases of several files: the parts, and the chain that runs them in order."""
