"""The demo: a broker, four agents and the lifecycle of a reservation in one command."""
