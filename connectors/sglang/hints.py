"""Hints and sessions of SGLang's requests, seen from its tree on the scheduler's thread.

SGLang 0.5.23 carries ``kv_hints`` to its requests, and acts on nothing in them. Its sessions have
ids, by which hints name the pages of a session's last finished request.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from importlib import import_module
from typing import Any, Final

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvladder.connectors.sglang.served import PromptReport
from kvladder.connectors.sglang.storage import KVLadderStorage
from kvladder.hints import HintExecutor
from kvladder.hints.requests import RequestHints, begin
from kvladder.keys import BlockKey

logger = logging.getLogger("kvladder.sglang")

STREAMER: Final = "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer"
"""SGLang's class of answers."""
STATE: Final = "kvladder_state"
"""Name of the attribute of a request of SGLang's that has its state here."""


@dataclass(slots=True)
class RequestNotes:
    """The hints and the session of one request."""

    hints: RequestHints | None
    session: str | None
    old: set[BlockKey] = field(default_factory=set[BlockKey])
    """Those pages of the session's request that were held before it came."""
    report: PromptReport | None = None
    """What became of its prompt, if it has hints."""
    page_tokens: int = 0

    def answer(self, request: Any) -> str:
        """Return what became of its prompt and of its hints, as JSON."""
        results = [] if self.hints is None else self.hints.results
        told = {} if self.report is None else self.report.told(request, self.page_tokens)
        return json.dumps({**told, "hints": [result._asdict() for result in results]})


class TreeHints:
    """Acts on what the requests of one tree say. The rank that owns the stack acts for all."""

    def __init__(self, *, is_bigram: bool) -> None:
        self._is_bigram = is_bigram
        self._known: KVLadderStorage | None = None
        """The storage whose executor can name blocks of tokens."""

    def meet(self, storage: KVLadderStorage) -> None:
        """Let hints name tokens, from the first call with a storage on."""
        if storage is self._known:
            return
        self._known = storage
        if storage.manager is not None:
            HintExecutor.of(storage.manager).name_blocks = partial(self._named, storage)

    def arrived(self, storage: KVLadderStorage, request: Any, key: Any) -> None:
        """Do what a request's hints ask at its start; ``key`` has the tokens of its prompt."""
        manager = storage.manager
        sent: object = getattr(request, "kv_hints", None)
        session: str | None = getattr(request, "session_id", None)
        if manager is None or (sent is None and session is None):
            return
        hints = None
        if sent is not None:
            executor = HintExecutor.of(manager)
            hints = begin(executor, sent, salt=request.cache_salt or "", ranks_saves=False)
        notes = RequestNotes(hints, session, page_tokens=storage.page)
        setattr(request, STATE, notes)
        (run, *_) = self._runs(storage, key)
        if hints is not None:
            notes.report = PromptReport(run)
            storage.watched.watch(notes.report)
        if session is not None:
            held = manager.holding(run)
            notes.old = {key for key, is_held in zip(run, held, strict=True) if is_held}

    def finished(self, storage: KVLadderStorage, request: Any, up_to: int) -> None:
        """Do what waits for the request's end, and record its pages in its session."""
        manager, notes = storage.manager, notes_of(request)
        if manager is None or (notes is None and not len(manager.sessions)):
            return
        tokens = request.full_untruncated_fill_ids[:up_to]
        key = RadixKey(
            tokens, request.extra_key, is_bigram=self._is_bigram, cache_salt=request.cache_salt
        )
        runs, salt = self._runs(storage, key), request.cache_salt or ""
        session = None if notes is None else notes.session
        for run in runs:
            manager.sessions.met(session, run)
        if notes is None:
            return
        if notes.report is not None:
            storage.watched.end(notes.report)
        if notes.hints is not None:
            notes.hints.finish(HintExecutor.of(manager), runs, salt)
        if session is not None:
            manager.sessions.begin_again(session)
            manager.sessions.brought(session, [one for one in runs[0] if one not in notes.old])
            manager.sessions.use(session, runs, salt)

    def released(self, storage: KVLadderStorage, session: str) -> None:
        """End a session: the pages that it alone used are the next to be evicted."""
        manager = storage.manager
        if manager is not None:
            with suppress(ValueError):  # none of its requests has finished
                manager.end_session(session)

    def _named(
        self, storage: KVLadderStorage, tokens: Sequence[int], salt: str
    ) -> list[list[BlockKey]]:
        """Return the names of a prompt's pages by pool, without an adapter."""
        key = RadixKey(array("q", tokens), None, is_bigram=self._is_bigram, cache_salt=salt or None)
        return self._runs(storage, key)

    @staticmethod
    def _runs(storage: KVLadderStorage, key: Any) -> list[list[BlockKey]]:
        whole = len(key) // storage.page
        digests = get_storage_hash_str(key, None, storage.page) if whole else []
        return storage.runs(digests[:whole])  # SGLang names the rest of a prompt, too


def notes_of(request: Any) -> RequestNotes | None:
    """Return what is noted of a request; None if it has no hints and no session."""
    found: RequestNotes | None = getattr(request, STATE, None)
    return found


def begin_answers() -> None:
    """Let SGLang's answers have the outcomes of hints; warn if this version has other answers."""
    module, _, name = STREAMER.partition(":")
    try:
        streamer: Any = getattr(import_module(module), name)
        told = streamer.get_cached_tokens_details
    except (ImportError, AttributeError):
        what = "so the outcomes of hints are only in kvladder's counters"
        logger.warning("this version of SGLang has no %s.get_cached_tokens_details, %s", name, what)
        return
    if not hasattr(told, "__wrapped__"):
        tell_in_answers(streamer)


def tell_in_answers(streamer: Any) -> None:
    """Have SGLang's class of answers add kvladder's part to ``cached_tokens_details``."""
    details = streamer.get_cached_tokens_details

    @wraps(details)
    def detailed(self: Any, request: Any) -> Any:
        found, notes = details(self, request), notes_of(request)
        if notes is None or notes.hints is None:
            return found
        return {**(found or {"device": 0, "host": 0}), "kvladder": notes.answer(request)}

    streamer.get_cached_tokens_details = detailed
