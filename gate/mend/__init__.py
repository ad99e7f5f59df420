"""Search for an export that passes at the least cost, and prove it."""
