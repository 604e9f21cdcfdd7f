"""The prefix index: known blocks, their parents, and their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast

from kvladder.gpu.tree.columns import fill, forget, forget_single, gather, leading, scatter
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, NOWHERE, DeviceSlot, Extra, NodeId, Root
from kvladder.gpu.tree.nodes import Nodes
from kvladder.gpu.tree.siblings import Siblings, common_tokens, label
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX

_ROOTS_MIN = 64

Above = NodeId | BlockKey
"""Entry under which children are listed: the node before them, or its key without parents."""


def _nodes(held: NodeId | Siblings) -> list[NodeId]:
    return held.nodes() if isinstance(held, Siblings) else [held]


class PrefixIndex:
    """Blocks by key and by device slot, as a tree of prefixes.

    A block is known while it is on the device or in a tier. Not thread-safe.

    Parameters
    ----------
    nodes:
        The columns, shared with the order of eviction.
    slots:
        Number of device slots.
    chained:
        True if a block is useful only with all blocks before it. If False, as for a sliding window,
        blocks have no parents here.
    family:
        True if children are listed, which partial matches and tiers need. If blocks have no
        parents, children are listed by the key before them, known or not.
    labels:
        True if token ids are kept.
    """

    def __init__(
        self, nodes: Nodes, *, slots: int, chained: bool, family: bool, labels: bool
    ) -> None:
        self.nodes = nodes
        self.chained = chained
        self.labels = labels
        self.node_at: list[NodeId] = [NO_NODE] * slots
        """Known block in each device slot, or ``NO_NODE``."""
        self.colder: set[NodeId] = set()
        """Blocks that a tier holds, on the device or not."""
        self.salts: dict[NodeId, str] = {}
        """Cache salts of blocks that have one."""
        self.extras: dict[NodeId, Extra] = {}
        """Content beyond tokens, sorted by offset, of blocks that have it."""
        self.origin: dict[NodeId, tuple[BlockKey | None, Root]] = {}
        """Parent and root of blocks without parents here, for events."""
        self._node: dict[BlockKey, NodeId] = {}
        self._roots: dict[BlockKey, NodeId] = {}
        self._root_of: dict[NodeId, Root] = {}
        self._roots_max = _ROOTS_MIN
        self._children: dict[Above, NodeId | Siblings] | None = {} if family else None
        self._before: dict[NodeId, BlockKey] = {}
        """Key before each block that is listed but has no parent."""

    def __len__(self) -> int:
        return len(self._node)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._node

    def find(self, key: BlockKey) -> NodeId | None:
        """Return the block's node, or None."""
        return self._node.get(key)

    def key_of(self, node: NodeId) -> BlockKey:
        """Return the key of a known block."""
        key = self.nodes.key[node]
        assert key is not None
        return key

    def match(self, keys: Sequence[BlockKey]) -> list[NodeId]:
        """Return the longest leading run of ``keys`` that is on the device."""
        return leading(self._node, keys, self.nodes.slot, NO_SLOT)

    def known(self) -> list[NodeId]:
        """Return all blocks, oldest first."""
        return list(self._node.values())

    def all_new(self, keys: Sequence[BlockKey]) -> bool:
        """Return whether none of ``keys`` is known."""
        return self._node.keys().isdisjoint(keys)

    # ---- the tree

    def root(self, root: Root, *, create: bool) -> NodeId | None:
        """Return a root's node, the parent of its first blocks; None if missing and not created."""
        node = self._roots.get(root.key)
        if node is None and create:
            if len(self._roots) >= self._roots_max:
                self._sweep_roots()
            [node] = self.nodes.take(1)
            self.nodes.key[node] = root.key
            self.nodes.parent[node] = NOWHERE
            self.nodes.priority[node] = PRIORITY_MAX
            self._roots[root.key] = node
            self._root_of[node] = root
        return node

    def _sweep_roots(self) -> None:
        """Forget roots without blocks; rare enough that the cost per root is negligible."""
        left = [root for root, node in self._roots.items() if not self.has_children(node)]
        for key in left:
            node = self._roots.pop(key)
            del self._root_of[node]
            self.nodes.priority[node] = PRIORITY_DEFAULT
            self.nodes.give([node])
        self._roots_max = max(_ROOTS_MIN, 2 * len(self._roots))

    def above(self, parent: BlockKey, root: Root, *, create: bool = True) -> Above | None:
        """Return the entry that lists the blocks behind ``parent``, which may be the root's key."""
        if not self.chained:
            return parent
        if parent == root.key:
            return self.root(root, create=create)
        return self._node.get(parent)

    def followed(self, parents: Sequence[BlockKey], root: Root) -> list[bool]:
        """Return for each key whether it has listed children; the first may be the root's key."""
        children, node = self._children or {}, self._node
        if not self.chained:
            return [key in children for key in parents]
        roots = self._roots if parents[0] == root.key else node
        above = [roots.get(parents[0]), *map(node.get, parents[1:])]
        return [one in children for one in above]

    def has_children(self, node: NodeId) -> bool:
        """Return whether a known block follows this one: on the device, or anywhere if listed."""
        if not self.chained:
            return bool(self._children and self.key_of(node) in self._children)
        return self.nodes.kids[node] > 0 or bool(self._children and node in self._children)

    def _above_each(self, nodes: Sequence[NodeId]) -> Sequence[Above]:
        """Return the entry that lists each of these nodes."""
        if self.chained:
            return gather(self.nodes.parent, nodes)
        return [self._before[node] for node in nodes]

    def subtree(self, tops: Iterable[NodeId]) -> list[NodeId]:
        """Return these blocks and all their followers, each once.

        A follower that ``tops`` does not name comes after the block before it.
        """
        children = self._families()
        found = dict.fromkeys(tops)
        ahead = list(found)
        while ahead:
            held = children.get(ahead.pop())
            if held is not None:
                more = [node for node in _nodes(held) if node not in found]
                found.update(dict.fromkeys(more))
                ahead.extend(more)
        return list(found)

    def _families(self) -> Mapping[Above, NodeId | Siblings]:
        """Return the children by parent; O(n) if they are not listed."""
        if self._children is not None:
            return self._children
        listed: dict[Above, Siblings] = {}
        for node in self._node.values() if self.chained else ():
            listed.setdefault(self.nodes.parent[node], Siblings(self.nodes)).add(node)
        return listed

    def _adopt(self, above: Above, node: NodeId) -> None:
        assert self._children is not None
        held = self._children.get(above)
        if held is None:
            self._children[above] = node
            return
        if not isinstance(held, Siblings):
            first, held = held, Siblings(self.nodes)
            held.add(first)
            self._children[above] = held
        held.add(node)

    def partial(self, above: Above, tokens: bytes) -> Iterator[tuple[NodeId, int, int]]:
        """Yield children of ``above`` that begin like ``tokens``, those that share most first.

        Each is ``(node, shared, usable)``. Fewer tokens are usable than shared if the block has
        extras among them, which tokens alone do not identify.
        """
        held = self._children.get(above) if self._children is not None else None
        if held is None:
            return
        if isinstance(held, Siblings):
            found = held.nearest(tokens)
        else:
            common = common_tokens(self.nodes.tokens[held], tokens)
            found = iter([(held, common)] if common else [])
        for node, shared in found:
            extra = self.extras.get(node)
            yield node, shared, min(shared, extra[0][0]) if extra else shared

    # ---- additions and removals

    def add(
        self,
        above: Above,
        keys: Sequence[BlockKey],
        slots: Sequence[DeviceSlot],
        tokens: Sequence[bytes],
    ) -> list[NodeId]:
        """Add unknown blocks that are on the device; return their nodes.

        The first is a child of ``above``, and each other one a child of the block before it.
        ``tokens`` is as long as ``keys``, or empty if tokens are not kept.
        """
        nodes = self.nodes
        if len(keys) == 1:  # as while decoding; the loops below would take twice as long
            node = self._enter(above, keys[0], tokens[0] if tokens else b"")
            self.place(node, slots[0])
            return [node]
        made = nodes.take(len(keys))
        self._node.update(zip(keys, made, strict=True))
        scatter(nodes.key, made, keys)
        scatter(nodes.slot, made, slots)
        scatter(self.node_at, slots, made)
        if tokens:
            scatter(nodes.tokens, made, tokens)
        if isinstance(above, bytes):
            fill(nodes.parent, made, NOWHERE)
            if self._children is not None:
                self._follow([above, *keys[:-1]], made)
        elif made:
            scatter(nodes.parent, made, [above, *made[:-1]])
            nodes.kids[above] += 1
            fill(nodes.kids, made[:-1], 1)
            if self._children is not None:
                self._adopt(above, made[0])
                self._children.update(pairwise(made))
        return made

    def _follow(self, keys: Sequence[BlockKey], nodes: Sequence[NodeId]) -> None:
        """List each node under the key before it; the nodes have no parents."""
        assert self._children is not None
        self._before.update(zip(nodes, keys, strict=True))
        if self._children.keys().isdisjoint(keys):
            self._children.update(zip(keys, nodes, strict=True))
        else:
            for key, node in zip(keys, nodes, strict=True):
                self._adopt(key, node)

    def know(self, above: Above, key: BlockKey, tokens: bytes) -> NodeId:
        """Add an unknown block that only a tier holds."""
        node = self._enter(above, key, tokens)
        self.colder.add(node)
        return node

    def _enter(self, above: Above, key: BlockKey, tokens: bytes) -> NodeId:
        """Add an unknown block that is in no slot yet."""
        [node] = self.nodes.take(1)
        self._node[key] = node
        self.nodes.key[node] = key
        self.nodes.slot[node] = NO_SLOT
        self.nodes.parent[node] = NOWHERE if isinstance(above, bytes) else above
        self.nodes.tokens[node] = tokens
        if self._children is not None:
            if isinstance(above, bytes):
                self._before[node] = above
            self._adopt(above, node)
        return node

    def place(self, node: NodeId, slot: DeviceSlot) -> None:
        """Put a known block, which was not on the device, into ``slot``."""
        assert self.nodes.slot[node] == NO_SLOT
        self.nodes.slot[node] = slot
        self.node_at[slot] = node
        self.nodes.kids[self.nodes.parent[node]] += 1

    def replace(self, node: NodeId, slot: DeviceSlot) -> None:
        """Move a block on the device to another slot; the old slot holds no known block then."""
        self.node_at[self.nodes.slot[node]] = NO_NODE
        self.nodes.slot[node] = slot
        self.node_at[slot] = node

    def displace(self, node: NodeId) -> DeviceSlot:
        """Remove a block from the device; return its slot. Its parent's count does not change."""
        slot = self.nodes.slot[node]
        assert self.node_at[slot] == node
        self.nodes.slot[node] = NO_SLOT
        self.node_at[slot] = NO_NODE
        return slot

    def evict(self, nodes: Sequence[NodeId]) -> tuple[list[BlockKey], list[DeviceSlot]]:
        """Forget blocks that are only on the device, with all their followers among them.

        Return their keys and slots, in the given order. Their parents' counts do not change.
        """
        slots = gather(self.nodes.slot, nodes)
        fill(self.node_at, slots, NO_NODE)
        return self.drop(nodes), slots

    def drop(self, nodes: Sequence[NodeId]) -> list[BlockKey]:
        """Forget blocks, with all their followers among them; return their keys in this order."""
        rows, children = self.nodes, self._children
        keys = cast("list[BlockKey]", gather(rows.key, nodes))
        forget(self._node, keys)
        if children is not None:
            for above, count in forget_single(children, self._above_each(nodes)).items():
                held = children[above]
                assert isinstance(held, Siblings)
                if not held.drop(count):  # their rows are freed below, before the next query
                    del children[above]
            if not self.chained:
                forget(self._before, nodes)
        if self.colder:
            self.colder.difference_update(nodes)
        if self.extras or self.origin or self.salts:
            for node in nodes:
                self.salts.pop(node, None)
                self.extras.pop(node, None)
                self.origin.pop(node, None)
        rows.give(nodes)
        return keys

    # ---- for people and tests

    def families(self) -> Iterator[tuple[BlockKey | None, Root, list[NodeId]]]:
        """Yield ``(parent, root, siblings)`` of all known blocks, parents before their children."""
        if not self.chained:
            for node, (parent, root) in self.origin.items():
                yield parent, root, [node]
            return
        children = self._families()
        ahead = [(node, self._root_of[node]) for node in self._roots.values()]
        while ahead:
            above, root = ahead.pop()
            held = children.get(above)
            if held is not None:
                siblings = _nodes(held)
                parent = None if above in self._root_of else self.nodes.key[above]
                yield parent, root, siblings
                ahead.extend((node, root) for node in siblings)

    def check(self) -> None:
        """Assert that keys, slots, parents and children agree; O(n), for tests."""
        rows = self.nodes
        known = set(self._node.values())
        assert len(known) == len(self._node)
        for key, node in self._node.items():
            assert rows.key[node] == key
            slot = rows.slot[node]
            assert slot != NO_SLOT or node in self.colder, (
                "a known block is neither in a slot nor in a tier"
            )
            assert slot == NO_SLOT or self.node_at[slot] == node
            above = rows.parent[node]
            assert (above in known or above in self._root_of) == self.chained
        for place, node in enumerate(self.node_at):
            assert node == NO_NODE or (node in known and rows.slot[node] == place)
        assert self.colder <= known
        assert self.extras.keys() | self.origin.keys() | self.salts.keys() <= known
        for key, node in self._roots.items():
            assert rows.key[node] == key == self._root_of[node].key
        taken = known | self._root_of.keys() | {NOWHERE}
        assert taken.isdisjoint(rows.free)
        assert len(taken) + len(rows.free) == len(rows)
        if self._children is not None:
            listed: dict[Above, list[NodeId]] = {}
            ordered = sorted(known, key=lambda node: label(rows, node))
            for node, listed_under in zip(ordered, self._above_each(ordered), strict=True):
                listed.setdefault(listed_under, []).append(node)
            assert self.chained or self._before.keys() == known
            assert {above: _nodes(held) for above, held in self._children.items()} == listed
            held = [held for held in self._children.values() if isinstance(held, Siblings)]
            assert all(some.alive == len(some.nodes()) for some in held)
