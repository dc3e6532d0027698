"""Where the broker's records are kept: one contract, one module for each kind of store."""
