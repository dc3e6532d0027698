"""Kubelend: Kubernetes clusters lend and borrow capacity through one broker.

The version is written here and nowhere else: the build, `kubelend version` and the metrics read it.
"""

__version__ = "0.1.0"
