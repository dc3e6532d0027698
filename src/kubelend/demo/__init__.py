"""A broker, four agents and a reservation's whole life in one command."""
