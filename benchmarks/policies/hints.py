"""Session hints on a trace: which session each request is of, and when a session ends.

A trace does not name sessions. A request continues the session that used its deepest known block
last, if at least half of its blocks are known; else it begins a session. A session ends with its
last request, as an agent would say. Then the blocks that only it has used get priority 0, as by
``CacheManager.end_session``.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.policies.level import Level
from benchmarks.policies.peers import Outcome, work
from benchmarks.policies.traces import Prompt, Trace
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_MIN, EvictionPolicy
from kvladder.policy.sessions import Sessions


def sessions_of(prompts: Sequence[Prompt]) -> list[int]:
    """Return the number of the session of each prompt."""
    user: dict[int, int] = {}
    found: list[int] = []
    for prompt in prompts:
        known = next((at for at, block in enumerate(prompt) if block not in user), len(prompt))
        is_new = not known or 2 * known < len(prompt)
        session = len(found) if is_new else user[prompt[known - 1]]
        found.append(session)
        user.update(dict.fromkeys(prompt, session))
    return found


def served_with_hints(
    policy: EvictionPolicy, trace: Trace, size: int, keys: Sequence[BlockKey]
) -> Outcome:
    """Return what a level serves that is told the end of each session."""
    level, sessions, seen = Level(policy, size, keys), Sessions(), set[int]()
    named = sessions_of(trace.prompts)
    last = {session: number for number, session in enumerate(named)}
    number_of = {key: block for block, key in enumerate(keys)}
    hits, saved = 0, 0.0
    for number, (prompt, session) in enumerate(zip(trace.prompts, named, strict=True)):
        known = level.request(prompt, whole=False)
        hits += known
        saved += work(known)
        name, asked = str(session), [keys[block] for block in prompt]
        sessions.brought(name, [keys[block] for block in prompt if block not in seen])
        seen.update(prompt)
        sessions.use(name, [asked])
        if last[session] == number:
            _give_up(level, [number_of[key] for key in sessions.end(name)])
    return Outcome(hits, saved)


def _give_up(level: Level, blocks: Sequence[int]) -> None:
    """Lower the priority of these blocks, as an index does."""
    for block in blocks:
        handle = level.at.get(block)
        if handle is not None:
            level.policy.remove(handle)
            level.policy.push(handle, PRIORITY_MIN)
