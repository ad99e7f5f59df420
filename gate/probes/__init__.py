"""Instrument: generated inputs that reveal what an export baked in."""
