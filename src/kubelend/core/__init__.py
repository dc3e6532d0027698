"""The rules of lending, pure: no I/O, no clock, no logging, no asyncio."""
