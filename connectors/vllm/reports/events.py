"""Reports what all tiers store and remove as vLLM's KV events, under vLLM's block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import Any, Final, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvladder.config.stack import StackConfig
from kvladder.connectors.vllm.groups import VllmGroups, marked
from kvladder.errors import ConfigError
from kvladder.events import Removed, Stored
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.publishing.announcer import Announcer

KNOWN_MAX: Final = 1 << 16
"""Maximum number of blocks with known tokens: those that requests saved or asked for last."""


class Name(NamedTuple):
    """vLLM's name of a block."""

    hash: bytes
    group: int = 0


class AnnouncedBlock(NamedTuple):
    """The data that events report of a block; a few hundred bytes that outlive its request."""

    name: Name
    parent: bytes | None
    """Hash of the block before it; None for the first."""
    tokens: array[int]
    lora: tuple[int | None, str | None]
    extra: tuple[Any, ...] | None = None
    """Other inputs of its hash, as vLLM publishes them: cache salt, images, adapter."""


UNKNOWN: Final = AnnouncedBlock(Name(b""), None, array("i"), (None, None))
"""The data reported of a block that belongs to no known request."""


class Kind(NamedTuple):
    """The data reported of each block of a group."""

    tokens: int
    hashes: int
    """vLLM's hashes per block; the last one is the block's name."""
    fields: dict[str, Any]

    def name(self, hashes: Sequence[bytes], position: int) -> bytes | None:
        """Return the hash of a request's block in this group; None before the first block."""
        return hashes[(position + 1) * self.hashes - 1] if position >= 0 else None


def external(block_hash: bytes) -> Any:
    """Return a hash as vLLM publishes it: bytes or, if so configured, a number."""
    return maybe_convert_block_hash(BlockHash(block_hash))


def enabled(vllm_config: Any) -> bool:
    """Return whether vLLM publishes KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def _extra(request: Any, start: int, tokens: int) -> tuple[Any, ...] | None:
    """Return the inputs of a block's hash beside its tokens and its parent; None without any."""
    keys, _ = generate_block_hash_extra_keys(request, start, start + tokens, 0)
    found = to_event_extra_keys([keys])
    return None if found is None else found[0]


