"""The weights and adapters that block keys stand for, as the ranks report them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvladder.connectors.vllm.identity.seen import Seen, Wanted

if TYPE_CHECKING:  # importing it needs vLLM, and only types need it here
    from kvladder.connectors.vllm.step import Report, StepMetadata

PATIENCE: Final = 1000
"""Number of steps after which requests stop waiting for ranks that have not looked yet."""
STEPS_MAX: Final = 16
"""Number of remembered steps that ranks may not have begun yet; vLLM has two at most."""
OUTDATED_MAX: Final = 4
"""Number of remembered caches with other adapters' KV: vLLM's, and those of steps in flight."""


def combined(digests: Sequence[bytes]) -> bytes:
    """Return the digest of all ranks' weights."""
    return hashlib.sha256(b"kvladder weights of ranks 1" + b"".join(digests)).digest()


MODEL: Final = 0
"""The number of the model itself; the numbers of adapters begin with 1."""


class _Held:
    """The ranks' latest findings for the model, or for one adapter."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self.digests = list(digests)
        self.changes = [0] * len(self.digests)
        self.looked = [0] * len(self.digests)
        self.doubt = 0

    @property
    def digest(self) -> bytes:
        """The digest of all ranks, as of their last looks."""
        return combined(self.digests)

    @property
    def known(self) -> bool:
        """True if all ranks have it in memory, and have looked since the last doubt."""
        return min(self.looked) >= self.doubt and all(self.digests)

    def take(self, rank: int, seen: Seen) -> bool:
        """Record what a rank saw; return whether it has changed."""
        changed = seen.changes != self.changes[rank]
        self.looked[rank], self.changes[rank] = seen.doubt, seen.changes
        self.digests[rank] = seen.digest
        return changed


class _Name:
    """The adapters behind one name and path, which vLLM's own prefix cache uses for its hashes."""

    def __init__(self) -> None:
        self.digest: bytes | None = None
        """Digest of the adapter that the last request computed with; None if not known."""
        self.cache: object = self
        """vLLM's own prefix cache at the time of that request."""
        self._outdated: deque[object] = deque(maxlen=OUTDATED_MAX)
        """Caches that may have KV made by another adapter."""

    def outdate(self, cache: object) -> None:
        """Record that ``cache`` may have KV made by another adapter."""
        if not self.outdated(cache):
            self._outdated.append(cache)

    def outdated(self, cache: object) -> bool:
        """Return whether ``cache`` may have KV made by another adapter."""
        return any(cache is one for one in self._outdated)


