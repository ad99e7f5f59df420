"""Pure rules: policy and evidence in, check results and verdict out."""
