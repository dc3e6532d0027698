"""Helpers that know nothing of lending: guarded tasks, backoff, clock, logs."""
