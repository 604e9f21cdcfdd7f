"""Hints and sessions of SGLang's requests, from the tree to the levels."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connectors import sglang_stub
from tests.connectors.sglang_controller import PAGE, Controller, Pool, Sparse, config, rows
from tests.connectors.sglang_stub import RadixKey, Streamer, get_storage_hash_str
from tests.patience import until

sglang_stub.install()
from kvladder.connectors.sglang.hints import notes_of, tell_in_answers  # noqa: E402
from kvladder.connectors.sglang.storage import KVLadderStorage  # noqa: E402
from kvladder.connectors.sglang.tree import KVLadderRadixCache  # noqa: E402
from kvladder.hints import HintExecutor  # noqa: E402
from kvladder.keys import BlockKey  # noqa: E402
from kvladder.testing.engines.hinted import hint_envelope  # noqa: E402

pytestmark = pytest.mark.slow
STACK = {
    "backend_name": "kvladder", "module_path": "m", "class_name": "c", "interface_v1": 1,
    "model": {"fingerprint": "w"}, "arena": {"size": "8 MiB"},
    "limits": {"pin": "60 s"},
    "tiers": [
        {"type": "host"},
        {"name": "nvme", "type": "memory", "capacity": "8 MiB"},
        {"name": "kept", "type": "memory", "capacity": "8 MiB", "when": "commit",
         "min_priority": 90},
    ],
}  # fmt: skip
PAGES = 6


class Engine:
    """A tree over a storage, and requests that finish at once."""

    def __init__(self) -> None:
        sglang_stub.give("m")
        self.storage = KVLadderStorage(config(STACK), {})
        self.storage.register_mem_pool_host(Pool())
        self.storage.register_mem_host_pool_v2(Sparse(), "indexer")
        self.storage.on_host_pools_registered()
        self.controller = Controller(self.storage)
        self.tree: Any = KVLadderRadixCache(self.controller)
        manager = self.storage.manager
        assert manager is not None
        self.manager = manager
        self._rid = 0

    def serve(
        self, first: int, *actions: dict[str, Any], salt: str | None = None, **more: Any
    ) -> list[tuple[str, str]]:
        """Serve a request of ``PAGES`` pages; return the outcomes of its hints."""
        answer = self.answer(first, *actions, salt=salt, **more)
        if answer is None:
            return []
        return [(one["outcome"], one["why"]) for one in json.loads(answer["kvladder"])["hints"]]

    def answer(
        self,
        first: int,
        *actions: dict[str, Any],
        salt: str | None = None,
        pages: int = PAGES,
        own: int | None = None,
        **more: Any,
    ) -> dict[str, Any] | None:
        """Serve a request; return the details in its answer.

        SGLang has ``own`` pages of it and asks for those behind them; None if it asks for none.
        """
        self._rid += 1
        tokens = array("q", range(first, first + pages * PAGE))
        key = RadixKey(tokens, cache_salt=salt)
        request = SimpleNamespace(
            rid=self._rid,
            keys=get_storage_hash_str(key, None, PAGE),
            cache_salt=salt,
            extra_key=None,
            finished=lambda: True,
            full_untruncated_fill_ids=tokens,
            kv_hints=self.envelope(*actions) if actions else None,
            priority=None,
            session_id=None,
        )
        vars(request).update(more)
        for _ in range(2):  # SGLang asks again when it admits a request
            self.tree.match_prefix(SimpleNamespace(key=key, req=request))
        if own is not None:
            came = self.controller.prefetch(request.keys[own:], rows(own, pages - own))
            request.cached_tokens_device, request.cached_tokens_host = 0, own * PAGE
            request.cached_tokens_storage = came * PAGE
        self.tree.checkpoint_into_tree(request, up_to=len(tokens))
        self.tree.write_backup_storage(request.rid)
        until(self.manager.idle)
        details: dict[str, Any] | None = Streamer().get_cached_tokens_details(request)
        return details

    def envelope(self, *actions: dict[str, Any]) -> dict[str, Any]:
        return hint_envelope(*actions, message=f"{self._rid}")

    def names(self, first: int, salt: str | None = None) -> list[BlockKey]:
        tokens = array("q", range(first, first + PAGES * PAGE))
        digests = get_storage_hash_str(RadixKey(tokens, cache_salt=salt), None, PAGE)
        return self.storage.runs(digests)[0]

    def meta(self, first: int) -> set[tuple[int, bool]]:
        """Return the priorities of a prompt's pages, and whether they have an end."""
        with self.manager._stack.lock:
            metas = [self.manager._stack.meta(name) for name in self.names(first)]
        return {(meta.priority, meta.until_s < 1e18) for meta in metas if meta is not None}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Streamer, "get_cached_tokens_details", Streamer.get_cached_tokens_details)
    tell_in_answers(Streamer)
    made = Engine()
    yield made
    made.controller.detach()


def test_a_pinned_request_keeps_its_pages_for_a_time(engine: Engine) -> None:
    assert engine.serve(0, {"do": "pin", "ttl_s": 600}) == [("clipped", "priority 100 for 60 s")]
    until(lambda: engine.meta(0) == {(100, True)})
    assert engine.manager.stats()["kept"]["blocks"] == PAGES, "the level for pinned pages has them"


