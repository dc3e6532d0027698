"""Where an agent finds its cluster: the implementations of `agent.ports.ClusterSource` and `LocalObjects`."""
