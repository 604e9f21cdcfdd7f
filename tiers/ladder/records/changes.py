"""Changes of a level's index while it serves: another policy, shorter lives, other limits."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvladder.lock import STEP
from kvladder.policy.eviction import EvictionPolicy, KeyedPolicy, PrioritizedLRU
from kvladder.policy.tenants import Tenants
from kvladder.tiers.ladder.records.guard import GuardedPolicy, PolicyTeller
from kvladder.tiers.ladder.records.moving import MovingPolicy
from kvladder.tiers.ladder.records.queries import IndexQueries
from kvladder.tiers.ladder.records.tenancy import P as P


class IndexChanges(IndexQueries[P], PolicyTeller):
    """The part of an index that an operator's change of the level's settings calls."""

    policy: EvictionPolicy
    _keyed: KeyedPolicy | None
    _say: Callable[[str], object]
    _uses: int
    _used: array[int]

    def _guarded(self, policy: EvictionPolicy) -> tuple[EvictionPolicy, KeyedPolicy | None]:
        """Return a policy that is left for LRU if it fails, and again if it is told of keys."""
        guard = GuardedPolicy(policy, now=self._now, ranks=self._ranks, say=self._say)
        plain = type(policy) is PrioritizedLRU  # ours, and not told of anything
        return policy if plain else guard, None if guard.keyed is None else guard

    def _ranks(self, places: NDArray[np.intp]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Return the priority of the blocks at ``places``, and how many uses ago each was used."""
        used = np.frombuffer(self._used, np.uint32)[places]
        ages: NDArray[np.uint32] = np.uint32(self._uses) - used  # modulo 2**32
        return np.frombuffer(self._priority, np.uint8)[places], ages

    def replace_policy(self, policy: EvictionPolicy, blocks_max: int) -> Iterator[None]:
        """Order the blocks by another policy, an empty one, from now on.

        Each step hands over at most ``STEP`` blocks, in their order of eviction. The caller holds
        the lock around each step, and takes all steps before another replacement.
        """
        assert not isinstance(self.policy, MovingPolicy), "an earlier replacement has not ended"
        new, keyed = self._guarded(policy)
        if keyed is not None and blocks_max:
            keyed.attached(blocks_max, self.places_of)
        new.reserve(len(self._key))
        priority, key = self._priority.__getitem__, self._key.__getitem__
        moving = MovingPolicy(self.policy, new, keyed, priority=priority, key=key)
        self.policy, self._keyed = moving, None if keyed is None else moving
        while moving.move(STEP):
            yield
        start = 0
        while keyed is not None and start < self._end:  # those that are pinned
            yield
            moving.introduce(range(start, min(self._end, start + STEP)))
            start += STEP
        self.policy, self._keyed = new, keyed

    def limit_ttl(self, ttl_s: float | None) -> None:
        """Have what is held expire in ``ttl_s`` at the latest; None changes nothing that is held.

        Later blocks are given their end by ``insert``, as before.
        """
        if ttl_s is None:
            return
        end_s = self._now() + ttl_s
        if self._expires is None:
            self._expires = array("d", [inf]) * len(self._key)
        column = np.frombuffer(self._expires, np.float64)
        np.minimum(column, end_s, out=column)

    def unused_for(self) -> NDArray[np.uint32]:
        """Return, by place, how many uses ago its block was used: a copy."""
        used = np.frombuffer(self._used, np.uint32)[: self._end]
        ages: NDArray[np.uint32] = np.uint32(self._uses) - used  # modulo 2**32
        return ages

    def orders_like(self, policy: EvictionPolicy) -> bool:
        """Return whether the present policy is of the same class as another one."""
        own = self.policy.inner if isinstance(self.policy, GuardedPolicy) else self.policy
        return type(own) is type(policy)

    def recount(self, tenants: Tenants | None, order: Sequence[int]) -> Iterator[None]:
        """Count the blocks of each salt under other limits, in steps like ``replace_policy``.

        Blocks above a limit to raised ones are lowered. Those above a salt's quota are ``excess``
        from then on. ``order`` has the places, the block that was used first at the front.
        """
        self.tenants = tenants
        self.recounting = tenants is not None
        if tenants is None:
            return
        for start in range(0, len(order), STEP):
            yield
            for place in order[start : start + STEP]:
                if self._key[place] is not None and not tenants.knows(place):
                    self._note_held([cast("P", place)], self.salt(place), self._priority[place])
        self.recounting = False
