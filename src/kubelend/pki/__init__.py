"""The certificate authority that gives clusters and people their identity."""
