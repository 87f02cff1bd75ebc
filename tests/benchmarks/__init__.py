"""One script per figure of docs/explanation/performance: ``python -m tests.benchmarks``."""
