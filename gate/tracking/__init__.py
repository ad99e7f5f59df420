"""MLflow's runs: what a judgement writes on a run's page, and finding that run again."""
