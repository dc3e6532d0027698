"""Use cases of the broker: the single writer, its service, streams, metrics and audit log."""
