"""Stores for the broker's records: in memory, in SQLite and in Kubernetes, behind one port."""
