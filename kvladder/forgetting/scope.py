"""What a purge is about: one salt, one session, a prefix, what is older than a time, or all."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from kvladder.keys import KEY_BYTES, BlockKey

TOKENS_MAX: Final = 1 << 20
KEYS_MAX: Final = 1 << 16
AGE_MAX_S: Final = 100 * 366 * 86400.0
Kind: TypeAlias = Literal["salt", "session", "prefix", "age", "all"]
Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
HexKey: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class PurgeScope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The blocks to forget. Exactly one of the fields is given; ``salt`` may go with a prefix."""

    salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Cache salt of the requests that saved the blocks; with a prefix, the one bound into it."""
    session: Name | None = None
    """Session whose requests had the blocks, also those that other requests use."""
    tokens: Annotated[list[Token], msgspec.Meta(min_length=1, max_length=TOKENS_MAX)] | None = None
    """Tokens of a prefix from its start: its whole blocks, and all that descends from the last."""
    keys: Annotated[list[HexKey], msgspec.Meta(min_length=1, max_length=KEYS_MAX)] | None = None
    """A prefix by the keys of its blocks, in order: these, and all that descends from the last."""
    older_than_s: Annotated[float, msgspec.Meta(ge=0, le=AGE_MAX_S)] | None = None
    """Seconds: what was saved earlier than so long ago."""
    all: bool = False
    """True for every block of the namespace."""

    def __post_init__(self) -> None:
        names = ("session", "tokens", "keys", "older_than_s")
        given = [name for name in names if getattr(self, name) is not None]
        if self.all:
            given.append("all")
        if self.salt is not None and not {*given} & {"tokens", "keys"}:
            given.append("salt")
        if len(given) != 1:
            found = " and ".join(given) or "none"
            named = "a session, tokens, keys, or older_than_s"
            raise ValueError(f"expected either a salt or all: true, or {named}; found {found}")

    @property
    def kind(self) -> Kind:
        """The kind of scope."""
        if self.all:
            return "all"
        if self.session is not None:
            return "session"
        if self.older_than_s is not None:
            return "age"
        return "salt" if self.tokens is None and self.keys is None else "prefix"

    @property
    def named_keys(self) -> list[BlockKey]:
        """The blocks of ``keys``."""
        return [BlockKey(bytes.fromhex(key)) for key in self.keys or ()]

    def told(self) -> dict[str, Any]:
        """Return the scope for a receipt: no salt, and of a prefix only its length."""
        told: dict[str, Any] = {"kind": self.kind}
        if self.session is not None:
            told["session"] = self.session
        if self.older_than_s is not None:
            told["older_than_s"] = self.older_than_s
        if self.tokens is not None:
            told["tokens"] = len(self.tokens)
        if self.keys is not None:
            told["prefix_blocks"] = len(self.keys)
        return told
