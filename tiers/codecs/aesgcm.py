"""Encryption at rest: AES-256-GCM, with a separate key for each cache salt."""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from struct import Struct
from typing import ClassVar, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADCipherContext, Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.schema import Settings
from kvladder.secrets.file import Secrets
from kvladder.tiers.codecs.base import Codec, Stage, Subject

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
KEYS_MAX = 1024
"""Most derived keys kept in memory; others are derived again."""
SALT_BYTES_MAX = 16
EPOCH_BYTES = 12
BLOCKS_MAX = 1 << 32
"""Most blocks that one key encrypts: the limit of NIST SP 800-38D, 8.3 for random nonces."""

ID_BYTES = 8
_PARAMS = Struct(f"<{ID_BYTES}s{NONCE_BYTES}s{TAG_BYTES}s{EPOCH_BYTES}s")
_AES_BYTES = 16
_HINT = "expected 32 or more random bytes in hexadecimal or Base64: openssl rand -hex 32"
logger = logging.getLogger("kvladder")


class AesGcmOptions(Settings, frozen=True, kw_only=True):
    """Options of the encryption codec."""

    variable: str = "KVLADDER_KEY"
    """Environment variable with the master key: 32 bytes or more, in hexadecimal or base64."""
    key_file: str = ""
    """File with the master key in its first line, in place of the variable; blocks of the keys in
    further lines are read, too. Read again when it has changed."""


class _Writer(NamedTuple):
    """A key with which only this process encrypts."""

    epoch: bytes
    key: bytes
    used: Iterator[int]
    """Counter of encrypted blocks; any thread may advance it."""


class _Keys:
    """Everything that is derived from master keys: the first encrypts, and all decrypt."""

    def __init__(self, masters: Sequence[bytes], namespace: bytes) -> None:
        def derive(master: bytes, use: bytes, more: bytes) -> bytes:
            info = b"kvladder aes-gcm v2\0" + use + b"\0" + namespace + more
            return HKDF(SHA256(), KEY_BYTES, None, info).derive(master)

        known = {derive(master, b"id", b"")[:ID_BYTES]: master for master in reversed(masters)}
        self.ids = known.keys()
        self.own = derive(masters[0], b"id", b"")[:ID_BYTES]
        self._writers: dict[bytes, _Writer] = {}

        @lru_cache(KEYS_MAX)
        def key(own: bytes, salt: bytes, epoch: bytes) -> bytes:
            return derive(known[own], b"key", epoch + salt)

        self.key = key

    def writer(self, salt: bytes) -> _Writer:
        """Return the key to encrypt one more block of this salt; any thread may call it."""
        writer = self._writers.get(salt)
        if writer is None or next(writer.used) >= BLOCKS_MAX:
            if len(self._writers) >= KEYS_MAX:
                self._writers.clear()  # a salt that comes back gets another epoch
            epoch = os.urandom(EPOCH_BYTES)
            key = self.key(self.own, salt, epoch)
            writer = self._writers[salt] = _Writer(epoch, key, count(1))
        return writer


