"""Random rounding: how far an honest float32 implementation may be off."""
