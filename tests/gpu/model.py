"""A reference model of a block pool without tiers: no index, no lists, no speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvladder.policy.retention import Retention

Name = tuple[int, ...]
"""A block's name: all tokens of its prefix and its own."""


@dataclass
class Cached:
    """A block that can be reused."""

    priority: int
    until: float | None
    used: int
    """The time of the last release."""


@dataclass(eq=False)
class Private:
    """A block known only to its holders."""


@dataclass(eq=False)
class Run:
    """A sequence."""

    tokens: list[int]
    prompt: int
    retention: Retention | None
    table: list[Name | Private] = field(default_factory=list[Name | Private])
    computed: int = 0
    stored: int = 0
    storing: bool = True
    copied: list[Name | Private] = field(default_factory=list[Name | Private])
    """Sources that are held until their copy is made."""


class PoolModel:
    def __init__(self, blocks: int, size: int, partial: str) -> None:
        self.blocks, self.size, self.partial = blocks, size, partial
        self.cached: dict[Name, Cached] = {}
        self.runs: list[Run] = []
        self.pins: list[Name | Private] = []
        self.now = 0.0
        self._uses = 0

    # ---- state

    def refs(self, block: Name | Private) -> int:
        held = sum(run.table.count(block) + run.copied.count(block) for run in self.runs)
        return held + self.pins.count(block)

    def held(self) -> set[Name | Private]:
        tables = [block for run in self.runs for block in (*run.table, *run.copied)]
        return {*tables, *self.pins}

    def parent(self, name: Name) -> Name:
        return name[: (len(name) - 1) // self.size * self.size]

    def leaf(self, name: Name) -> bool:
        return not any(self.parent(other) == name for other in self.cached)

    def idle(self) -> list[Name]:
        return [name for name in self.cached if not self.refs(name)]

    def free(self) -> int:
        return self.blocks - len(self.held())

    def expire(self) -> None:
        for block in self.cached.values():
            if block.until is not None and block.until <= self.now:
                block.priority, block.until = min(block.priority, 35), None

    def next_victim(self) -> Name | None:
        self.expire()
        leaves = [name for name in self.idle() if self.leaf(name)]
        order = {name: (self.cached[name].priority, self.cached[name].used) for name in leaves}
        return min(order, key=order.__getitem__) if order else None

    # ---- events

    def evict(self, count: int) -> int:
        done = 0
        while done < count and (name := self.next_victim()) is not None:
            del self.cached[name]
            done += 1
        return done

    def room(self, count: int) -> None:
        """Evict until ``count`` slots are empty."""
        empty = self.blocks - len(self.held() | set(self.cached))
        self.evict(count - empty)

    def use(self, blocks: Sequence[Name | Private]) -> None:
        """These were given back, in the order of their prefix."""
        for block in reversed(blocks):
            if isinstance(block, tuple) and block in self.cached and not self.refs(block):
                self._uses += 1
                self.cached[block].used = self._uses

    def prefix(self, tokens: Sequence[int]) -> list[Name]:
        names: list[Name] = []
        for end in range(self.size, len(tokens) + 1, self.size):
            if tuple(tokens[:end]) not in self.cached:
                break
            names.append(tuple(tokens[:end]))
        return names

    def parts(self, tokens: Sequence[int], matched: int) -> tuple[int, set[Name]]:
        """Return how many tokens behind the match a usable block shares, and those blocks."""
        begin = matched * self.size
        best: dict[Name, int] = {}
        for name in self.cached if self.partial != "off" else ():
            if self.parent(name) != tuple(tokens[:begin]):
                continue
            shared = 0
            for ours, theirs in zip(tokens[begin:], name[begin:], strict=False):
                if ours != theirs:
                    break
                shared += 1
            usable = self.partial == "copy" or (not self.refs(name) and self.leaf(name))
            if shared and usable:
                best[name] = shared
        most = max(best.values(), default=0)
        return most, {name for name, shared in best.items() if shared == most}

    def room_for(
        self,
        tokens: Sequence[int],
        names: Sequence[Name],
        part: Name | None,
        *,
        taken: bool = False,
    ) -> int:
        """Return how many slots a prompt lacks even if all is freed; 0 or less if there is room."""
        fresh = -(-len(tokens) // self.size) - len(names)
        kept: set[Name | Private] = {*self.held(), *names}
        if part is not None:
            kept.add(part)
            fresh -= taken
        return fresh - (self.blocks - len(kept))

    def begin(
        self, tokens: list[int], retention: Retention | None, part: Name | None, *, taken: bool
    ) -> Run:
        """Begin a prompt for which there is room; ``part`` serves its last tokens."""
        names = self.prefix(tokens[:-1])
        shared, candidates = self.parts(tokens[:-1], len(names))
        self.allow(tokens, names, part, candidates, taken=taken)
        shared = 0 if part is None else shared
        run = Run(tokens, len(tokens), retention)
        run.table = [*names]
        run.computed = len(names) * self.size + shared
        run.stored = len(names)
        self.runs.append(run)
        if part is not None:
            run.copied.append(part)
        self.room(-(-len(tokens) // self.size) - len(names) - taken)
        if part is not None and taken:
            run.copied.remove(part)
            del self.cached[part]
            run.table.append(Private())
        run.table += [Private() for _ in range(-(-len(tokens) // self.size) - len(run.table))]
        self.retain(run, names, cached=True)
        return run

    def allow(
        self,
        tokens: Sequence[int],
        names: Sequence[Name],
        part: Name | None,
        candidates: set[Name],
        *,
        taken: bool,
    ) -> None:
        """Assert that a prompt may use a partly shared block in this way."""
        assert part in candidates or part is None
        if self.partial == "take" or not candidates:
            assert taken == bool(candidates)
        elif part is None or taken:  # there was no room to keep the block to be copied
            tight = [one for one in candidates if self.room_for(tokens, names, one) > 0]
            assert part in tight or (part is None and not all(map(self.idle_leaf, tight)))
        assert part is None or not taken or self.idle_leaf(part)

    def idle_leaf(self, name: Name) -> bool:
        return not self.refs(name) and self.leaf(name)

    def copied(self, run: Run) -> None:
        sources, run.copied = run.copied, []
        self.use(sources)

    def own(self, block: Name | Private) -> bool:
        return isinstance(block, Private) and self.refs(block) == 1

    def append(self, run: Run, count: int) -> int:
        """Return how many slots ``count`` more tokens need beyond those that can be freed."""
        copied, _, more = self.growth(run, count)
        return more + len(copied) - self.free()

    def growth(self, run: Run, count: int) -> tuple[list[int], list[Name], int]:
        """Return positions to replace, blocks to take over, and how many more to add.

        A run writes into none of its blocks that are shared or cached. It takes over blocks that it
        alone holds: all of them if there is no room for copies, else a single one that nothing
        follows, unless such blocks are copied.
        """
        first = run.computed // self.size
        shared = [at for at in range(first, len(run.table)) if not self.own(run.table[at])]
        more = -(-(len(run.tokens) + count) // self.size) - len(run.table)
        has_room = more + len(shared) <= self.free()
        copied: list[int] = []
        taken: list[Name] = []
        for at in shared:
            block = run.table[at]
            if (
                isinstance(block, Private)
                or self.refs(block) > 1
                or (has_room and not (len(shared) == 1 and self.takes(block)))
            ):
                copied.append(at)
            else:
                taken.append(block)
        return copied, taken, more

    def takes(self, name: Name) -> bool:
        """Return whether a run writes into its last block though there is room for a copy."""
        return self.leaf(name) and self.partial != "copy"

    def appended(self, run: Run, tokens: Sequence[int]) -> None:
        copied, taken, more = self.growth(run, len(tokens))
        self.room(more + len(copied))
        self.forget(taken)
        for at in copied:
            old, run.table[at] = run.table[at], Private()
            if run.computed > at * self.size:
                run.copied.append(old)
            else:
                self.use([old])
        run.table += [Private() for _ in range(more)]
        run.tokens += tokens

    def rewind(self, run: Run, count: int) -> None:
        left = len(run.tokens) - count
        surplus = run.table[-(-left // self.size) :]
        del run.tokens[left:], run.table[-(-left // self.size) :]
        run.prompt, run.computed = min(run.prompt, left), min(run.computed, left)
        run.stored = min(run.stored, left // self.size)
        self.use(surplus)

    def fork(self, run: Run) -> Run:
        other = Run(list(run.tokens), run.prompt, run.retention, list(run.table))
        other.computed, other.stored, other.storing = run.computed, run.stored, run.storing
        self.runs.append(other)
        return other

    def release(self, run: Run) -> None:
        whole, tail = divmod(run.computed, self.size)
        name = tuple(run.tokens[: run.computed])
        known = not whole or self.parent(name) in self.cached
        if self.partial != "off" and tail and run.storing and run.stored == whole and known:
            covered = any(
                self.parent(other) == self.parent(name) and other[: len(name)] == name
                for other in self.cached
            )
            block = run.table[whole]
            if not covered and self.own(block):
                self.cached[name] = Cached(35, None, 0)
                self.rename(block, name)
                self.retain(run, [name], cached=False)
        self.runs.remove(run)
        self.use(run.table)

    def retain(self, run: Run, names: Sequence[Name], *, cached: bool) -> None:
        """Apply the retention of a sequence to these blocks, its own or earlier ones."""
        if run.retention is None:
            return
        for name in names:
            first = self.parent(name)
            said = [
                r
                for r in run.retention.ranges
                if r.start <= len(first) and (r.end is None or len(first) < r.end)
            ]
            if len(first) >= run.prompt:
                if (run.retention.decode_priority, run.retention.decode_duration_s) == (35, None):
                    continue
                asked = (run.retention.decode_priority, run.retention.decode_duration_s)
            elif said:
                asked = (said[0].priority, said[0].duration_s)
            elif cached or run.retention.default == 35:
                continue
            else:
                asked = (run.retention.default, None)
            self.cached[name].priority = asked[0]
            self.cached[name].until = None if asked[1] is None else self.now + asked[1]

    def store(self, run: Run, end: int) -> None:
        """The first ``end`` tokens are complete."""
        run.computed = end
        while run.storing and (run.stored + 1) * self.size <= end:
            at = run.stored
            name = tuple(run.tokens[: (at + 1) * self.size])
            if at and self.parent(name) not in self.cached:
                run.storing = False
                break
            new = name not in self.cached
            if new:
                self.cached[name] = Cached(35, None, 0)
                self.rename(run.table[at], name)
            elif run.table[at] != name:
                run.table[at] = name
            self.retain(run, [name], cached=False)
            run.stored += 1

    def rename(self, block: Name | Private, name: Name) -> None:
        for run in self.runs:
            run.table = [name if held is block else held for held in run.table]
            run.copied = [name if held is block else held for held in run.copied]
        self.pins = [name if held is block else held for held in self.pins]

    def forget(self, names: Sequence[Name]) -> None:
        """Remove blocks and all their followers; holders keep theirs."""
        for top in names:
            for name in list(self.cached):
                if name[: len(top)] == top and (len(top) % self.size == 0 or name == top):
                    del self.cached[name]
                    mine = Private()
                    for run in self.runs:
                        run.table = [mine if held == name else held for held in run.table]
                        run.copied = [mine if held == name else held for held in run.copied]
                    self.pins = [mine if held == name else held for held in self.pins]
