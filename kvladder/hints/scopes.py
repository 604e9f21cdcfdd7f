"""Finds the blocks that an action is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from kvladder.hints.protocol import RefusedHint, Scope
from kvladder.keys import BlockKey, salt_digest
from kvladder.manager import CacheManager

NameBlocks: TypeAlias = Callable[[Sequence[int], str], Sequence[Sequence[BlockKey]]]
"""Returns the keys of the whole blocks of tokens under a salt, by group of layers.

Any thread may call it.
"""


class OwnRequest(NamedTuple):
    """The request that brings hints, if one does: its blocks are the default scope."""

    keys: Sequence[BlockKey] = ()
    salt: str = ""


NO_REQUEST: Final = OwnRequest()


class Scoped(NamedTuple):
    """Blocks that an action is about."""

    runs: Sequence[Sequence[BlockKey]]
    """Prefixes, one for each group of layers; or one list of keys."""
    salt: str
    is_prefix: bool

    @property
    def keys(self) -> Sequence[BlockKey]:
        if len(self.runs) == 1:
            return self.runs[0]
        return [key for run in self.runs for key in run]


class Scopes:
    """Finds blocks by what actions name: tokens, keys, a session, or nothing. Any thread may."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._digested = "", salt_digest(manager.namespace, "")
        """The last salt, with its digest."""

    def of(self, scope: Scope, request: OwnRequest | None) -> Scoped:
        """Return the blocks that an action names.

        Raises
        ------
        RefusedHint
            The salt is another than that of the request, or the engine cannot name tokens.
        """
        own = request or NO_REQUEST
        salt = own.salt if scope.salt is None else scope.salt
        if request is not None and salt != own.salt:
            raise RefusedHint("the salt is not that of the request: expected none, or the same")
        if scope.session is not None:
            try:
                runs, salt_of = self._manager.sessions.last(scope.session)
            except ValueError:
                return Scoped([], salt, is_prefix=False)
            return Scoped(runs if salt_of == salt else [], salt, is_prefix=True)
        if scope.keys is not None:
            keys = [BlockKey(bytes.fromhex(key)) for key in scope.keys]
            return Scoped([keys], salt, is_prefix=False)
        if scope.tokens is None:
            return Scoped([own.keys], salt, is_prefix=True)
        names = self._manager.name_blocks
        if names is None:
            raise RefusedHint("this engine names blocks itself: expected a session or keys")
        return Scoped(names(scope.tokens, salt), salt, is_prefix=True)

    def digest(self, salt: str) -> bytes:
        """Return the digest of a salt, as it is recorded with its blocks."""
        known = self._digested
        if known[0] != salt:
            known = self._digested = salt, salt_digest(self._manager.namespace, salt)
        return known[1]