class AesGcmCodec(Codec):
    """Encrypts a block, and authenticates it with block key, namespace, salt and earlier steps.

    The encryption key is derived by HKDF-SHA256 (RFC 5869) from the master key, the namespace, an
    epoch and ``Subject.salt``. The epoch is random and belongs to this process, so the process can
    count the blocks of a key: after ``BLOCKS_MAX`` another epoch begins. Nonces are random, 96
    bits. An id of the master key, the nonce, the tag, the epoch and the salt's digest are stored
    beside the block. For a reader without that master key the block is a miss.
    """

    name = "aes-gcm"
    id = 4
    stage = Stage.ENCRYPT
    checks = True
    Options: ClassVar[type[AesGcmOptions]] = AesGcmOptions

    def __init__(self, options: AesGcmOptions | None = None) -> None:
        self.options = options or AesGcmOptions()

    def open(self, layout: Layout, namespace: bytes) -> Layout:
        self._namespace = namespace
        file, variable = self.options.key_file, self.options.variable
        self._found: tuple[int, int, int] | None = None
        if file:
            setting = "aes-gcm.key_file"
            self._secrets = Secrets(file=file, setting=setting, require=_master, say=_say)
            self._found = _version(file)
            masters = [_master(line, setting) for line in self._secrets.lines()]
        else:
            text = os.environ.get(variable, "").strip()
            if not text:
                where = "aes-gcm.variable"
                raise ConfigError(f"{variable} is not set", path=where, hint=_HINT)
            masters = [_master(text, "aes-gcm.variable", variable)]
        self._keys = _Keys(masters, namespace)
        return layout

    def _current(self) -> _Keys:
        """Return the keys, read again if their file has changed; any thread may call it."""
        file = self.options.key_file
        if file and (version := _version(file)) != self._found:
            self._found = version
            masters = [_master(line, "aes-gcm.key_file") for line in self._secrets.lines()]
            self._keys = _Keys(masters, self._namespace)
        return self._keys

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes]:
        nonce = os.urandom(NONCE_BYTES)
        keys = self._current()
        writer = keys.writer(subject.salt)
        encryptor = Cipher(algorithms.AES(writer.key), modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(self._bound(subject, subject.salt))
        _update(encryptor, data, target)
        encryptor.finalize()
        params = _PARAMS.pack(keys.own, nonce, encryptor.tag, writer.epoch) + subject.salt
        return target[: len(data)], params

    def reads(self, params: bytes) -> bool:
        return params[:ID_BYTES] in self._current().ids

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        if not 0 <= len(params) - _PARAMS.size <= SALT_BYTES_MAX or len(data) > len(target):
            return None
        own, nonce, tag, epoch = _PARAMS.unpack_from(params)
        salt, keys = params[_PARAMS.size :], self._current()
        if own not in keys.ids:  # the file has changed since ``reads``
            return None
        key = keys.key(own, salt, epoch)
        decryptor = Cipher(algorithms.AES(key), modes.GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(self._bound(subject, salt))
        _update(decryptor, data, target)
        try:
            decryptor.finalize()
        except InvalidTag:
            return None
        return target[: len(data)]

    def _bound(self, subject: Subject, salt: bytes) -> bytes:
        """Return the data authenticated with the block; only its last part varies in length."""
        salt = bytes([len(salt)]) + salt.ljust(SALT_BYTES_MAX, b"\0")
        return self._namespace + subject.key + salt + subject.steps


def _master(text: str, setting: str, name: str = "a line") -> bytes:
    """Return a master key; the message of an error does not show it.

    Raises
    ------
    ConfigError
        It is no key.
    """
    try:
        if re.fullmatch(r"(?:[0-9a-fA-F]{2})+", text):
            master = bytes.fromhex(text)
        else:
            master = base64.b64decode(text, validate=True)
    except ValueError:  # no valid base64
        master = b""
    if len(master) < KEY_BYTES:
        raise ConfigError(f"{name} does not hold a key", path=setting, hint=_HINT)
    return master


def _version(file: str) -> tuple[int, int, int]:
    """Return what changes with a file; zeros if it is not there."""
    try:
        found = Path(file).stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def _say(_kind: str, text: str) -> None:
    logger.warning("%s", text)


def _update(context: AEADCipherContext, data: memoryview, target: memoryview) -> None:
    """Encrypt or decrypt ``data`` into ``target`` without the GIL, unlike one-shot AEAD calls.

    Older versions of the library want room for one AES block more than they fill. So the end goes
    through ``update``, which allocates its own result.
    """
    whole = max(0, len(data) - _AES_BYTES) // _AES_BYTES * _AES_BYTES
    if whole:
        context.update_into(data[:whole], target[: whole + _AES_BYTES - 1])
    target[whole : len(data)] = context.update(data[whole:])
