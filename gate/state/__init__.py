"""The database of the service: where the ledger and the inbox are."""
