"""Receipts on the command line: purges at rest with one, and ``kvladder purge --verify``."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from kvladder import __version__ as version
from kvladder.arena import Arena
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import StackConfig
from kvladder.control.sockets import NobodyThere, ask, sockets
from kvladder.errors import ConfigError, TierError, Unavailable, refusal
from kvladder.forgetting.check import Check, LevelCheck, Looker, as_lines
from kvladder.forgetting.ledger import PurgeLedger, read_keys
from kvladder.forgetting.purger import BEYOND
from kvladder.forgetting.receipt import (
    RECEIPT_BYTES_MAX,
    LevelResult,
    Receipt,
    Signer,
    read_receipt,
    receipt_id,
    timestamp,
)
from kvladder.keys import BlockKey, Namespace
from kvladder.layout import PAGE_BYTES, Layout
from kvladder.runtime import Runtime, SystemClock
from kvladder.schema import within
from kvladder.tiers.base import Tier
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.purge import survey_files
from kvladder.tiers.ladder.records.lineage import Lineage

CHECK_S: Final = 600.0
"""Time limit for a running cache's answer about a receipt, and for each level at rest."""


class NotClean(ConfigError):
    """A receipt is not valid, or a level has, or may have, blocks of it."""


class AtRest:
    """The receipt of a purge at rest, in the ledger of the deployment's first engine.

    Levels are noted as they are done. What remains is owed: the next engine pays it.
    """

    def __init__(
        self, config: StackConfig, space: Namespace, digest: bytes, levels: Sequence[LevelConfig]
    ) -> None:
        try:
            self._ledger = PurgeLedger(config.forget.of(0), Signer(config.forget.secrets()))
        except Unavailable as error:
            raise refusal(error, required=False) from error
        now_s, lineage = SystemClock().wall(), Lineage.kept(self._ledger.path / "lineage")
        self.receipt = Receipt(
            id=receipt_id(now_s),
            deployment=config.forget.name or socket.gethostname(),
            namespace=space.hex(),
            version=version,
            asked_at=timestamp(now_s),
            mark=0 if lineage is None else lineage.mark,
            scope={"kind": "salt" if digest else "all"},
            salt_digest=digest.hex(),
            levels=[
                LevelResult(name=one.name, type=one.type, shared=one.make.shared) for one in levels
            ],
            beyond=[*BEYOND],
        )
        self._ledger.begin(self.receipt, ())

    def done(self, name: str, blocks: int, erased: int) -> None:
        """Note that a level is done."""
        for result in self.receipt.levels:
            if result.name == name:
                result.state, result.blocks, result.erased = "done", blocks, erased
                result.done_at = timestamp(SystemClock().wall())
        self._ledger.write(self.receipt)

    def failed(self, name: str, why: str) -> None:
        """Note why a level still owes the purge."""
        for result in self.receipt.levels:
            if result.name == name:
                result.why = why
        self._ledger.write(self.receipt)

    @property
    def path(self) -> Path:
        """File of the receipt."""
        return self._ledger.path / f"{self.receipt.id}.json"

    def close(self) -> None:
        """Let an engine have the ledger."""
        self._ledger.close()


def verify(config: StackConfig, path: Path) -> str:
    """Check a receipt's signature, then look at each level for what it says is gone.

    Raises
    ------
    NotClean
        The receipt is not valid, or a level has or may have blocks of it.
    ConfigError
        The file cannot be read, or no receipts are configured.
    """
    forget = config.forget
    if forget.path is None:
        hint = "expected the directory of receipts, and the key that they are signed with"
        raise ConfigError("missing", path="forget.path", hint=hint)
    receipts = read_receipts(path)
    lines: list[str] = []
    is_good = True
    for receipt in receipts:
        wrong = Signer(forget.secrets()).wrong(receipt)
        check = Check(id=receipt.id, wrong=wrong)
        if not wrong:
            check = _running(config, receipt) or _at_rest(config, receipt, path.parent)
        lines += as_lines(check, receipt.asked_at)
        is_good = is_good and check.is_good
    if not is_good:
        raise NotClean("; ".join(lines), path=str(path), hint="purge again what is left")
    return "\n".join(lines)


