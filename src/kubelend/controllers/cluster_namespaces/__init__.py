"""Serves agents that reach the broker through objects in a namespace of their own."""
