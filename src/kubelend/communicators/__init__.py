"""How an agent reaches its broker: the implementations of `agent.ports.BrokerCommunicator`."""
