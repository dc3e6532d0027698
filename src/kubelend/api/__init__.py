"""REST API of the broker: routes, authentication, request handling and handlers by noun."""
