"""``kvladder serve``: a standalone cache server that engines share."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

from kvladder.cli.output import Result, Results
from kvladder.compose import open_manager
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.export.sealed import server_layout

ENDINGS: Final = {signal.SIGTERM, signal.SIGINT}
FLUSH_S: Final = 60.0


def serve(
    config: Path | None = None, *, new_keys: Path | None = None, flush_s: float = FLUSH_S
) -> Results:
    """Run a standalone cache server.

    Its levels are configured like those of any stack. Prints a line when it is ready. On SIGTERM or
    SIGINT it first writes blocks that only its memory holds to the levels that outlive it.

    Parameters
    ----------
    config:
        read this YAML file, with block: and export: beside arena: and tiers:
    new_keys:
        create the keys of a server and of its clients in this folder, and exit
    flush_s:
        at exit, write remaining blocks for at most N seconds (default: 60)

    Raises
    ------
    ConfigError
        The configuration is wrong, or something that it names is missing.
    """
    if new_keys is not None:
        yield _make_keys(new_keys)
        return
    if config is None:
        raise ConfigError("missing", path="config", hint="expected the YAML file, or --new-keys")
    found = load_config(config)
    size, listen = found.block.size_bytes, found.export.listen
    if size is None:
        hint = "expected the size of the largest block that clients store, such as block: 1 MiB"
        raise found.source.explain(ConfigError("missing", path="block", hint=hint))
    if listen is None:
        hint = "expected host:port, such as 0.0.0.0:7470"
        raise found.source.explain(ConfigError("missing", path="export.listen", hint=hint))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)  # only sigwait takes them
    try:
        manager = open_manager(found, server_layout(size), serves=True)
        try:
            address = f"{listen.rpartition(':')[0]}:{manager.stats()['export']['port']}"
            room = f"{manager.arena.slots} blocks of up to {size} in memory"
            facts = {"address": address, "slots": manager.arena.slots, "block_bytes": int(size)}
            yield Result(f"ready: clients at {address}, {room}", {"ready": facts})
            ending = signal.Signals(signal.sigwait(ENDINGS))
        finally:
            manager.close(timeout_s=flush_s)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield Result(f"ended by {ending.name}", {"ended": ending.name})


def _make_keys(folder: Path) -> Result:
    try:
        from kvladder.tiers.nixl.curve import make_keys
    except ModuleNotFoundError as error:
        hint = "install kvladder[nixl]"
        raise ConfigError(f"{error}", path="--new-keys", hint=hint) from error
    try:
        server, client = make_keys(folder)
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror}"
        hint = "expected a writable folder that has no keys yet"
        raise ConfigError(what, path="--new-keys", hint=hint) from error
    text = f"{server}: for the server's export.keys\n{client}: for keys of each client's level"
    return Result(text, {"server": str(server), "client": str(client)})
