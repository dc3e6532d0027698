"""Routes by noun; `wire.routes` joins them."""
