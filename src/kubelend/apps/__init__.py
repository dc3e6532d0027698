"""Composition roots: the only places that construct things and wire them together."""
