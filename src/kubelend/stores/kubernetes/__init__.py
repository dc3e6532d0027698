"""The store in Kubernetes objects: one head record that commits, and the objects that follow it."""
