"""``kvladder inspect``: where a block lies, by level, and what evicts it next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvladder.cli.output import Result
from kvladder.cli.running.caches import RunningCache, caches
from kvladder.cli.running.glance import bytes_text, time_text
from kvladder.cli.tracing import aligned
from kvladder.control.upkeep import BLOCKS
from kvladder.errors import ConfigError
from kvladder.keys import KEY_BYTES, BlockKey, KeyScheme, Namespace

DIGITS: Final = 2 * KEY_BYTES
HEAD: Final = ["level", "state", "priority", "hits", "idle", "size", "holds", "next"]


def inspect(
    target: str,
    keys: tuple[str, ...] = (),
    *,
    tokens: str | None = None,
    salt: str = "",
    lora: str = "",
) -> Result:
    """Print where blocks of a running cache lie, by level, and what evicts each next.

    Name blocks by their keys, or by the tokens of a prompt. Keys stand in KV events.
    Tokens name the blocks of engines that use KeyScheme: the library, Transformers, TensorRT-LLM.

    Parameters
    ----------
    target:
        ask the cache of this control socket, http://HOST:PORT, or YAML file
    keys:
        find the blocks with these keys, 64 hexadecimal digits each
    tokens:
        find the whole blocks of this prompt: token ids with commas between, or @FILE with them
    salt:
        with --tokens, the cache salt of the request
    lora:
        with --tokens, the name of its LoRA adapter

    Raises
    ------
    ConfigError
        An argument is wrong, or no cache answers.
    """
    if bool(keys) == (tokens is not None):
        hint = "expected either keys or --tokens"
        raise ConfigError("which blocks?", path="inspect", hint=hint)
    for key in keys:
        require_key(key)
    ids = None if tokens is None else token_ids(tokens)
    data: dict[str, Any] = {}
    lines: list[str] = []
    found = caches(target)
    for cache in found:
        names = keys if ids is None else _keys_of(cache, ids, salt, lora)
        copies = {key: cache.ask("GET", f"{BLOCKS}{key}")["copies"] for key in names}
        data[cache.name] = copies
        lines += [cache.name] * (len(found) > 1)
        lines += _text(copies)
    return Result("\n".join(lines), data)


def require_key(key: str) -> None:
    """Raise ConfigError unless this is a key in hexadecimal digits."""
    try:
        right = len(bytes.fromhex(key)) == KEY_BYTES and len(key) == DIGITS
    except ValueError:
        right = False
    if not right:
        raise ConfigError(repr(key), path="keys", hint=f"expected {DIGITS} hexadecimal digits")


def token_ids(text: str) -> list[int]:
    """Return the token ids of an option: ``1,2,3``, or ``@FILE`` with commas, spaces or lines."""
    hint = "expected token ids with commas between, or @FILE with them"
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        found = [int(one) for one in text.strip(" []\n").replace(",", " ").split()]
    except OSError as error:
        raise ConfigError(f"{text}: {error.strerror}", path="--tokens", hint=hint) from error
    except ValueError as error:
        raise ConfigError(str(error), path="--tokens", hint=hint) from error
    if not found or min(found) < 0 or max(found) >= 1 << 32:
        raise ConfigError(repr(text[:80]), path="--tokens", hint=hint)
    return found


def _keys_of(cache: RunningCache, tokens: Sequence[int], salt: str, lora: str) -> list[str]:
    """Return the keys of a prompt's whole blocks in a cache."""
    status = cache.status()
    scheme = KeyScheme(
        Namespace(bytes.fromhex(status["namespace"])), block_tokens=status["block_tokens"]
    )
    if len(tokens) < status["block_tokens"]:
        what = f"{len(tokens)} tokens, and a block has {status['block_tokens']}"
        raise ConfigError(what, path="--tokens", hint="expected the tokens of a block or more")
    found: list[BlockKey] = scheme.chain(tokens, parent=scheme.root(salt=salt, lora=lora))
    return [key.hex() for key in found]


def _text(copies: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for key, levels in copies.items():
        yield key if levels else f"{key}: in no level"
        if levels:
            yield from (f"  {line}" for line in aligned([HEAD, *map(_row, levels)]))


def _row(one: dict[str, Any]) -> list[str]:
    if one["priority"] is None:
        return [one["level"], one["state"], *[""] * (len(HEAD) - 2)]
    floor = f" (floor {one['floor']})" if one["floor"] < one["priority"] else ""
    return [
        one["level"],
        one["state"],
        f"{one['priority']}{floor}",
        str(one["hits"]),
        time_text(one["idle_s"]),
        bytes_text(one["bytes"]) if one["bytes"] else "coded",
        str(one["holds"]),
        _next(one),
    ]


def _next(one: dict[str, Any]) -> str:
    """Return what evicts a copy next."""
    parts: list[str] = []
    if one["holds"]:
        parts.append("stays while it is held")
    elif one["rank"] is None:
        parts.append("many blocks go before it")
    else:
        before = f"after {one['rank']} others" if one["rank"] else "first"
        parts.append(f"{before}, for a block of priority {one['priority']} or more")
    if one["below"]:
        parts.append(f"once it is written to {one['below']}")
    if one["expires_s"] is not None:
        parts.append(f"expires in {time_text(max(0.0, one['expires_s']))}")
    if one["retained_s"] is not None:
        parts.append(f"priority ends in {time_text(max(0.0, one['retained_s']))}")
    return ", ".join(parts)
