"""Requests over the pools of a model, one per group: one prefix for all, a table of blocks each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

from kvladder.errors import BlocksBusy, OutOfBlocks, PoolError
from kvladder.gpu.pool.reserve import Hold, Match, Reservations
from kvladder.gpu.requests.groups import Group, holes_of, served_by_all
from kvladder.gpu.requests.prefixes import Found
from kvladder.gpu.requests.sequence import BlockCopy, Extra, KVSequence
from kvladder.gpu.requests.sequences import Sequences, limits
from kvladder.gpu.tree.names import DeviceSlot
from kvladder.policy.numbers import whole
from kvladder.policy.retention import Retention


class Request:
    """One running request: a sequence per group. Made and changed by ``Requests`` alone.

    ``parts[g]`` is the :class:`KVSequence` of group ``g``; all have the same tokens.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[KVSequence]) -> None:
        self.parts = tuple(parts)

    @property
    def tokens(self) -> Sequence[int]:
        """All token ids, those included whose KV is not there yet."""
        return self.parts[0].tokens

    @property
    def cached(self) -> int:
        """How many tokens of the prompt were served from the cache."""
        return self.parts[0].cached

    @property
    def computed(self) -> int:
        """How many leading tokens have their KV in the blocks."""
        return self.parts[0].computed

    @property
    def tables(self) -> list[list[DeviceSlot]]:
        """By group, the slot of each block; ``NO_SLOT`` (-1) before what a window still reads."""
        return [part.table for part in self.parts]

    @property
    def copies(self) -> list[tuple[int, BlockCopy]]:
        """``(group, copy)`` that the engine makes before it runs the request, then ``copied``.

        Of a state the whole block is copied, whatever the copy's ``tokens``.
        """
        return [(group, copy) for group, part in enumerate(self.parts) for copy in part.copies]

    @property
    def ready(self) -> bool:
        """Whether all cached bytes are in place, so that the engine may run it."""
        return all(part.ready for part in self.parts)

    @property
    def arriving(self) -> bool:
        """Whether blocks are still on their way from a tier: poll, and ask again."""
        return any(part.waits for part in self.parts)

    def require_ready(self) -> None:
        """Raise NotHeld if it was released, NotReady if its bytes are not in place."""
        for part in self.parts:
            part.require_ready()

    @property
    def lost(self) -> bool:
        """Whether a block did not arrive: release the request and begin it anew."""
        return any(part.lost for part in self.parts)


