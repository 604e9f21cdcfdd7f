"""What the scheduler half knows of vLLM's requests, and how their blocks are named."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvladder.connectors.vllm.find import Find
from kvladder.connectors.vllm.groups import Group, Groups
from kvladder.connectors.vllm.identity.contents import Items
from kvladder.connectors.vllm.params import NO_POLICY, RequestPolicy
from kvladder.connectors.weights import downloaded, stamp, weight_files, weights_digest
from kvladder.errors import ConfigError
from kvladder.gpu.copy.copier import JobId
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MAX


@dataclass
class RequestState:
    """What is known of one request."""

    request: Any
    groups: Groups
    adapter: bytes | None = b""
    """Digest of its LoRA adapter's weights, empty without one; None until it is known."""
    items: Items | None = None
    """The images, sounds and videos in its prompt."""
    policy: RequestPolicy = NO_POLICY
    waited: int = 0
    """How many steps it has waited for that digest."""
    saved: list[int] = field(default_factory=list[int])
    """By group, how many of its leading blocks were offered to the cache."""
    floors: list[int] = field(default_factory=list[int])
    """By group, the lowest priority among those blocks."""
    due: float = 0
    """Below so many computed tokens there is no other block to offer."""
    find: Find | None = None
    """What the cache has for it, from the time it was looked for until it is loaded."""
    left: int = 0
    """How many of its tokens wait to be computed; see ``Computing``."""
    unasked: int = 0
    """How many tokens were looked up for it in vain the last time."""
    pins: int = 0
    """How many blocks ``find`` counts for while it waits."""
    own: int = 0
    """How many tokens vLLM had itself when it asked the last time."""
    answer: tuple[int, int] | None = None
    """How many tokens vLLM has itself, and how many more it was told that the cache has."""
    loading: set[JobId] = field(default_factory=set[JobId])
    """The copies that fill its blocks, one for each group."""
    sources: list[str] = field(default_factory=list[str])
    """The levels that the blocks of the last load came from, in the main group."""
    computes: bool = False
    """Nothing is loaded for it: a load failed, and must not be tried for ever."""
    apart: bool = False
    """Nothing is saved for it either: its blocks cannot be named."""
    begun: bool = False
    """Whether it has, or had, blocks in vLLM's memory."""

    mark: Callable[[], int] = int
    """What is added to names for weights that are not those at start."""
    describe: Callable[[Any, int, int, Sequence[BlockKey]], None] | None = None
    """Told of the request, the group, the position of the first and the names of its blocks."""

    def __post_init__(self) -> None:
        self.offer_again()
        self.floors = [PRIORITY_MAX] * len(self.groups)

    def offer_again(self) -> None:
        """Its blocks are offered to the cache from the first one on."""
        self.saved = [0] * len(self.groups)
        self.due = 0

    @property
    def salt(self) -> str:
        """Whose its blocks are."""
        return getattr(self.request, "cache_salt", None) or ""

    def loaded(self, job_id: JobId, *, ok: bool) -> None:
        """A copy has ended; unless it was well, all of the request is computed and saved."""
        if job_id in self.loading:
            self.loading.discard(job_id)
            if not ok:
                self.computes = True
                self.offer_again()

    def keys(self, group: Group, start: int, end: int) -> list[BlockKey]:
        """Names of a group's blocks ``start <= n < end``, as far as vLLM has hashed them.

        vLLM's hash covers tokens, salt, what multimodal items are called, and of an adapter name
        and path; what the items and the adapter's weights are is added here.
        """
        assert self.adapter is not None
        keys = group.keys(self.request.block_hashes, start, end, mark=self.mark())
        if self.adapter:
            keys = [BlockKey(hashlib.sha256(self.adapter + one).digest()) for one in keys]
        if self.items is not None:
            keys = self.items.bind(keys, start, group.tokens)
        if self.describe is not None:
            self.describe(self.request, group.index, start, keys)
        return keys

    def read(self, end: int) -> Iterator[list[BlockKey]]:
        """By group, the names of what is read once ``end`` tokens are computed."""
        for group in self.groups:
            keys = self.keys(group, group.first(end), end // group.tokens)
            if keys:
                yield keys


def held_by_vllm(pool: Any, request: Any, group: Group, end: int) -> int:
    """How many of a request's first ``end`` tokens are in vLLM's own prefix cache now, about."""
    find = getattr(pool, "get_cached_block", None)
    if find is None or group.hashes > 1 or group.kind != "full":
        return 0
    count = 0
    for block_hash in request.block_hashes[: end // group.tokens]:
        if not find(block_hash, [group.index]):
            break
        count += 1
    return count * group.tokens


class Filling:
    """Blocks that are being copied into vLLM's memory for one request.

    A request that begins alike waits for that copy and finds them in vLLM's own prefix cache: they
    are neither copied nor kept there twice. Only where vLLM has such a cache.
    """

    def __init__(self, *, cached: bool) -> None:
        self._cached = cached
        self._keys: dict[str, frozenset[BlockKey]] = {}

    def begin(self, request_id: str, keys: Sequence[BlockKey]) -> None:
        """These blocks are copied for the request from now on."""
        if self._cached:
            self._keys[request_id] = frozenset(keys)

    def end(self, request_id: str) -> None:
        """They are there, or they are not going to be."""
        self._keys.pop(request_id, None)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._keys)

    def has(self, keys: Sequence[BlockKey]) -> bool:
        """Whether the first of ``keys`` is among them."""
        return any(keys[0] in filled for filled in self._keys.values()) if keys else False


class Adapters:
    """Digests of LoRA adapters, each found out once, in a thread of its own: gigabytes are read."""

    def __init__(self) -> None:
        self._readings: dict[tuple[int, str], _Reading] = {}

    def begin(self, lora_request: Any) -> None:
        """A request with this adapter has come, which vLLM may load anew for it."""
        if lora_request is None:
            return
        key, found = self._find(lora_request)
        if found is None or found.failed:
            self._readings[key] = _Reading(str(lora_request.lora_path))
        elif getattr(lora_request, "load_inplace", False):
            found.again()
        else:
            found.compare()

    def digest(self, lora_request: Any) -> bytes | None:
        """Digest of an adapter's weights that ``begin`` was told of, None while it is not known.

        Empty without an adapter.

        Raises
        ------
        ConfigError
            They are not on this machine, or not yet; or they have changed, and nobody knows which
            ones vLLM has, which reads them again once it had no room for the adapter.
        """
        if lora_request is None:
            return b""
        _, found = self._find(lora_request)
        return None if found is None else found.digest()

    def _find(self, lora_request: Any) -> tuple[tuple[int, str], _Reading | None]:
        key = (int(lora_request.lora_int_id), str(lora_request.lora_path))
        return key, self._readings.get(key)


class Changed(ConfigError):
    """An adapter's files are others than those that were read."""


class _Reading:
    """One adapter's files, read by a thread that ends with the process at the latest."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rounds = 0
        """How often they are still to be read."""
        self._found: bytes | ConfigError | None = None
        self._stamps: dict[Path, str] = {}
        """What was read."""
        self.again()

    def again(self) -> None:
        """They may be others by now: read them once more."""
        with self._lock:
            self._found = None
            self._rounds, is_idle = min(2, self._rounds + 1), not self._rounds
        if is_idle:
            threading.Thread(target=self._read, name="kvladder-adapter", daemon=True).start()

    def compare(self) -> None:
        """Look, without reading them, whether they are still those that were read."""
        if isinstance(self._found, bytes) and not self._same():
            self._found = self._changed()

    def _same(self) -> bool:
        for file, before in self._stamps.items():
            with suppress(OSError):  # of one that was deleted: vLLM cannot read it again either
                if stamp(file) != before:
                    return False
        return True

    def _changed(self) -> Changed:
        hint = "give new weights a number or a folder of their own"
        return Changed(f"the files of adapter {self._path} have changed", hint=hint)

    @property
    def failed(self) -> bool:
        """Whether they were not there."""
        return isinstance(self._found, ConfigError) and not isinstance(self._found, Changed)

    def digest(self) -> bytes | None:
        """See ``Adapters.digest``."""
        found = self._found
        if isinstance(found, ConfigError):
            raise found
        return found

    def _read(self) -> None:
        while True:
            found = self._attempt()
            with self._lock:
                self._rounds -= 1
                if not self._rounds:
                    self._found = found
                    return

    def _attempt(self) -> bytes | ConfigError:
        try:
            path = Path(self._path).expanduser()
            if not path.exists():
                path = downloaded(self._path, what="adapter")
            self._stamps = {file: stamp(file) for file in weight_files(path)}
            found = bytes.fromhex(weights_digest(path))
            return found if self._same() else self._changed()
        except ConfigError as error:
            return error
        except OSError as error:
            return ConfigError(f"adapter {self._path}: {error.strerror}")