def kinds_of(groups: VllmGroups, kv_cache_config: Any) -> list[Kind]:
    """Return the data reported of blocks, for each of vLLM's groups."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [
        Kind(
            group.tokens,
            group.hashes,
            {
                "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
                "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
            },
        )
        for group, spec in zip(groups, specs, strict=True)
    ]


class NoKVEvents:
    """Stands for ``KVEvents`` where vLLM publishes none."""

    pending = False

    def watch(self, queue: Iterable[Any]) -> None:
        """Do nothing."""

    def rename(self, mark: int) -> None:
        """Do nothing."""

    def describe(self, request: Any, group: int, first: int, keys: Sequence[BlockKey]) -> None:
        """Do nothing."""

    def take(self) -> list[KVCacheEvent]:
        """Return no event."""
        return []


class KVEvents:
    """Turns a cache's events into vLLM's.

    An event has a block's tokens and parent while a request with that block is remembered. For
    others, such as blocks recovered at start, it has only the hash, in the form of vLLM's own
    placeholders: no tokens, block size 0. ``medium`` is CPU for host memory and STORAGE below it.
    ``ownership`` is the name of a level below host, to distinguish two levels of one medium.
    """

    def __init__(
        self, manager: CacheManager, config: StackConfig, groups: VllmGroups, kv_cache_config: Any
    ) -> None:
        if not config.events.max:
            hint = "expected 1 or more: kvladder makes vLLM's KV events from its own"
            raise ConfigError("0", path="events.max", hint=hint)
        self._announcer = Announcer(manager.ladder)
        self._kinds = kinds_of(groups, kv_cache_config)
        (host, medium), *below = manager.ladder.media.items()
        self._where: dict[str, dict[str, Any]] = {host: {"medium": medium}}
        for name, medium in below:
            self._where[name] = {"medium": medium, "ownership": name}
        self._known: dict[BlockKey, AnnouncedBlock] = {}
        """Data of blocks of recent requests, the latest last."""
        self._names: dict[tuple[str, BlockKey], Name] = {}
        """Announced names that differ from the block's key, by level and key."""
        self._mark = 0
        """The mark combined with vLLM's hash in every key of the current weights."""

    @property
    def pending(self) -> bool:
        """True if events are still to be reported, even if nothing new happens."""
        return self._announcer.pending

    def watch(self, queue: Iterable[Any]) -> None:
        """Look at the events that vLLM's own pool will publish in this step.

        If they say that all blocks are cleared, listeners may forget other media, too. All blocks
        of the cache are then announced again.
        """
        if any(isinstance(event, AllBlocksCleared) for event in queue):
            self._announcer.repeat()

    def rename(self, mark: int) -> None:
        """Announce the blocks again after the weights have changed to those with this ``mark``.

        Blocks of the previous weights are no longer found under vLLM's hashes. Blocks of the
        current weights are found again.
        """
        self._mark = mark
        self._known.clear()
        self._announcer.renew()

    def describe(self, request: Any, group: int, first: int, keys: Sequence[BlockKey]) -> None:
        """Remember the data of a request's blocks in a group, from position ``first`` on."""
        known = self._known
        if not keys or (keys[0] in known and keys[-1] == next(reversed(known))):
            return  # the same blocks as in the last call
        kind, hashes, lora = self._kinds[group], request.block_hashes, request.lora_request
        adapter = (None, None) if lora is None else (lora.adapter_id, lora.name)
        size, new = kind.tokens, any(key not in known for key in keys)
        tokens = request.all_token_ids[first * size : (first + len(keys)) * size] if new else ()
        plain = not (lora or request.cache_salt or request.mm_features)
        plain = plain and request.prompt_embeds is None
        for n, key in enumerate(keys):
            one = known.pop(key, None)
            if one is None:
                name = kind.name(hashes, first + n)
                assert name is not None
                own = array("i", tokens[n * size : (n + 1) * size])
                parent = kind.name(hashes, first + n - 1)
                extra = None if plain else _extra(request, (first + n) * size, size)
                one = AnnouncedBlock(Name(name, group), parent, own, adapter, extra)
            known[key] = one
        for key in list(islice(known, max(0, len(known) - KNOWN_MAX))):
            del known[key]

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        found: list[KVCacheEvent] = []
        for event in self._announcer.take():
            found += self._stored(event) if isinstance(event, Stored) else self._removed(event)
        return found

    def _named(self, key: BlockKey) -> AnnouncedBlock:
        """Return the data of a block, with its name in vLLM.

        Without a known request, the name is the key without the current weights' mark. That is
        vLLM's hash, unless other weights, another group or a LoRA adapter are bound into the key.
        """
        known = self._known.get(key)
        return known or UNKNOWN._replace(name=Name(marked([key], self._mark)[0]))

    def _stored(self, event: Stored) -> list[KVCacheEvent]:
        """Return one event for each run of consecutive blocks, or of blocks without data."""
        runs: list[list[AnnouncedBlock]] = []
        for key in event.keys:
            known = self._named(key)
            if known.name != (key, 0):
                self._names[event.level, key] = known.name
            last = runs[-1][-1] if runs else None
            if last is not None and last.tokens:
                follows = (known.parent, known.name.group) == last.name and known.lora == last.lora
            else:
                follows = last is not None and not known.tokens
            if follows:
                runs[-1].append(known)
            else:
                runs.append([known])
        return [self._block_stored(event.level, run) for run in runs]

    def _block_stored(self, level: str, run: Sequence[AnnouncedBlock]) -> KVCacheEvent:
        begin, group = run[0], run[0].name.group
        kind = self._kinds[group]
        return BlockStored(
            block_hashes=[external(one.name.hash) for one in run],
            parent_block_hash=None if begin.parent is None else external(begin.parent),
            token_ids=[token for one in run for token in one.tokens],
            block_size=kind.tokens if begin.tokens else 0,
            lora_id=begin.lora[0],
            lora_name=begin.lora[1],
            extra_keys=[one.extra for one in run] if any(one.extra for one in run) else None,
            group_idx=group,
            **(kind.fields if begin.tokens else {}),
            **self._where[level],
        )

    def _removed(self, event: Removed) -> list[KVCacheEvent]:
        level, names = event.level, self._names
        gone = [names.pop((level, key), Name(key)) for key in event.keys]
        return [
            BlockRemoved(
                block_hashes=[external(name.hash) for name in run],
                group_idx=group,
                **self._where[level],
            )
            for group, run in groupby(gone, key=lambda name: name.group)
        ]
