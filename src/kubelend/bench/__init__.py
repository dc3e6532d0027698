"""Measurements of the real thing, each also alone and as JSON."""
