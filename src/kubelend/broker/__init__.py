"""The broker's use cases and the ports they need from stores and clocks."""
