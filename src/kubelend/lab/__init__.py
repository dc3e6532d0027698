"""Clusters to try things on: real Kubernetes API servers on this machine, for tests, benchmarks and a look.

They are control planes without nodes or controllers: objects are kept, checked and watched as anywhere,
and nothing happens because of them. A deleted namespace therefore stays with what is in it, objects outlive
their owners, and aggregated roles (`view`, `edit`, `admin`) allow nothing.
"""
