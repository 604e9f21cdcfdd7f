"""The section ``forget``: where purges keep what they owe, and the key of their receipts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvladder.errors import ConfigError
from kvladder.schema import Settings
from kvladder.secrets.file import Secrets

KEY_MIN: Final = 16


class ForgetConfig(Settings, frozen=True, kw_only=True):
    """Purges with receipts: by session, prefix and age, too. Off without ``path``."""

    path: str | None = None
    """Directory of receipts and of what is owed; further engines of one configuration use
    ``PATH/dp1``, ``PATH/dp2`` ..."""
    key: str = ""
    """Secret that receipts are signed with; ``${NAME}`` is a variable."""
    key_file: str = ""
    """File with the key in its first line. Receipts signed with keys in further lines are valid,
    too. The file is read again when it has changed."""
    name: str = ""
    """Name of the deployment in receipts; by default that of the host."""

    def __post_init__(self) -> None:
        if self.path is None:
            if self.key or self.key_file or self.name:
                hint = "expected a directory, or leave the section out"
                raise ConfigError("missing", path="path", hint=hint)
            return
        if not Path(self.path).name or "\0" in self.path:
            hint = "expected the name of a directory, or leave the section out"
            raise ConfigError(repr(self.path), path="path", hint=hint)
        if bool(self.key) == bool(self.key_file):
            what = "both are set" if self.key else "missing"
            hint = "leave out one of them" if self.key else "set forget.key_file or forget.key"
            raise ConfigError(what, path="key", hint=hint)
        if self.key:
            require_key(self.key, "key")

    @property
    def secret(self) -> str:
        """The key that signs.

        Raises
        ------
        ConfigError
            The file cannot be read, or holds no key.
        """
        return next(iter(self.secrets().lines()), "")

    def secrets(self, say: Callable[[str, str], object] = lambda _kind, _text: None) -> Secrets:
        """Return all keys; ``say`` is told when they change. Raises as ``secret`` does."""
        where = "forget.key_file"
        return Secrets(self.key, file=self.key_file, setting=where, require=require_key, say=say)

    def of(self, instance: int) -> Path:
        """Return the directory of one of several engines; ``path`` is set."""
        whole = Path(self.path or "")
        return whole / f"dp{instance}" if instance else whole


def require_key(key: str, path: str) -> None:
    """Raise ConfigError if ``key`` is easily guessed, or is more than one line."""
    if len(key) < KEY_MIN or "\n" in key:
        hint = "make one with: openssl rand -hex 32"
        raise ConfigError(
            f"expected one line of at least {KEY_MIN} characters", path=path, hint=hint
        )
