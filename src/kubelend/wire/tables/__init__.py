"""The routes by noun, a table each; `wire.routes` puts them together."""
