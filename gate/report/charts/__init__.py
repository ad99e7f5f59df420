"""Charts of a report: SVG by matplotlib, made for a column as wide as a telephone's screen."""
