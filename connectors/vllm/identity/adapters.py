"""The LoRA adapters in a rank's memory, as digests of what vLLM has read."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch

from kvladder.connectors.digests import digest
from kvladder.connectors.vllm.identity.seen import Seen, Wanted
from kvladder.notices import Notices

MANAGER: Final = "vllm.lora.worker_manager"


class Adapters:
    """Digests of the adapters that vLLM's manager holds, taken whenever it reads one.

    The manager reads an adapter's files when it needs the adapter, and drops it when it needs the
    room. Only the manager's objects tell which adapter the engine computed with.

    Parameters
    ----------
    manager:
        vLLM's worker manager; None if the engine has no adapters.
    """

    def __init__(self, manager: Any, notices: Notices) -> None:
        self._manager = manager
        self._notices = notices
        self._held: dict[int, Any] = {}
        """vLLM's adapter objects by number, as of the last look."""
        self._seen: dict[int, Seen] = {}
        self._contents: dict[int, bytes] = {}
        """Digest of the adapter that was last in memory, by number."""
        self._news: dict[int, Seen] = {}

    def read(self, wanted: Wanted) -> None:
        """Let vLLM's manager read a missing adapter, as it would to run a request.

        The adapter is not put into a slot, and displaces no adapter that is in use. So nothing
        changes for the requests of this step. If there is no room, it is not read.
        """
        request, number = wanted.request, int(wanted.request.lora_int_id)
        if self._manager is None:
            return
        adapters = self._manager._adapter_manager
        present, seen = adapters.list_adapters(), self._last(number)
        anew = bool(request.load_inplace) and seen.doubt < wanted.doubt
        if number in present and not anew:
            return
        others = [one for one in present if one != number]
        pinned: Any = getattr(adapters._registered_adapters, "pinned_items", ())
        idle = [one for one in others if one not in wanted.kept and one not in pinned]
        if len(others) >= adapters.capacity and not idle:
            return
        try:
            adapter = self._manager._load_adapter(request)
        except Exception as error:  # noqa: BLE001 - vLLM reads it again, and says what is wrong
            self._notices.say("adapter", f"adapter {request.lora_name} cannot be read: {error!r}")
            return
        adapters.remove_adapter(number)
        if len(others) >= adapters.capacity:
            adapters.remove_adapter(idle[0])
        adapters.add_adapter(adapter)
        self._seen[number] = self._news[number] = replace(seen, doubt=wanted.doubt)

    def look(self, turn: int) -> set[int]:
        """Look at the adapters in memory in the step ``turn``; return the numbers that changed."""
        present = {} if self._manager is None else self._manager._adapter_manager.list_adapters()
        held, self._held = self._held, present
        changed: set[int] = set()
        for number in held.keys() | present.keys():
            if held.get(number) is present.get(number):
                continue
            seen, content = self._last(number), b""
            if number in present:
                content = self._digest(number, present[number])
                if not content or content != self._contents.get(number):
                    seen = replace(seen, changes=seen.changes + 1, step=turn)
                    changed.add(number)
                self._contents[number] = content
            self._seen[number] = self._news[number] = replace(seen, digest=content)
        return changed

    def changes(self, number: int) -> int:
        """Return how often the adapter with this number has changed."""
        return self._last(number).changes

    def take(self) -> dict[int, Seen]:
        """Return the news since the last call, by number."""
        news, self._news = self._news, {}
        return news

    def _last(self, number: int) -> Seen:
        return self._seen.get(number) or Seen(0, b"", 0, 0)

    def _digest(self, number: int, adapter: Any) -> bytes:
        """Return the digest of an adapter; empty if it cannot be read."""
        try:
            return digest_of(adapter)
        except Exception as error:  # noqa: BLE001 - an engine must outlive its cache
            self._notices.say("adapter", f"adapter {number} cannot be read in memory: {error!r}")
            return b""


def manager_of(adapters: Any) -> Any:
    """Return vLLM's worker manager that reads adapters for a model's manager; None without one."""
    module = sys.modules.get(MANAGER)
    if adapters is None or module is None:
        return None
    kind = module.WorkerLoRAManager
    for one in gc.get_objects():
        if issubclass(type(one), kind) and getattr(one, "_adapter_manager", None) is adapters:
            return one
    return None


def digest_of(adapter: Any) -> bytes:
    """Return the digest of everything in an adapter in memory except its number.

    Raises
    ------
    TypeError
        The adapter has a part that is not a tensor, a number or text.
    """
    state = hashlib.sha256(b"kvladder adapter in memory 1")
    for where, value in sorted(_parts("", {**vars(adapter), "id": None})):
        state.update(f"{where}\n".encode() + value)
    return state.digest()


def _parts(where: str, value: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the parts of a value: a text that tells place and kind, and the part's digest."""
    if isinstance(value, torch.Tensor):
        yield f"{where} {value.dtype} {tuple(value.shape)}", digest(value)
    elif value is None or isinstance(value, bool | int | float | str):
        yield f"{where} {value!r}", b""
    elif isinstance(value, list | tuple):
        for n, one in enumerate(cast("Sequence[Any]", value)):
            yield from _parts(f"{where}.{n}", one)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _parts(f"{where}.{name}", one)
    elif hasattr(value, "lora_a") or hasattr(value, "weight"):  # of one layer
        yield from _parts(where, vars(value))
    else:
        raise TypeError(f"{where}: expected a tensor, number or text, found {type(value).__name__}")
