"""The data plane of one connection: a NIXL agent that writes from slots here to the other end's.

NIXL cannot cancel. A posted write ends by itself, or when ``destroy`` ends its agent. So each
connection has an agent of its own, and agents only write.
"""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvladder.arena import Arena
from kvladder.errors import ConfigError, TierError
from kvladder.tiers.context import Blocking

CLASSES = 8
"""Number of lengths in which blocks are sent; each length has its own slot lists, made once."""
CLASS_BYTES_MIN = 64
INLINE_BYTES = 32 << 20
"""Most bytes whose checksums are computed on the loop. Posting that many bytes holds the loop for
longer anyway, and a thread would wait for a processor that the transfer keeps busy."""
MOVED_S = 30e-6
"""Seconds: a poll that takes longer has moved bytes."""
_WHEELS = "nixl_cu13._api", "nixl_cu12._api"
"""Modules of NIXL. Host memory needs no CUDA, and the module ``nixl`` would import torch."""
_TIMES = {
    "TCP_USER_TIMEOUT": "5s",  # a cut connection is an error instead of a wait for ever
    "TCP_KEEPIDLE": "2s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    "KEEPALIVE_INTERVAL": "2s",
    "TCP_TX_SEG_SIZE": "16k",  # bytes that share a segment with a header are copied once more
    "TCP_RX_SEG_SIZE": "16k",
}


class Area(NamedTuple):
    """Address, size and number of the slots in one end's memory."""

    address: int
    slot_bytes: int
    slots: int


class Posted(Protocol):
    """A write in flight."""


class Plane(Protocol):
    """One end of the data plane. One thread makes all calls; any thread may construct a plane."""

    metadata: bytes
    """Data that the other end needs for ``join``."""
    area: Area
    """The slots of this end."""

    def join(self, metadata: bytes, area: Area, block_bytes: int) -> None:
        """Connect to the other end; writes put at most ``block_bytes`` into each of its slots."""
        ...

    def write(self, own: Sequence[int], far: Sequence[int], lengths: Sequence[int]) -> Posted:
        """Begin to write ``lengths`` bytes from the slots ``own`` here to the slots ``far``.

        More bytes may be written, up to the next eighth of a block. A slot number that the other
        end does not have raises TierError; those of this end are not checked.
        """
        ...

    def ended(self, posted: Posted) -> bool:
        """Return whether a write is over; raise TierError if it failed. Call it until True."""
        ...

    def progress(self) -> bool:
        """Move bytes in both directions; return whether any may have moved.

        Bytes move at no other time.
        """
        ...

    def destroy(self) -> None:
        """End all transfers for good. Holds the interpreter lock for up to a second."""
        ...


async def made(run_blocking: Blocking, make: Callable[[], Plane]) -> Plane:
    """Make a plane in a thread; destroy it if the caller is cancelled meanwhile.

    The thread cannot be interrupted, so the plane is made in any case. No other code knows it then.
    """
    planes: list[Plane] = []
    try:
        await run_blocking(lambda: planes.append(make()))
    except BaseException:
        for plane in planes:
            plane.destroy()
        raise
    return planes[0]


def area_of(arena: Arena) -> Area:
    """Return all slots of an arena, including those that its owner has set aside."""
    handle = arena.handle
    return Area(arena.address, handle.slot_bytes, handle.slots)


