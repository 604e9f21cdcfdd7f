"""The directory of receipts: what is owed survives restarts, and a process that is killed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvladder.errors import ConfigError, Unavailable
from kvladder.forgetting.receipt import Receipt, Signer, read_receipt
from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.tiers import forks

MODE: Final = 0o700
_ID: Final = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")
_HINT: Final = "expected a directory that this user may write to"


class PurgeLedger:
    """Receipts of one deployment's purges, each in ``ID.json``, and their blocks in ``ID.keys``.

    A receipt is written before the first block is removed, and replaced as levels are done. So
    whatever a killed process had promised is still there, as owed. One process at a time owns the
    directory. All calls block for as long as the disk takes.

    Raises
    ------
    ConfigError
        The directory cannot be used.
    Unavailable
        Another process owns it.
    """

    def __init__(self, path: Path, signer: Signer) -> None:
        self.path = path
        self.signer = signer
        try:
            path.mkdir(mode=MODE, parents=True, exist_ok=True)
            self._fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            what = f"{path}: {error.strerror}"
            raise ConfigError(what, path="forget.path", hint=_HINT) from error
        forks.own(self._fd)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            forks.close(self._fd)
            hint = "end that process, or give each engine its own directory, e.g. with ${NAME}"
            what = f"{path} is in use by another process"
            raise Unavailable(what, path="forget.path", hint=hint) from error

    def begin(self, receipt: Receipt, keys: Sequence[BlockKey]) -> None:
        """Make a purge that is about to begin survive: first its blocks, then its receipt."""
        data = b"".join(keys)
        receipt.keys, receipt.keys_sha256 = len(keys), hashlib.sha256(data).hexdigest()
        if keys:
            self._replace(f"{receipt.id}.keys", data)
        else:
            receipt.keys_sha256 = ""
        self.write(receipt)

    def write(self, receipt: Receipt) -> None:
        """Sign a receipt as it is now, and replace the one in the directory."""
        receipt.complete = not receipt.owed
        self.signer.sign(receipt)
        self._replace(f"{receipt.id}.json", receipt.as_json())

    def _replace(self, name: str, data: bytes) -> None:
        """Write a file that is there whole or not at all, also after a loss of power."""
        aside = self.path / f"{name}.new"
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        aside.replace(self.path / name)
        folder = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def owed(self) -> Iterator[Receipt]:
        """Yield the receipts with a level that is not done, oldest first.

        Raises
        ------
        ConfigError
            One of them is damaged, was changed, or is signed with another key: what it owes cannot
            be trusted.
        """
        for name in sorted(one.stem for one in self.path.glob("*.json")):
            if not _ID.fullmatch(name):
                continue
            path = self.path / f"{name}.json"
            receipt = read_receipt(path.read_bytes(), str(path))
            if not receipt.owed:
                continue
            if wrong := self.signer.wrong(receipt):
                hint = "restore it, or move it away and repeat its purge"
                raise ConfigError(wrong, path=str(path), hint=hint)
            yield receipt

    def newest(self, receipt: Receipt) -> Receipt:
        """Return a valid receipt as it is in the directory by now; itself if it is not there."""
        path = self.path / f"{receipt.id}.json"
        if not _ID.fullmatch(receipt.id) or not path.exists():
            return receipt
        found = read_receipt(path.read_bytes(), str(path))
        same = all(
            getattr(found, name) == getattr(receipt, name)
            for name in ("scope", "salt_digest", "keys_sha256", "mark")
        )
        return found if same and not self.signer.wrong(found) else receipt

    def keys(self, receipt: Receipt) -> list[BlockKey]:
        """Return the blocks that a receipt names one by one; see ``read_keys``."""
        return read_keys(self.path, receipt)

    def close(self) -> None:
        """Let another process own the directory; called once."""
        with suppress(OSError):
            forks.close(self._fd)


def read_keys(folder: Path, receipt: Receipt) -> list[BlockKey]:
    """Return the blocks that a receipt names one by one, from the file beside it.

    Raises
    ------
    ConfigError
        The file is missing, or is not the one that the receipt was signed with.
    """
    if not receipt.keys:
        return []
    if not _ID.fullmatch(receipt.id):
        raise ConfigError(repr(receipt.id), path="id", hint="expected the id of a receipt")
    path = folder / f"{receipt.id}.keys"
    try:
        data = path.read_bytes()
    except OSError as error:
        what = f"{path}: {error.strerror}"
        hint = "expected the blocks of the receipt: keep both files together"
        raise ConfigError(what, path="keys", hint=hint) from error
    if hashlib.sha256(data).hexdigest() != receipt.keys_sha256:
        hint = "restore the file that was written with the receipt"
        raise ConfigError("the blocks are not those of the receipt", path=str(path), hint=hint)
    size = KEY_BYTES
    return [BlockKey(data[at : at + size]) for at in range(0, len(data), size)]
