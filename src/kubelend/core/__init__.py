"""The domain: pure, without I/O, clock, logging or asyncio."""
