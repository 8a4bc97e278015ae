"""Where replicas stand, for whoever asks them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

CONNECT_S: Final = 5.0


@dataclass(eq=False)
class Place:
    """Where a replica stands. `session` is None while none does; `under_way` are the tasks that wait for it."""

    number: int
    url: str = ""
    session: aiohttp.ClientSession | None = None
    under_way: set["asyncio.Task[None]"] = field(default_factory=set)

    def open(self, url: str) -> None:
        """A replica stands at `url`, from now on."""
        self.url = url
        self.session = aiohttp.ClientSession(
            # A connection that is kept may be the one that a replica has closed as it died.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """It stands there no more: whoever still waits for an answer of it is cancelled, for it may never come."""
        if self.session is not None:
            session, self.session = self.session, None
            for task in self.under_way:
                task.cancel()
            await session.close()


class Places(ABC):
    """All of them, by number."""

    @property
    @abstractmethod
    def places(self) -> Sequence[Place]:
        """Each place, whether a replica stands there or not."""

    @property
    def live(self) -> list[int]:
        """The numbers of those that can be asked."""
        return [each.number for each in self.places if each.session is not None]
