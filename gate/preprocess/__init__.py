"""Preprocessing that is the same everywhere: one spec, those who implement it, their comparison."""
