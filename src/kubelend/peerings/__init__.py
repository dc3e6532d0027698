"""How two clusters are joined: the implementations of `agent.ports.Peering`."""
