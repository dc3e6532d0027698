"""Where the broker's events are kept: one contract, one module for each kind of store."""