def test_pages_that_are_held_already_are_ranked_too(engine: Engine) -> None:
    assert engine.serve(0) == []
    assert engine.meta(0) == {(35, False)}
    assert engine.serve(0, {"do": "retain", "priority": 70, "ttl_s": 9}) == [("accepted", "")]
    until(lambda: engine.meta(0) == {(70, True)})


def test_a_request_demotes_itself_and_another_brings_it_up(engine: Engine) -> None:
    (found,) = engine.serve(0, {"do": "demote", "to": "nvme"})
    assert found[0] == "deferred"
    names = engine.names(0)
    until(lambda: engine.manager.lookup(names).host == 0 and engine.manager.idle())
    tokens = [*range(PAGES * PAGE)]
    assert engine.serve(5000, {"do": "prefetch", "tokens": tokens}) == [("accepted", "")]
    until(lambda: engine.manager.lookup(names).host == PAGES)
    named = {"tokens": tokens, "salt": "another's"}
    ((outcome, why),) = engine.serve(6000, {"do": "prefetch", **named})
    assert (outcome, "salt" in why) == ("rejected", True)


def test_tokens_are_named_before_the_first_request_has_hints(engine: Engine) -> None:
    engine.serve(0, salt="tenant")
    told = engine.envelope({"do": "demote", "to": "out", "tokens": [*range(96)], "salt": "tenant"})
    (found,) = HintExecutor.of(engine.manager).apply(told)
    assert (found.outcome, found.blocks) == ("accepted", PAGES)
    assert engine.manager.lookup(engine.names(0, "tenant")).total == 0


def test_a_session_is_named_and_its_release_gives_up_what_it_alone_used(engine: Engine) -> None:
    engine.serve(7000)
    engine.serve(0, session_id="chat")
    engine.serve(7000, session_id="chat2")
    retain = {"do": "retain", "priority": 50, "ttl_s": 9, "session": "chat"}
    assert engine.serve(9000, retain) == [("accepted", "")]
    assert engine.meta(0) == {(50, True)}
    engine.tree.release_session("chat2")
    assert engine.meta(7000) == {(35, False)}, "these were there before the session"
    engine.tree.release_radix_session("chat")
    assert engine.meta(0) == set(), "every level has a threshold, so they have left"
    ((outcome, _),) = engine.serve(9000, {"do": "demote", "session": "chat"})
    assert outcome == "missing"
    engine.serve(0, session_id="chat")  # SGLang lets its name be used again
    assert engine.serve(9000, retain) == [("accepted", "")]
    engine.manager.sessions.check()


def test_a_page_that_another_request_has_used_outlasts_the_session(engine: Engine) -> None:
    engine.serve(0, session_id="chat")
    engine.serve(0)
    engine.tree.release_session("chat")
    assert engine.meta(0) == {(35, False)}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"message_id": 3}, "not an envelope"),
        ({"do": "fly"}, "unknown action"),
        ({"do": "pin"}, "missing required field `ttl_s`"),
        ({"do": "demote", "to": "attic"}, "'attic'"),
    ],
)
def test_wrong_hints_have_an_outcome(engine: Engine, sent: Any, expected: str) -> None:
    if "do" in sent:
        ((outcome, why),) = engine.serve(0, sent)
    else:
        ((outcome, why),) = engine.serve(0, kv_hints=sent)
    assert (outcome, expected in why) == ("rejected", True)
    assert engine.meta(0) == {(35, False)}


def test_an_answer_says_which_levels_served_a_prompt_and_why_the_rest_misses(
    engine: Engine,
) -> None:
    """An envelope without actions asks for that."""
    assert engine.serve(0, {"do": "demote", "to": "nvme"})[0][0] == "deferred"
    until(lambda: engine.manager.lookup(engine.names(0)).host == 0 and engine.manager.idle())

    def report(own: int, pages: int, first: int = 0) -> dict[str, Any]:
        details = engine.answer(first, own=own, pages=pages, kv_hints=hint_envelope(message="r"))
        assert details is not None
        told: dict[str, Any] = json.loads(details["kvladder"])
        assert told.pop("hints") == []
        assert told.pop("waited_s") > 0
        return told

    whole = {"asked_tokens": PAGES * PAGE, "engine_tokens": PAGE, "missed": []}
    served = {"served_tokens": (PAGES - 1) * PAGE, "served_from": {"nvme": (PAGES - 1) * PAGE}}
    assert report(1, PAGES) == whole | served
    missed = [{"reason": "never_seen", "level": None, "tokens": 3 * PAGE}]
    longer = {"asked_tokens": (PAGES + 3) * PAGE, "engine_tokens": 0, "missed": missed}
    served = {"served_tokens": PAGES * PAGE, "served_from": {"host": PAGES * PAGE}}
    assert report(0, PAGES + 3) == longer | served
    missed = [{"reason": "never_seen", "level": None, "tokens": 2 * PAGE}]
    none = {"asked_tokens": 2 * PAGE, "engine_tokens": 0, "served_tokens": 0, "served_from": {}}
    assert report(0, 2, first=9000) == none | {"missed": missed}


def test_requests_without_hints_are_not_noted(engine: Engine) -> None:
    request = SimpleNamespace(kv_hints=None, session_id=None)
    engine.tree.match_prefix(SimpleNamespace(key=RadixKey(array("q", range(64))), req=request))
    assert notes_of(request) is None
    assert Streamer().get_cached_tokens_details(request) is None
