"""The data plane of one connection: a NIXL agent that writes from slots here into slots there.

NIXL cannot cancel: what was posted ends by itself, or by the agent's end, ``destroy``. So there is
an agent for each connection, and none of them reads.
"""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvladder.arena import Arena
from kvladder.errors import ConfigError, TierError

CLASSES = 8
"""A block travels in so many lengths: each has lists of its own, made once."""
CLASS_BYTES_MIN = 64
INLINE_BYTES = 32 << 20
"""Of blocks whose checksums are made on the loop: posting as many bytes holds it for longer, and a
thread would have to wait for a processor that the transfer keeps busy."""
MOVED_S = 30e-6
"""A poll that takes longer than this has moved bytes."""
_WHEELS = "nixl_cu13._api", "nixl_cu12._api"
"""Where NIXL is. Memory of this machine needs no CUDA, and `nixl` would import torch to find it."""
_TIMES = {
    "TCP_USER_TIMEOUT": "5s",  # what is cut off is an error, and not waited for for ever
    "TCP_KEEPIDLE": "2s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    "KEEPALIVE_INTERVAL": "2s",
    "TCP_TX_SEG_SIZE": "16k",  # what comes together with a header is copied once more
    "TCP_RX_SEG_SIZE": "16k",
}


class Area(NamedTuple):
    """Slots in the memory of one end."""

    address: int
    slot_bytes: int
    slots: int


class Posted(Protocol):
    """A write that is under way."""


class Plane(Protocol):
    """One end of the data plane. All of it is called by one thread, and ``make`` by any."""

    metadata: bytes
    """What the other end needs for ``join``."""
    area: Area
    """The slots here."""

    def join(self, metadata: bytes, area: Area, block_bytes: int) -> None:
        """Know the other end, in whose slots at most ``block_bytes`` are written."""
        ...

    def write(self, own: Sequence[int], far: Sequence[int], lengths: Sequence[int]) -> Posted:
        """Begin to write that many bytes of these slots into those; as many as each has.

        More may be written, up to the next eighth of a block. Where the other end has no such slot
        it is a TierError; here nobody looks.
        """
        ...

    def ended(self, posted: Posted) -> bool:
        """Whether a write is over; asked until it is. A TierError if it failed."""
        ...

    def progress(self) -> bool:
        """Have bytes come and go, which they do at no other time; whether any may have."""
        ...

    def destroy(self) -> None:
        """From now on no byte comes or goes. Holds the interpreter lock for up to a second."""
        ...


def area_of(arena: Arena) -> Area:
    """All slots of an arena, with those that its owner has set aside."""
    handle = arena.handle
    return Area(arena.address, handle.slot_bytes, handle.slots)


class NixlPlane:
    """An agent with the back end UCX, without a thread of its own: that crashes who pushes.

    Parameters
    ----------
    transports:
        As ``UCX_TLS``. With ``cma`` or ``sm`` the end of an agent would not be the end of writes.
    interfaces:
        As ``UCX_NET_DEVICES``; ``all`` leaves that variable as it is, UCX's own ``all`` if unset.
    """

    def __init__(self, arena: Arena, transports: str, interfaces: str) -> None:
        library, self.area = load(), area_of(arena)
        self._errors = _errors(library)
        strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = library.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
        settings = {"TLS": transports, **_TIMES}
        if interfaces != "all":
            settings["NET_DEVICES"] = interfaces
        # not as engine_config, whose values cannot have commas
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
        """Call the agent; whatever it raises is a TierError.

        That has no handle in its traceback: one that is left keeps the agent's sockets open.
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
        """Slots as one row: address, length, device, bytes from one to the next, how many."""
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
    """Handles of the writes that are under way, one for each length."""

    def __init__(self) -> None:
        self.handles: list[Any] = []


def load() -> Any:
    """NIXL; raises ConfigError if it, or what it needs, is missing."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # it is the process of one tier alone
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
        hint="expected pip install kvladder[nixl]",
    ) from missing


def _errors(library: Any) -> tuple[type[Exception], ...]:
    """What NIXL raises, which has no base of its own."""
    known = library.nixlBind
    own = [getattr(known, name) for name in dir(known) if name.endswith("Error")]
    return (*own, RuntimeError, ValueError)
