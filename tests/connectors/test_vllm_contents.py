"""Images in prompts name the blocks from the first block that holds one."""

from __future__ import annotations

import gc
import importlib.util
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvladder.connectors.vllm.groups import VllmGroup, VllmGroups
from kvladder.connectors.vllm.identity import contents as vllm_contents
from kvladder.connectors.vllm.identity.contents import Contents, contents_of
from kvladder.connectors.vllm.requests.state import RequestState
from kvladder.keys import BlockKey

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

TOKENS = 4
KEYS = [BlockKey(bytes([number]) * 32) for number in range(6)]


class Item(UserDict[str, Any]):
    """Like vLLM's MultiModalKwargsItem."""


def image(number: float, **more: Any) -> Item:
    parts = {"pixel_values": torch.full((3, 2, 2), number), **more}
    return Item({name: SimpleNamespace(data=data) for name, data in parts.items()})


def request(*features: tuple[int, str, Any]) -> Any:
    """A prompt with items at offsets, under identifiers."""
    return SimpleNamespace(
        mm_features=[
            SimpleNamespace(mm_position=SimpleNamespace(offset=at), identifier=name, data=data)
            for at, name, data in features
        ]
    )


def names(contents: Contents, *features: tuple[int, str, Any], start: int = 0) -> list[BlockKey]:
    items = contents.of(request(*features))
    assert items is not None
    return items.bind(KEYS[start:], start, TOKENS)


def test_blocks_before_the_first_item_are_named_by_vllm_alone() -> None:
    assert Contents().of(SimpleNamespace()) is None
    assert Contents().of(request()) is None
    for at, first in ((0, 0), (3, 0), (4, 1), (11, 2)):
        found = names(Contents(), (at, "a", image(1)))
        assert [one == key for one, key in zip(found, KEYS, strict=True)] == [
            block < first for block in range(len(KEYS))
        ]
        for start in range(len(KEYS)):
            assert names(Contents(), (at, "a", image(1)), start=start) == found[start:]


def test_names_follow_the_content_and_are_the_same_in_every_process() -> None:
    one = names(Contents(), (5, "a", image(1)))
    assert names(Contents(), (5, "a", image(1))) == one
    others = [
        names(Contents(), (5, "a", image(2))),
        names(Contents(), (5, "a", image(1, grid=torch.tensor([1, 2])))),
        names(Contents(), (5, "a", image(1, grid=[1, 2]))),
        names(Contents(), (5, "a", image(1).data | {"x": SimpleNamespace(data=1)})),
        names(Contents(), (5, "a", image(1)), (9, "b", image(2))),
        names(Contents(), (5, "a", image(2)), (9, "b", image(1))),
        names(Contents(algorithm="sha256"), (5, "a", image(1))),
    ]
    assert len({tuple(found) for found in [one, *others]}) == len(others) + 1
    assert names(Contents(), (9, "b", image(2)), (5, "a", image(1))) == others[4]
    assert others[4][:2] == one[:2]  # the second item begins in the third block


@pytest.mark.parametrize(
    "data",
    [
        None,
        Item(address=SimpleNamespace(data=1), monotonic_id=SimpleNamespace(data=2)),
        image(1, on_a_device=torch.zeros(2, device="meta")),
        image(1, unknown=object()),
    ],
)
def test_an_unreadable_item_is_named_for_this_process_only(data: Any) -> None:
    here, there = Contents(), Contents()
    assert names(here, (5, "a", data)) == names(here, (5, "a", data))
    assert names(here, (5, "a", data))[0] == KEYS[0]
    assert names(here, (5, "a", data))[1:] != names(there, (5, "a", data))[1:]


def test_items_encoded_elsewhere_are_named_for_this_process_only() -> None:
    encoded = SimpleNamespace(ec_transfer_config=object())
    assert names(contents_of(encoded), (0, "a", image(1))) != names(
        contents_of(encoded), (0, "a", image(1))
    )
    settings = SimpleNamespace(multimodal_config=SimpleNamespace(mm_hasher_algorithm="sha256"))
    plain = SimpleNamespace(model_config=settings, ec_transfer_config=None)
    found = names(contents_of(plain), (0, "a", image(1)))
    assert found == names(Contents(algorithm="sha256"), (0, "a", image(1)))


def test_an_identifier_used_for_two_items_does_not_name_their_content() -> None:
    contents, elsewhere = Contents(), Contents()
    first = contents.of(request((0, "photo.png", image(1))))
    assert first is not None
    right = first.bind(KEYS, 0, TOKENS)
    second = names(contents, (0, "photo.png", image(2)))
    assert second != names(elsewhere, (0, "photo.png", image(2)))
    assert first.bind(KEYS, 0, TOKENS) != right, "vLLM may have encoded the other one for it"
    assert names(contents, (0, "photo.png", image(1))) == second, "it says so for good"
    assert names(contents, (0, "other.png", image(1))) == right
    twice = names(Contents(), (0, "a", image(1)), (8, "a", image(2)))
    assert twice != names(Contents(), (0, "a", image(1)), (8, "a", image(2)))
    unseen = Contents()
    names(unseen, (0, "photo.png", None))
    assert names(unseen, (0, "photo.png", image(1))) != right


@pytest.mark.slow
def test_an_item_is_digested_once_and_forgotten_with_its_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, digest = 0, vllm_contents._digest

    def counted(item: Any, algorithm: Any) -> bytes:
        nonlocal count
        count += 1
        return digest(item, algorithm)

    monkeypatch.setattr(vllm_contents, "_digest", counted)
    contents, item = Contents(), image(1)
    for _ in range(3):
        names(contents, (0, "a", item))
    assert count == 1
    assert len(contents._items) == 1
    del item
    gc.collect()
    assert not contents._items
    monkeypatch.setattr(vllm_contents, "IDENTIFIERS_MAX", 3)
    for number in range(9):
        names(contents, (0, f"i{number}", image(number)))
    assert len(contents._known) == 3


def test_a_requests_blocks_are_named_by_its_items_in_every_group() -> None:
    groups = VllmGroups(
        [VllmGroup(0, "full", TOKENS, 1), VllmGroup(1, "window", 2 * TOKENS, 2, 8, mark=7)]
    )
    asked = request((TOKENS, "a", image(1)))
    asked.block_hashes = [*KEYS]
    plain = RequestState(asked, groups)
    state = RequestState(asked, groups, items=Contents().of(asked))
    for group, changed in zip(groups, (1, 0), strict=True):
        count = len(KEYS) // group.hashes
        both = zip(state.keys(group, 0, count), plain.keys(group, 0, count), strict=True)
        assert [one == other for one, other in both] == [n < changed for n in range(count)]
        assert state.keys(group, 0, count)[1:] == state.keys(group, 1, count)
