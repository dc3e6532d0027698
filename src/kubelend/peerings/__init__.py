"""How two clusters are connected: the implementations of `agent.ports.Peering`."""
