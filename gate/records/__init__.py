"""The public schema of all JSON records. Old versions stay readable."""
