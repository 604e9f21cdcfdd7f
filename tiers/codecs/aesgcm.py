"""Encryption at rest: AES-256-GCM, with a separate key for each cache salt."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from struct import Struct
from typing import ClassVar, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADCipherContext, Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.schema import Settings
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

_PARAMS = Struct(f"<8s{NONCE_BYTES}s{TAG_BYTES}s{EPOCH_BYTES}s")
_AES_BYTES = 16


class AesGcmOptions(Settings, frozen=True, kw_only=True):
    """Options of the encryption codec."""

    variable: str = "KVLADDER_KEY"
    """Environment variable with the master key: 32 bytes or more, in hexadecimal or base64."""


class _Writer(NamedTuple):
    """A key with which only this process encrypts."""

    epoch: bytes
    key: bytes
    used: Iterator[int]
    """Counter of encrypted blocks; any thread may advance it."""


class AesGcmCodec(Codec):
    """Encrypts a block, and authenticates it with block key, namespace, salt and earlier steps.

    The encryption key is derived by HKDF-SHA256 (RFC 5869) from the master key, the namespace, an
    epoch and ``Subject.salt``. The epoch is random and belongs to this process, so the process can
    count the blocks of a key: after ``BLOCKS_MAX`` another epoch begins. Nonces are random, 96
    bits. An id of the master key, the nonce, the tag, the epoch and the salt's digest are stored
    beside the block. For a reader with another master key the block is a miss.
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
        self._master = self._read()
        self._id = self._derive(b"id", b"")[:8]

        @lru_cache(KEYS_MAX)
        def key(salt: bytes, epoch: bytes) -> bytes:
            return self._derive(b"key", epoch + salt)

        self._key = key
        self._writers: dict[bytes, _Writer] = {}
        return layout

    def _writer(self, salt: bytes) -> _Writer:
        """Return the key to encrypt one more block of this salt; any thread may call it."""
        writer = self._writers.get(salt)
        if writer is None or next(writer.used) >= BLOCKS_MAX:
            if len(self._writers) >= KEYS_MAX:
                self._writers.clear()  # a salt that comes back gets another epoch
            epoch = os.urandom(EPOCH_BYTES)
            writer = self._writers[salt] = _Writer(epoch, self._key(salt, epoch), count(1))
        return writer

    def _read(self) -> bytes:
        """Return the master key.

        Raises
        ------
        ConfigError
            The variable is not set or holds no key. The message does not show its value.
        """
        variable = self.options.variable
        text = os.environ.get(variable, "").strip()
        hint = "expected 32 or more random bytes in hexadecimal or Base64: openssl rand -hex 32"
        if not text:
            raise ConfigError(f"{variable} is not set", path="aes-gcm.variable", hint=hint)
        try:
            if re.fullmatch(r"(?:[0-9a-fA-F]{2})+", text):
                master = bytes.fromhex(text)
            else:
                master = base64.b64decode(text, validate=True)
        except ValueError:  # no valid base64
            master = b""
        if len(master) < KEY_BYTES:
            raise ConfigError(f"{variable} does not hold a key", path="aes-gcm.variable", hint=hint)
        return master

    def _derive(self, use: bytes, more: bytes) -> bytes:
        info = b"kvladder aes-gcm v2\0" + use + b"\0" + self._namespace + more
        return HKDF(SHA256(), KEY_BYTES, None, info).derive(self._master)

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes]:
        nonce = os.urandom(NONCE_BYTES)
        writer = self._writer(subject.salt)
        encryptor = Cipher(algorithms.AES(writer.key), modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(self._bound(subject, subject.salt))
        _update(encryptor, data, target)
        encryptor.finalize()
        params = _PARAMS.pack(self._id, nonce, encryptor.tag, writer.epoch) + subject.salt
        return target[: len(data)], params

    def reads(self, params: bytes) -> bool:
        return params[: len(self._id)] == self._id

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        if not 0 <= len(params) - _PARAMS.size <= SALT_BYTES_MAX or len(data) > len(target):
            return None
        _, nonce, tag, epoch = _PARAMS.unpack_from(params)
        salt = params[_PARAMS.size :]
        key = self._key(salt, epoch)
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


def _update(context: AEADCipherContext, data: memoryview, target: memoryview) -> None:
    """Encrypt or decrypt ``data`` into ``target`` without the GIL, unlike one-shot AEAD calls.

    Older versions of the library want room for one AES block more than they fill. So the end goes
    through ``update``, which allocates its own result.
    """
    whole = max(0, len(data) - _AES_BYTES) // _AES_BYTES * _AES_BYTES
    if whole:
        context.update_into(data[:whole], target[: whole + _AES_BYTES - 1])
    target[whole : len(data)] = context.update(data[whole:])
