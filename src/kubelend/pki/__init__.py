"""Certificates, join tokens and signed grants: the identity of clusters and people."""
