"""Local Kubernetes clusters for trying Kubelend: three clusters, a broker and two agents on this machine.

The clusters are control planes without kubelets and controllers: objects are stored, validated and watched
as usual, but nothing acts on them. A deleted namespace therefore stays in Terminating, objects outlive their
owners, and aggregated roles (`view`, `edit`, `admin`) grant nothing.
"""
