"""TLS, the HTTP server with its listener, and the HTTP client of the broker."""
