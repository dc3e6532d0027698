"""The REST routes by noun, and the middleware around them."""
