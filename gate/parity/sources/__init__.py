"""Where samples come from besides mapped arrays: data sets, columns, tars, URLs."""
