"""A broker, three clusters and a reservation's whole life in one command."""