class NixlPlane:
    """A NIXL agent with the back end UCX and without NIXL's progress thread.

    With that thread, processes that wrote sometimes crashed.

    Parameters
    ----------
    transports:
        Value of ``UCX_TLS``. With ``cma`` or ``sm``, destroying an agent would not end its writes.
    interfaces:
        Value of ``UCX_NET_DEVICES``. ``all`` leaves the variable as it is; UCX then uses all
        devices if it is unset.
    """

    def __init__(self, arena: Arena, transports: str, interfaces: str) -> None:
        library, self.area = load(), area_of(arena)
        self._errors = _errors(library)
        strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = library.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
        settings = {"TLS": transports, **_TIMES}
        if interfaces != "all":
            settings["NET_DEVICES"] = interfaces
        # environment variables, since values of engine_config cannot contain commas
        os.environ.update({f"UCX_{name}": value for name, value in settings.items()})
        self._lists: list[tuple[Any, Any]] = []
        self._held: set[_Writes] = set()
        self._unit = 0
        self._agent: Any = library.nixl_agent(f"kvladder-{uuid.uuid4().hex}", config)
        ucx = {"ucx_error_handling_mode": "peer", "num_workers": "1"}
        self._call("create_backend", "UCX", ucx)
        rows = [(self.area.address, arena.size_bytes, 0, "")]
        self._call("register_memory", rows, "DRAM")
        self.metadata: bytes = self._call("get_agent_metadata")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the agent; raise TierError for any error of NIXL.

        The TierError's traceback must not hold a handle: that would keep the agent's sockets open.
        """
        try:
            return getattr(self._agent, name)(*arguments)
        except self._errors as error:
            said = f"NIXL: {name}: {type(error).__name__}: {error}"
        del arguments
        raise TierError(said)

    def join(self, metadata: bytes, area: Area, block_bytes: int) -> None:
        self._unit = max(CLASS_BYTES_MIN, -(-block_bytes // CLASSES))
        peer = self._call("add_remote_agent", metadata)
        for number in range(1, CLASSES + 1):
            length = min(number * self._unit, block_bytes)
            own, far = ([[a, length, 0, stride, n]] for a, stride, n in (self.area, area))
            self._lists.append((self._list("", own), self._list(peer, far)))

    def _list(self, peer: str, rows: Sequence[Sequence[int]]) -> Any:
        """Prepare a list of slots; a row is address, length, device, stride and count."""
        return self._call("prep_xfer_dlist", peer, np.array(rows, np.uint64), "DRAM")

    def write(self, own: Sequence[int], far: Sequence[int], lengths: Sequence[int]) -> Posted:
        classes: dict[int, tuple[list[int], list[int]]] = {}
        for here, there, length in zip(own, far, lengths, strict=True):
            pairs = classes.setdefault((length - 1) // self._unit, ([], []))
            pairs[0].append(here)
            pairs[1].append(there)
        posted = _Writes()
        self._held.add(posted)
        for number, slots in classes.items():
            mine, theirs = (np.array(each, np.int32) for each in slots)
            lists = self._lists[number]
            posted.handles.append(
                self._call("make_prepped_xfer", "WRITE", lists[0], mine, lists[1], theirs)
            )
            del lists
            self._call("transfer", posted.handles[-1])
        return posted

    def ended(self, posted: Posted) -> bool:
        assert isinstance(posted, _Writes)
        while posted.handles and self._call("check_xfer_state", posted.handles[-1]) == "DONE":
            posted.handles.pop().release()
        if posted.handles:
            return False
        self._held.discard(posted)
        return True

    def progress(self) -> bool:
        began = perf_counter()
        self._call("get_new_notifs")
        return perf_counter() - began > MOVED_S

    def destroy(self) -> None:
        for one in chain(*(posted.handles for posted in self._held), *self._lists):
            with suppress(*self._errors):
                one.release()
        one = None
        for posted in self._held:
            posted.handles.clear()
        self._held.clear()
        self._lists.clear()
        self._agent = None
        gc.collect()


class _Writes:
    """Handles of one write in flight, one for each length class."""

    def __init__(self) -> None:
        self.handles: list[Any] = []


def load() -> Any:
    """Import and return NIXL; raise ConfigError if it, or a library it needs, is missing."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # the process belongs to one tier alone
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    missing: ImportError | None = None
    for wheel in _WHEELS:
        try:
            return import_module(wheel)
        except ImportError as error:
            missing = missing if isinstance(error, ModuleNotFoundError) and missing else error
    raise ConfigError(
        f"NIXL cannot be loaded: {missing}",
        path="type",
        hint="install kvladder[nixl]",
    ) from missing


def _errors(library: Any) -> tuple[type[Exception], ...]:
    """Return the types of NIXL's errors, which have no common base class."""
    known = library.nixlBind
    own = [getattr(known, name) for name in dir(known) if name.endswith("Error")]
    return (*own, RuntimeError, ValueError)
