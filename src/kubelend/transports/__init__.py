"""How processes reach each other: TLS, the HTTP server and the HTTP client."""