class Requests:
    """Running requests of one model. Calls come from the pools' thread and never wait.

    An engine begins a request with its prompt, waits until it is ``ready``, makes its ``copies``
    and says ``copied``, computes what was not cached, says so by ``commit``, appends what it
    generates, and releases the request. What raises leaves all groups as they were, except that
    blocks nobody held may have been evicted.

    A prompt may be computed a part at a time: ``begin(room=n)``, then ``extend`` and ``commit``
    in turn. A window's pool then needs room for the window and one such part only.

    Parameters
    ----------
    groups, sequences:
        What each group is, and its sequences, in the same order. The pool of a window or a state
        is not ``chained``. With several groups, and with a window, ``partial`` is off.
    reuse:
        Whether blocks are served to later requests, see ``CachePlan.no_reuse``.
    """

    def __init__(
        self, groups: Sequence[Group], sequences: Sequence[Sequences], *, reuse: bool = True
    ) -> None:
        assert len(groups) == len(sequences) > 0
        self.groups = tuple(groups)
        self.sequences = tuple(sequences)
        self.reuse = reuse
        self.step = lcm(*(group.block_tokens for group in groups))
        """Cached prefixes of several groups, or of a window, end at multiples of so many tokens."""
        self._only = sequences[0] if len(groups) == 1 and groups[0].kind == "full" else None
        for group, one in zip(groups, sequences, strict=True):
            settings = one.pool.settings
            assert settings.block_tokens == group.block_tokens
            assert settings.chained == (group.kind == "full")
            assert settings.partial == "off" or self._only is not None

    # ---- begin

    def begin(
        self,
        tokens: Sequence[int],
        *,
        retention: Retention | None = None,
        salt: str = "",
        lora: str = "",
        extra: Extra = (),
        cached_max: int | None = None,
        room: int | None = None,
        prompt_tokens: int | None = None,
    ) -> Request:
        """A request for this prompt, with slots for all of it and the cached prefix in place.

        The prefix is the longest that every group can serve. For the parameters and errors see
        ``Sequences.begin``.
        """
        if not self.reuse:
            cached_max = 0
        if self._only is not None:
            found = self._only.begin(
                tokens,
                retention=retention,
                salt=salt,
                lora=lora,
                extra=extra,
                cached_max=cached_max,
                room=room,
                prompt_tokens=prompt_tokens,
            )
            found.storing = self.reuse
            return Request([found])
        parts = [
            one.make(tokens, retention, salt, lora, extra, prompt_tokens) for one in self.sequences
        ]
        count = len(parts[0].tokens)
        limit, room = limits(count, cached_max, room)
        matches = self._find(parts, limit)
        cached = matches[0].tokens(self.groups[0].block_tokens)
        end = min(count, cached + room)

        def hold(at: int) -> Hold:
            blocks = -(-end // self.groups[at].block_tokens)
            return self.sequences[at].prefixes.hold(matches[at], blocks)

        slots = self.settle(hold, matches)
        for one, part, match, given in zip(self.sequences, parts, matches, slots, strict=True):
            one.fill(part, match, given)
            part.storing = self.reuse
        return Request(parts)

    def _find(self, parts: Sequence[KVSequence], limit: int) -> list[Found]:
        """The longest prefix that all groups can serve; what only tiers hold is claimed."""
        step, end = self.step, limit // self.step * self.step
        presents = [
            one.pool.present(part.keys[: end // group.block_tokens])
            for one, part, group in zip(self.sequences, parts, self.groups, strict=True)
        ]
        while True:
            end = served_by_all(self.groups, [holes_of(one) for one in presents], end, step)
            found: list[Found] = []
            for at, (one, part, group) in enumerate(
                zip(self.sequences, parts, self.groups, strict=True)
            ):
                first, last = group.first(end), end // group.block_tokens
                found.append(one.prefixes.find_span(part, first, last))
                got = first + len(found[-1].match.nodes)
                if got < last:  # a tier that had it does not give it
                    presents[at][got] = False
                    break
            else:
                return found
            for one, match in zip(self.sequences, found, strict=False):
                one.pool.reserve.forgo(match.match)

    def settle(
        self, hold: Callable[[int], Hold], matches: Sequence[Found] = ()
    ) -> list[list[DeviceSlot]]:
        """Reserve in every group, then evict in every group; or nothing in any.

        ``hold(g)`` reserves in group ``g``; the result has the fresh slots of each. ``matches``
        are what the holds are for.

        Raises
        ------
        OutOfBlocks, BlocksBusy
            See ``Reservations``; nothing is held.
        """
        reserves = [one.pool.reserve for one in self.sequences]
        holds: list[Hold] = []
        slots: list[list[DeviceSlot]] = []
        try:
            holds.extend(map(hold, range(len(reserves))))
            slots.extend(map(Reservations.settle, reserves, holds))
        except OutOfBlocks as error:
            failed = len(slots) if isinstance(error, BlocksBusy) else len(holds)
            for at, (reserve, held) in enumerate(zip(reserves, holds, strict=False)):
                if at < len(slots):
                    reserve.undo(held, slots[at])
                elif at != failed:
                    reserve.cancel(held)
            for at in range(len(holds) + 1, len(matches)):
                reserves[at].forgo(matches[at].match)
            raise
        return slots

    def copied(self, request: Request) -> None:
        """The engine made the copies, or ordered them before all it does from now on."""
        for one, part in zip(self.sequences, request.parts, strict=True):
            one.copied(part)

    # ---- run

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """The request goes on with ``tokens``: there are slots to write their KV to.

        See ``Sequences.append``.
        """
        self._grow(request, tokens, None)

    def extend(self, request: Request, end: int) -> None:
        """See to it that there are slots for the first ``end`` tokens; raises like ``append``."""
        self._grow(request, (), end)

    def _grow(self, request: Request, tokens: Sequence[int], end: int | None) -> None:
        both = list(zip(self.sequences, request.parts, strict=True))
        growths = [one.growth(part, tokens, end) for one, part in both]
        if self._only is not None:
            slots = [self._only.pool.allocate(growths[0].fresh)]
        else:
            slots = self.settle(
                lambda at: self.sequences[at].pool.reserve.hold(Match([], []), growths[at].fresh)
            )
        for (one, part), growth, given in zip(both, growths, slots, strict=True):
            one.grow(part, growth, given)

    def commit(self, request: Request, computed: int) -> None:
        """The KV of the first ``computed`` tokens is complete: whole blocks can be reused by all.

        Blocks that a window has passed leave the request; they stay cached. Slots of the tables
        may change, see ``Sequences.commit``.
        """
        for one, part in zip(self.sequences[1:], request.parts[1:], strict=True):
            one.computable(part, computed)  # before the first, which asks itself, changes
        computed = whole(computed, "computed")
        for one, part, group in zip(self.sequences, request.parts, self.groups, strict=True):
            one.commit(part, computed)
            one.leave(part, group.keeps(computed))

    def rewind(self, request: Request, count: int) -> None:
        """Take the last ``count`` tokens back, see ``Sequences.rewind``.

        Raises
        ------
        PoolError
            A window has passed what would be read then, or a state would have to be one that is
            no checkpoint; nothing was changed.
        """
        request.require_ready()
        count = whole(count, "count")
        left = len(request.tokens) - count
        for part, group in zip(request.parts, self.groups, strict=True):
            if not 0 <= left < part.computed:
                continue
            if group.first(left) < part.first:
                raise PoolError(f"{group.name} keeps nothing from before token {left} any more")
            if group.kind == "state" and left % group.block_tokens:
                raise PoolError(f"{group.name} has no state after {left} tokens")
        for one, part in zip(self.sequences, request.parts, strict=True):
            one.rewind(part, count)

    def fork(self, request: Request, count: int) -> list[Request]:
        """``count`` more requests with the same tokens and blocks, see ``Sequences.fork``.

        Raises
        ------
        PoolError
            There is a state, and tokens that are not computed: whoever computed them would change
            it under the others. Nothing was changed.
        """
        request.require_ready()
        states = any(group.kind == "state" for group in self.groups)
        if states and request.computed < len(request.tokens):
            raise PoolError("not all of its tokens are computed, and it has a state")
        both = zip(self.sequences, request.parts, strict=True)
        forks = [one.fork(part, count) for one, part in both]
        return [Request(parts) for parts in zip(*forks, strict=True)]

    def release(self, request: Request, *, store: bool = True) -> None:
        """The request is over: its blocks may be reused, see ``Sequences.release``."""
        for one, part in zip(self.sequences, request.parts, strict=True):
            one.release(part, store=store)
