"""The service that keeps the registry in the state the ledger allows."""
