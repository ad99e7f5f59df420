"""The decision: pure functions of policy and evidence."""
