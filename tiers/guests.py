"""What uses an open cache beside its engine, and is closed before it."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar


class Closing(Protocol):
    """Something that is closed together with a cache."""

    def close(self) -> None:
        """Close it."""
        ...


H = TypeVar("H")
C = TypeVar("C", bound=Closing)


class Guests(Generic[H]):
    """The guests of one host, in the order in which they came. Any thread may call it."""

    def __init__(self, host: H) -> None:
        self._host = host
        self._lock = RLock()
        self._all: list[Closing] = []
        self._only: dict[Callable[[H], Any], Any] = {}

    def admit(self, guest: Closing) -> None:
        """Take a guest, to be closed before its host."""
        self._all.append(guest)

    def only(self, kind: Callable[[H], C]) -> C:
        """Return the one guest that ``kind`` makes of the host; made when first asked for."""
        with self._lock:
            found: C | None = self._only.get(kind)
            if found is None:
                found = self._only[kind] = kind(self._host)
                self.admit(found)
            return found

    def close(self) -> None:
        """Close all guests."""
        for guest in self._all:
            guest.close()
