"""Who decides, where one broker alone uses a store: it does, for as long as it runs."""

from __future__ import annotations


class Alone:
    """Of a store that no second broker can open."""

    leads = True
    leader = ""

    async def won(self) -> None:
        """It has been from the beginning."""


ALONE = Alone()