class Weights:
    """The scheduler half's state of the ranks' weights, and of their LoRA adapters.

    The namespace is that of the weights at start. After a change, every key has a mark of the new
    weights; if the old weights return, so do the old keys. While there is a doubt, no key is used.
    The ranks then look at their memory before the forward pass of a step in which the engine is
    awake, and answer with the report. Each step tells each rank which of its changes are known. A
    rank that has seen another change copies nothing in that step.

    An adapter is known in the same way while all ranks have it in memory; see ``want``. Ranks look
    at their adapters in each step, before and after its forward pass. So a doubt about an adapter
    arises only if a request wants it read again.
    """

    def __init__(self, digests: Sequence[bytes]) -> None:
        self._model = _Held(digests)
        self._first = self.digest
        self._adapters: dict[int, _Held] = {}
        self._wanted: Any = None
        """The LoRARequest of an adapter that the ranks are to read in the next step."""
        self._names: dict[tuple[str, str], _Name] = {}
        self._named: dict[int, _Name] = {}
        """Name of the adapter that requests began with, by the adapter's number."""
        self._awake = False
        self._steps = 0
        self._unanswered = 0
        self._caches: deque[tuple[int, object]] = deque(maxlen=STEPS_MAX)
        """vLLM's own prefix cache in each of the last steps, with the step's number."""
        self._outdated: object = self

    @property
    def digest(self) -> bytes:
        """The digest of the weights of all ranks, as of their last looks."""
        return self._model.digest

    @property
    def mark(self) -> int:
        """The mark combined (XOR) with all keys; 0 for the weights at start."""
        digest = self.digest
        return 0 if digest == self._first else int.from_bytes(digest)

    @property
    def known(self) -> bool:
        """True if all ranks have looked since the last doubt."""
        return self._model.known

    @property
    def patient(self) -> bool:
        """True if requests should still wait until the weights are known."""
        return self._unanswered < PATIENCE

    def doubt(self) -> None:
        """Record that the weights may have changed, so that all ranks look again."""
        self._model.doubt += 1
        self._unanswered = 0

    def adapter(self, number: int) -> bytes | None:
        """Return the digest of an adapter on all ranks; None unless all have it in memory."""
        held = self._adapters.get(number)
        return held.digest if held is not None and held.known else None

    def doubt_adapter(self, number: int) -> None:
        """Require that ranks read an adapter again before it is known."""
        self._held(number).doubt += 1

    def want(self, lora: Any) -> None:
        """Ask the ranks to read an adapter in the next step, unless one is already asked for."""
        self._wanted = self._wanted or lora

    def begins(self, lora: Any, digest: bytes | None, cache: object) -> None:
        """Record that a request begins to compute with an adapter.

        ``digest`` is the adapter's digest, None if not known. ``cache`` is vLLM's own prefix cache,
        which stores the computed blocks under the adapter's name.
        """
        one = self._names.setdefault((lora.lora_name, lora.lora_path), _Name())
        self._named[int(lora.lora_int_id)] = one
        if digest is None or digest != one.digest:
            one.outdate(one.cache)
        one.digest, one.cache = digest, cache

    def _held(self, number: int) -> _Held:
        ranks = len(self._model.digests)
        return self._adapters.setdefault(number, _Held([b""] * ranks))

    def awake(self) -> None:
        """Record that the engine is awake: a request may run, so the weights are in memory."""
        self._awake = True

    def prepare(
        self, step: StepMetadata, *, runs: bool, cache: object, kept: Iterable[int] = ()
    ) -> None:
        """Set the fields of a step that concern weights and adapters.

        ``runs`` is True if the step has a forward pass. ``cache`` is vLLM's own prefix cache.
        ``kept`` has the numbers of the adapters of requests that have begun.
        """
        self._steps += 1
        step.turn, step.weights = self._steps, tuple(self._model.changes)
        for number in step.owners.values():
            step.adapters[number] = tuple(self._held(number).changes)
        if self._wanted is not None:
            lora, self._wanted = self._wanted, None
            doubt = self._held(int(lora.lora_int_id)).doubt
            step.wanted = Wanted(lora, doubt, frozenset(kept))
        if not self.known and (runs or self._awake):
            step.doubt = self._model.doubt
            self._unanswered += 1
        self._awake = False
        if runs or step.loads:
            self._caches.append((self._steps, cache))

    def report(self, report: Report) -> set[int]:
        """Record what the ranks saw; return the numbers of changed adapters, and MODEL if changed.

        If one rank's weights have changed, those of others may have, too. So all ranks look again,
        unless this report has news from all of them.
        """
        changed, was_known = set[int](), self.known
        for rank, seen in report.seen.items():
            if self._model.take(rank, seen):
                changed.add(MODEL)
                self._outdated = self._before(seen.step)
            for number, one in seen.adapters.items():
                if self._held(number).take(rank, one) and one.changes > 1:
                    changed.add(number)
                    self._rename(number, one.step)
        if MODEL in changed and was_known and len(report.seen) < len(self._model.changes):
            self.doubt()
        return changed

    def _rename(self, number: int, step: int) -> None:
        """Record that an adapter, and so what its name stands for, changed in a step."""
        named = self._named.get(number)
        if named is not None:
            named.digest = self.adapter(number)
            named.outdate(self._before(step))

    def _before(self, step: int) -> object:
        """Return vLLM's own prefix cache in the last remembered step before this one."""
        before = [cache for turn, cache in self._caches if turn < step]
        return before[-1] if before else self

    def outdated(self, cache: object, lora: Any = None, digest: bytes | None = None) -> bool:
        """Return whether vLLM's own prefix cache may have KV made by other weights.

        ``lora`` is the adapter of the request that would begin with this KV, and ``digest`` is the
        adapter's digest.
        """
        if cache is self._outdated or lora is None:
            return cache is self._outdated
        one = self._names.get((lora.lora_name, lora.lora_path))
        if one is None:
            return False
        other = digest is None or digest != one.digest
        return (other and cache is one.cache) or one.outdated(cache)
