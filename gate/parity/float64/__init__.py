"""The float64 reference, and errors in units of what rounding makes."""
