"""The broker at home in Kubernetes: what people apply becomes a command, and what was decided is shown."""