def read_receipts(path: Path) -> list[Receipt]:
    """Return the receipt in a file, or all of a list of them; ConfigError if there are none."""
    try:
        with path.open("rb") as file:
            data = file.read(64 * RECEIPT_BYTES_MAX)
    except OSError as error:
        hint = "expected a receipt as kvladder purge wrote it"
        raise ConfigError(f"{error.strerror}", path=str(path), hint=hint) from error
    if not data.lstrip().startswith(b"["):
        return [read_receipt(data, str(path))]
    try:
        parts = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", path=str(path)) from error
    return [read_receipt(bytes(part), f"{path}[{n}]") for n, part in enumerate(parts)]


def _running(config: StackConfig, receipt: Receipt) -> Check | None:
    """Return the check by the running cache whose namespace the receipt has; None without one."""
    request: Mapping[str, Any] = {"command": "receipt", "receipt": msgspec.to_builtins(receipt)}
    last: Check | None = None
    for path in sockets(config.control.path) if config.control.path is not None else ():
        try:
            found = msgspec.convert(ask(path, request, timeout_s=CHECK_S), Check)
        except NobodyThere:
            continue
        last = found
        if not found.wrong:
            return found
    return last


def _at_rest(config: StackConfig, receipt: Receipt, folder: Path) -> Check:
    """Return the check of levels that no process uses."""
    space = Namespace(bytes.fromhex(receipt.namespace))
    check = Check(id=receipt.id)
    try:
        ledger = config.forget.of(0)
        beside = folder if (folder / f"{receipt.id}.keys").exists() else ledger
        keys = read_keys(beside, receipt)
    except ConfigError as error:
        check.wrong = str(error)
        return check
    looker = Looker(receipt, keys, Lineage.kept(ledger / "lineage"))
    owed = {level.name for level in receipt.owed}
    for level in config.levels:
        why = ""
        if isinstance(level.options, FilesOptions):
            found = survey_files(Disk(), Path(level.options.path), space=space, salt=looker.salt)
            looker.take(found)
        elif level.make.shared:
            why = _look(level, space, looker.salt, looker.take)
        else:
            continue
        check.levels.append(looker.judged(level.name, why, owed=level.name in owed))
    gone = owed - {level.name for level in check.levels} - {config.host.name}
    check.levels += [
        LevelCheck(name=name, finding="owed", why="the configuration has no such level")
        for name in sorted(gone)
    ]
    return check


def _look(
    level: LevelConfig,
    space: Namespace,
    salt: bytes | None,
    take: Callable[[Sequence[BlockKey]], object],
) -> str:
    """Give ``take`` what lies in a shared tier; return why that is not known, or nothing."""

    async def look(tier: Tier) -> None:
        async for batch in tier.survey(salt):
            take(batch)

    try:
        with closing(TierAtRest(level, space)) as opened:
            if not opened.tier.surveys:
                return "its tier cannot tell what others put there"
            opened.runtime.call(look(opened.tier), timeout_s=CHECK_S)
    except (TierError, ConfigError) as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {CHECK_S:g} s"
    return ""


class TierAtRest:
    """A shared tier that is open without a cache, for purges and looks at a whole namespace.

    Raises
    ------
    ConfigError
        The tier cannot be used.
    """

    def __init__(self, level: LevelConfig, space: Namespace) -> None:
        layout = Layout(block_tokens=1, block_bytes=PAGE_BYTES)  # keys do not depend on it
        self.runtime, self.tier = Runtime(), level.make_tier()
        self._arena = Arena.create(1, layout.slot_bytes)
        run = self.runtime.threads(level.name)
        context = TierContext(self._arena, layout, space, 1, SystemClock(), run, required=True)
        try:
            self.runtime.call(self.tier.open(context))
        except TierError as error:
            self.close()
            raise within(level.name, refusal(error, required=False)) from error
        except ConfigError as error:
            self.close()
            raise within(level.name, error) from error

    def close(self) -> None:
        """Close the tier; called once."""
        self.runtime.call(self.tier.aclose())
        self.runtime.close()
        self._arena.close()
