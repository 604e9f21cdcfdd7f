"""The conformance suite for handlers: the rules for every handler, as tests to inherit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from math import prod
from typing import Any

import pytest

from kvladder.errors import PlanError, needed

with needed("torch"):
    import torch

from kvladder.device.cache import DeviceCache
from kvladder.device.memory import PlanMemory
from kvladder.device.opening import open_device
from kvladder.gpu.sizing.base import ITEM_BYTES, ResourceHandler
from kvladder.gpu.sizing.groups import Layer
from kvladder.gpu.sizing.plan import CachePlan

MakeHandler = Callable[[str], ResourceHandler]
STACK = {
    "gpu": {"memory": "16 MiB"},
    "arena": {"size": "64 MiB"},
    "tiers": [{"type": "host"}],
}
BLOCK, CONTEXT = 16, 64


class HandlerTests:
    """Conformance tests. Inherit, name the class ``Test...`` and define a fixture ``make``::

        class TestMine(HandlerTests):
            @pytest.fixture
            def make(self):
                return lambda name: MyState(name, heads=2, dtype="float32")

    ``make`` returns a function from a name to a handler. A block of the handler should take less
    than 1 MiB.
    """

    @pytest.fixture
    def make(self) -> MakeHandler:
        """Return a function that makes a handler of a given name; must be overridden."""
        raise NotImplementedError("give the class a fixture `make` that returns a function")

    @pytest.fixture
    def beside(self) -> Sequence[ResourceHandler]:
        """Return the other handlers of each plan; override it if yours needs different ones."""
        return [Layer("beside", 1, 16, "float32")]

    @pytest.fixture
    def layer(self) -> Any:
        """Return a layer of a Hugging Face cache, after one token, that the handler collects from.

        None if the handler collects nothing.
        """
        return None

    def plan(self, *handlers: ResourceHandler) -> CachePlan:
        """Return a plan of these handlers."""
        tokens = {"block_tokens": BLOCK, "max_tokens": CONTEXT, "checkpoint_tokens": BLOCK}
        return CachePlan(handlers, **tokens)

    # ---- declarations

    def test_is_what_it_was_made(self, make: MakeHandler) -> None:
        one: Any = make("one")
        assert (one.name, one.kind in {"paged", "state", "alone"}) == ("one", True)
        assert (one, hash(one)) == (make("one"), hash(make("one")))
        assert one != make("other")
        with pytest.raises((FrozenInstanceError, AttributeError)):
            one.name = "other"

    def test_its_bytes_are_those_of_its_elements(self, make: MakeHandler) -> None:
        one = make("one")
        for tokens in (1, BLOCK, CONTEXT):
            shape = one.shape_of(tokens)
            assert shape
            assert min(shape) > 0
            assert one.size_bytes(tokens) == prod(shape) * ITEM_BYTES[one.dtype]
        if one.kind == "paged":
            assert one.size_bytes(CONTEXT) == CONTEXT * one.size_bytes(1)
        elif one.kind == "state":
            assert one.shape_of(CONTEXT) == one.shape_of(1)

    def test_those_of_another_type_are_of_another_family(self, make: MakeHandler) -> None:
        one: Any = make("one")
        assert one.family() == make("other").family()
        dtype = "float16" if one.dtype != "float16" else "float32"
        assert replace(one, dtype=dtype).family() != one.family()

    def test_collects_what_it_knows_and_nothing_else(self, make: MakeHandler, layer: Any) -> None:
        kind = type(make("one"))
        assert list(kind.collect(3, object())) == []
        if layer is not None:
            found = [one for one in kind.collect(3, layer) if isinstance(one, kind)]
            assert found
            assert all(one.name.startswith("3.") for one in found)
            assert [one.name for one in found] != [one.name for one in kind.collect(4, layer)]

    # ---- in a plan

    def test_two_alike_are_managed_together(
        self, make: MakeHandler, beside: Sequence[ResourceHandler]
    ) -> None:
        plan = self.plan(*beside, make("one"), make("other")).check().group()
        together = [pool for pool in plan.pools if {"one", "other"} & {p.name for p in pool.places}]
        apart = {one.name for one in plan.alone}
        assert len(together) == (0 if make("one").kind == "alone" else 1)
        assert apart == ({"one", "other"} if make("one").kind == "alone" else set())
        assert str(plan).count("one") > 0

    def test_another_of_its_name_is_refused(
        self, make: MakeHandler, beside: Sequence[ResourceHandler]
    ) -> None:
        with pytest.raises(PlanError, match="two resources are named 'one'"):
            self.plan(*beside, make("one"), make("one")).check()

    def test_its_memory_is_its_own(
        self, make: MakeHandler, beside: Sequence[ResourceHandler]
    ) -> None:
        plan = self.plan(*beside, make("one"), make("other")).check().group().size(16 << 20)
        memory = PlanMemory(plan)
        views = views_of(memory)
        for number, view in enumerate(views.values(), 1):
            view.view(torch.uint8).fill_(number)
        for number, (name, view) in enumerate(views.items(), 1):
            assert bool((view.view(torch.uint8) == number).all()), f"{name} was overwritten"
        memory.move("cpu")
        for number, view in enumerate(views_of(memory).values(), 1):
            assert bool((view.view(torch.uint8) == number).all())
        before = [len(view) for view in views.values()]
        memory.resize(4 << 20)
        assert [len(view) for view in views_of(memory).values()] <= before

    def test_its_bytes_come_back_from_tiers(
        self, make: MakeHandler, beside: Sequence[ResourceHandler]
    ) -> None:
        plan = self.plan(*beside, make("one"))
        with open_device(STACK, plan, fields={"model": "handlers"}) as cache:
            if plan.no_reuse:
                pytest.skip(f"nothing is reused: {plan.no_reuse}")
            prompt = list(range(2 * BLOCK + 1))
            request = begun(cache, prompt)
            assert request.cached == 0
            written = {
                (group, block): at
                for at, (group, block) in enumerate(
                    (group, block) for group in range(len(plan.pools)) for block in (0, 1)
                )
            }
            for (group, block), number in written.items():
                for view in cache.tensors[group].values():
                    view.view(torch.uint8)[request.tables[group][block]].fill_(number + 1)
            cache.requests.commit(request, BLOCK)
            cache.requests.commit(request, 2 * BLOCK)
            cache.requests.release(request)
            for pool in cache.pools:
                pool.evict(pool.cached)
            settle(cache)
            for held in cache.tensors:
                for view in held.values():
                    view.view(torch.uint8).zero_()
            again = begun(cache, prompt)
            assert again.cached == 2 * BLOCK
            for (group, block), number in written.items():
                slot = again.tables[group][block]
                for view in cache.tensors[group].values() if slot >= 0 else ():
                    assert bool((view.view(torch.uint8)[slot] == number + 1).all())
            cache.requests.release(again)


def views_of(memory: PlanMemory) -> dict[str, torch.Tensor]:
    """Return every tensor in a plan's memory, by name."""
    found = {name: view for held in memory.tensors for name, view in held.items()}
    return found | {one.name: memory.apart(one.name) for one in memory.plan.alone}


def begun(cache: DeviceCache, prompt: Sequence[int]) -> Any:
    """Begin a request, wait until its blocks have arrived, and return it."""
    request = cache.requests.begin(prompt)
    while request.arriving:
        cache.wait(0.1)
        cache.poll()
    cache.requests.copied(request)
    return request


def settle(cache: DeviceCache) -> None:
    """Wait until no copy or transfer is in flight."""
    while cache.port.busy or not cache.manager.idle():
        cache.wait(0.01)
        cache.poll()
