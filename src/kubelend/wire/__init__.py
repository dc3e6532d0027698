"""What crosses a process boundary, as types and text, still without I/O."""
