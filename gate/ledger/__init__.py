"""The ledger: what happened to models, in a chain of lines, and what is asked of it."""
