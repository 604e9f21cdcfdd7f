"""What the cache stores and removes, as vLLM's KV events: every tier, under vLLM's block hashes."""

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
"""Blocks whose tokens can be told: those that requests saved or asked for last."""


class Name(NamedTuple):
    """What vLLM calls a block."""

    hash: bytes
    group: int = 0


class AnnouncedBlock(NamedTuple):
    """What is told of a block; a few hundred bytes, whatever becomes of its request."""

    name: Name
    parent: bytes | None
    """The name of the block before it."""
    tokens: array[int]
    lora: tuple[int | None, str | None]
    extra: tuple[Any, ...] | None = None
    """What else its hash depends on, as vLLM publishes it: cache salt, images, adapter."""


UNKNOWN: Final = AnnouncedBlock(Name(b""), None, array("i"), (None, None))
"""What is told of a block that no request is known to have."""


class Kind(NamedTuple):
    """What is told of each block of a group."""

    tokens: int
    hashes: int
    """vLLM's hashes per block; the last one is its name."""
    fields: dict[str, Any]

    def name(self, hashes: Sequence[bytes], position: int) -> bytes | None:
        """The name of a request's block in this group; None before the first."""
        return hashes[(position + 1) * self.hashes - 1] if position >= 0 else None


def external(block_hash: bytes) -> Any:
    """A hash as vLLM publishes it: bytes or, where it is configured so, a number."""
    return maybe_convert_block_hash(BlockHash(block_hash))


def enabled(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def _extra(request: Any, start: int, tokens: int) -> tuple[Any, ...] | None:
    """What the hash of a request's block depends on beside its tokens and its parent."""
    keys, _ = generate_block_hash_extra_keys(request, start, start + tokens, 0)
    found = to_event_extra_keys([keys])
    return None if found is None else found[0]


def kinds_of(groups: VllmGroups, kv_cache_config: Any) -> list[Kind]:
    """What is told of the blocks of each of vLLM's groups."""
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


class KVEvents:
    """Makes vLLM's events of a cache's.

    A block's tokens and parent are told while a request is remembered that has it; else, as for
    what was recovered at start, only its hash, in the form of vLLM's own placeholders: no tokens,
    block size 0. ``medium`` is CPU for host memory and STORAGE below it, ``ownership`` the name of
    a level below host, so that two levels of one medium are told apart.
    """

    def __init__(
        self, manager: CacheManager, config: StackConfig, groups: VllmGroups, kv_cache_config: Any
    ) -> None:
        if not config.events.max:
            hint = "vLLM publishes KV events, and these are made of them: expected 1 or more"
            raise ConfigError("0", path="events.max", hint=hint)
        self._announcer = Announcer(manager.ladder)
        self._kinds = kinds_of(groups, kv_cache_config)
        (host, medium), *below = manager.ladder.media.items()
        self._where: dict[str, dict[str, Any]] = {host: {"medium": medium}}
        for name, medium in below:
            self._where[name] = {"medium": medium, "ownership": name}
        self._known: dict[BlockKey, AnnouncedBlock] = {}
        """The latest last."""
        self._names: dict[tuple[str, BlockKey], Name] = {}
        """By level, under which names blocks were announced whose keys are not their names."""
        self._mark = 0
        """What is in every key of the weights that are used now, beside vLLM's hash."""

    @property
    def pending(self) -> bool:
        """Whether there is more to tell even if nothing happens."""
        return self._announcer.pending

    def watch(self, queue: Iterable[Any]) -> None:
        """Look at what vLLM's own pool is going to say in this step.

        If that is that all is cleared, listeners may forget other media too: they are told again.
        """
        if any(isinstance(event, AllBlocksCleared) for event in queue):
            self._announcer.repeat()

    def rename(self, mark: int) -> None:
        """The weights are others: blocks of the ones before are not found under vLLM's hashes.

        Nor are they known by their keys any more, and those of the weights of now are again.
        """
        self._mark = mark
        self._known.clear()
        self._announcer.renew()

    def describe(self, request: Any, group: int, first: int, keys: Sequence[BlockKey]) -> None:
        """These are the blocks of a group of a request from the ``first`` on."""
        known = self._known
        if not keys or (keys[0] in known and keys[-1] == next(reversed(known))):
            return  # as it was the last time
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
        """What has happened since the last call."""
        found: list[KVCacheEvent] = []
        for event in self._announcer.take():
            found += self._stored(event) if isinstance(event, Stored) else self._removed(event)
        return found

    def _named(self, key: BlockKey) -> AnnouncedBlock:
        """What is told of a block, and its name in vLLM.

        Of a block that no request is known to have the name is the key: that is vLLM's hash unless
        other weights, another group or a LoRA adapter are bound into it.
        """
        known = self._known.get(key)
        return known or UNKNOWN._replace(name=Name(marked([key], self._mark)[0]))

    def _stored(self, event: Stored) -> list[KVCacheEvent]:
        """One event for each run of blocks that follow each other, or of which nothing is known."""
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
