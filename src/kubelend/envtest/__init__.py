"""Throw-away API servers, brokers and agents for tests, benchmarks, the lab and the demo."""
