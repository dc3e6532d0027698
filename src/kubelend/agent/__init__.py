"""What an agent does for its cluster: measure, advertise, reserve, hold, peer. All I/O is behind ports."""
