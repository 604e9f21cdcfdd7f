"""Encryption at rest: AES-256-GCM, a key of its own for every cache salt."""

from __future__ import annotations

import base64
import os
import re
from functools import lru_cache
from struct import Struct
from typing import ClassVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADCipherContext, Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.tiers.codecs import Codec, Stage, Subject

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
KEYS_MAX = 1024
"""Derived keys that are kept; any other is derived again."""
SALT_BYTES_MAX = 16

_PARAMS = Struct(f"<8s{NONCE_BYTES}s{TAG_BYTES}s")
_AES_BYTES = 16


class AesGcmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a configuration says about encryption."""

    variable: str = "KVLADDER_KEY"
    """The environment variable with the master key: 32 bytes or more, in hexadecimal or base64."""


class AesGcmCodec(Codec):
    """Encrypts a block and authenticates it together with its key and namespace.

    The key is derived by HKDF-SHA256 (RFC 5869) from the master key, the namespace and
    ``Subject.salt``. Nonces are random, 96 bits: NIST SP 800-38D allows 2**32 of them for one key.
    Beside a block stand an id of the master key, the nonce, the tag and the salt's digest: a
    reader with another master key takes the block for a miss.
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
        def key(salt: bytes) -> bytes:
            return self._derive(b"key", salt)

        self._key = key
        return layout

    def _read(self) -> bytes:
        """The master key.

        Raises
        ------
        ConfigError
            There is none, or it is not one; the message does not show it.
        """
        variable = self.options.variable
        text = os.environ.get(variable, "").strip()
        hint = f"put 32 random bytes into {variable}, for example by: openssl rand -hex 32"
        if not text:
            raise ConfigError(f"{variable} is not set", path="aes-gcm.variable", hint=hint)
        try:
            if re.fullmatch(r"(?:[0-9a-fA-F]{2})+", text):
                master = bytes.fromhex(text)
            else:
                master = base64.b64decode(text, validate=True)
        except ValueError:  # characters that base64 does not have, or too few
            master = b""
        if len(master) < KEY_BYTES:
            raise ConfigError(f"{variable} does not hold a key", path="aes-gcm.variable", hint=hint)
        return master

    def _derive(self, use: bytes, salt: bytes) -> bytes:
        info = b"kvladder aes-gcm v1\0" + use + b"\0" + self._namespace + salt
        return HKDF(SHA256(), KEY_BYTES, None, info).derive(self._master)

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes]:
        nonce = os.urandom(NONCE_BYTES)
        cipher = Cipher(algorithms.AES(self._key(subject.salt)), modes.GCM(nonce))
        encryptor = cipher.encryptor()
        encryptor.authenticate_additional_data(self._bound(subject.key, subject.salt))
        _update(encryptor, data, target)
        encryptor.finalize()
        params = _PARAMS.pack(self._id, nonce, encryptor.tag) + subject.salt
        return target[: len(data)], params

    def reads(self, params: bytes) -> bool:
        return params[: len(self._id)] == self._id

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        if not 0 <= len(params) - _PARAMS.size <= SALT_BYTES_MAX or len(data) > len(target):
            return None
        _, nonce, tag = _PARAMS.unpack_from(params)
        salt = params[_PARAMS.size :]
        decryptor = Cipher(algorithms.AES(self._key(salt)), modes.GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(self._bound(subject.key, salt))
        _update(decryptor, data, target)
        try:
            decryptor.finalize()
        except InvalidTag:
            return None
        return target[: len(data)]

    def _bound(self, key: bytes, salt: bytes) -> bytes:
        return self._namespace + key + salt


def _update(context: AEADCipherContext, data: memoryview, target: memoryview) -> None:
    """Turn ``data`` into ``target``: without the GIL, which the calls for whole messages keep.

    Older versions want room for one more AES block than they fill: the end goes another way.
    """
    whole = max(0, len(data) - _AES_BYTES) // _AES_BYTES * _AES_BYTES
    if whole:
        context.update_into(data[:whole], target[: whole + _AES_BYTES - 1])
    target[whole : len(data)] = context.update(data[whole:])
