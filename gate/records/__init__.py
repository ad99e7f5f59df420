"""What was measured and decided, as records that are readable forever."""
