"""The receipt of a purge: its format, and the signature with the deployment's key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from kvladder.errors import ConfigError
from kvladder.schema import is_mapping
from kvladder.secrets.file import Secrets

FORMAT: Final = "kvladder-purge-receipt/1"
ALGORITHM: Final = "hmac-sha256"
RECEIPT_BYTES_MAX: Final = 1 << 20
State = Literal["done", "owed"]


class LevelResult(msgspec.Struct, kw_only=True):
    """What a purge did in one level."""

    name: str
    type: str
    shared: bool = False
    """True if other engines use it, too."""
    state: State = "owed"
    """``done`` once the tier has forgotten the blocks and overwritten what it keeps of them."""
    blocks: int = 0
    """Blocks that the level held; in a shared one those that its tier removed or found, which may
    be more than its index named, and fewer if they were named one by one."""
    bytes: int = 0
    """Their size in the engine: before codecs."""
    unknown: int = 0
    """Blocks that stay in a shared level, since this deployment does not know their age or
    descent: it did not save them."""
    erased: int = 0
    """Blocks that were overwritten, also some that were forgotten earlier."""
    why: str = ""
    """Reason why it is still owed."""
    done_at: str = ""
    """Time at which it was found done."""


class Signature(msgspec.Struct, frozen=True):
    """The signature of a receipt."""

    algorithm: str
    key_id: str
    """Sixteen digits that tell keys apart, and tell nothing else about them."""
    value: str


class Receipt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What was asked of a deployment, and what it did. Times are UTC, to the microsecond."""

    format: str = FORMAT
    id: str
    deployment: str
    """Name in the settings, by default the host's."""
    namespace: str
    version: str
    """Version of kvladder."""
    asked_at: str
    mark: int = 0
    """Number of saves that the deployment had noted by then: it tells what is newer."""
    scope: dict[str, Any]
    """``kind``, and what names the blocks, except salts and tokens."""
    salt_digest: str = ""
    """Digest of the salt, keyed by the namespace; empty if no salt was named."""
    keys: int = 0
    """Number of blocks named one by one; they are in the file beside the receipt, ``ID.keys``."""
    keys_sha256: str = ""
    unknown: int = 0
    """Those of them whose age or descent is not known, which were forgotten, too."""
    levels: list[LevelResult] = []
    beyond: list[str] = []
    """What the purge does not reach."""
    complete: bool = False
    """True if no level owes anything."""
    signature: Signature | None = None

    def signed_bytes(self) -> bytes:
        """Return what is signed: JSON without the signature, its names in order, no spaces."""
        told = msgspec.to_builtins(self)
        del told["signature"]
        return msgspec.json.encode(told, order="sorted")

    def as_json(self) -> bytes:
        """Return the receipt as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @property
    def owed(self) -> list[LevelResult]:
        """Levels that are not done."""
        return [level for level in self.levels if level.state == "owed"]


_RECEIPT: Final = msgspec.json.Decoder(Receipt)


def read_receipt(data: bytes, where: str) -> Receipt:
    """Return a receipt from its JSON.

    Raises
    ------
    ConfigError
        It is no receipt, or one of another version of the format.
    """
    hint = "expected a receipt as kvladder purge wrote it"
    if len(data) > RECEIPT_BYTES_MAX:
        raise ConfigError(f"longer than {RECEIPT_BYTES_MAX} bytes", path=where, hint=hint)
    try:
        found: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", path=where, hint=hint) from error
    form = found.get("format") if is_mapping(found) else None
    if form != FORMAT:
        raise ConfigError(f"format {form!r}", path=where, hint=f"expected {FORMAT!r}")
    try:
        return _RECEIPT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a receipt: {error}", path=where, hint=hint) from error


class Signer:
    """Signs receipts with a deployment's newest key, and checks signatures of all of its keys.

    Parameters
    ----------
    keys:
        The key, or all keys: one at least.
    """

    def __init__(self, keys: str | Secrets) -> None:
        self._keys = Secrets(keys) if isinstance(keys, str) else keys

    def sign(self, receipt: Receipt) -> None:
        """Set the signature of a receipt as it is now."""
        key = self._keys.lines()[0].encode()
        receipt.signature = Signature(ALGORITHM, _key_id(key), _digest(key, receipt))

    def wrong(self, receipt: Receipt) -> str:
        """Return why the signature is not valid; empty if it is."""
        signature = receipt.signature
        if signature is None:
            return "it has no signature"
        if signature.algorithm != ALGORITHM:
            return f"it has a signature of {signature.algorithm!r}: expected {ALGORITHM!r}"
        own = {_key_id(key): key for key in (line.encode() for line in self._keys.lines())}
        if signature.key_id not in own:
            has = ", ".join(own)
            return f"it is signed with key {signature.key_id}: this deployment has {has}"
        if not hmac.compare_digest(signature.value, _digest(own[signature.key_id], receipt)):
            return "it was changed after it was signed, or the key is another one"
        return ""


def _key_id(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=8, person=b"kvladder-receipt").hexdigest()


def _digest(key: bytes, receipt: Receipt) -> str:
    return hmac.new(key, receipt.signed_bytes(), hashlib.sha256).hexdigest()


def timestamp(wall_s: float) -> str:
    """Return seconds since the epoch as text, in UTC."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="microseconds")


def receipt_id(wall_s: float) -> str:
    """Return a new id; ids are in the order of their times."""
    return timestamp(wall_s)[:19].replace("-", "").replace(":", "") + f"-{secrets.token_hex(4)}"


def seconds(text: str) -> float:
    """Return the seconds since the epoch of a ``timestamp``; ConfigError if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ConfigError(f"{text!r} is no time", path="asked_at", hint="expected UTC") from error
