"""What an agent does for its cluster: it measures, advertises, borrows and lends. All I/O is behind ports."""
