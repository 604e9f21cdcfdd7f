"""The played machine keeps its rules: each is shown by a test that names it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvladder.arena import Arena, Slot
from kvladder.gpu.copy.cuda import CudaDevice
from kvladder.gpu.copy.device import CopyRuns
from tests.kit.played import Operation, Played, PlayedDevice, Rule, Violation, plain, rules
from tests.kit.played.driver import (
    ALREADY_REGISTERED,
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_REGISTERED,
)
from tests.kit.played.machine import CALL_S
from tests.kit.played.memory import ALIAS

CUDA = torch.device("cuda", 1)
SHOWN: set[str] = set()


def shows(*named: Rule) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Note which rules a test shows."""

    def note(test: Callable[..., None]) -> Callable[..., None]:
        SHOWN.update(rule.text for rule in named)
        return test

    return note


@pytest.fixture
def device() -> PlayedDevice:
    return PlayedDevice(small=1 << 20)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(4, 4096)
    yield arena
    arena.close()


def work(seconds: float, end: Callable[[], None] = lambda: None) -> Operation:
    return Operation(seconds, lambda: None, end)


def runs(*ends: tuple[int, int, int], steady: bool = True) -> CopyRuns:
    """Return runs of target, source and bytes."""
    columns = [np.array(column, np.uint64) for column in zip(*ends, strict=True)]
    return CopyRuns(columns[0], columns[1], columns[2], steady)


def kv(device: PlayedDevice, size: int = 64) -> Any:
    """Return device memory with numbers."""
    return device.own(torch.arange(size, dtype=torch.uint8))


@shows(rules.STREAMS, rules.EVENTS)
def test_only_events_order_streams(device: PlayedDevice) -> None:
    order: list[str] = []
    one, two = device.new_stream(), device.new_stream()
    device.after(two, device.played.runtime.Event())  # never recorded: delays nothing
    device.told(one, work(0.2, lambda: order.append("one")))
    first = device.mark(one)
    device.told(two, work(0.1, lambda: order.append("beside")))
    device.after(two, first)
    device.told(one, work(0.5, lambda: order.append("later")))
    with device.played:
        one.record_event(first)  # captures more, for later waits alone
    device.told(two, work(0.1, lambda: order.append("after")))
    device.settle()
    assert order == ["beside", "one", "after", "later"]


@shows(rules.TIMING)
def test_only_reached_events_with_timing_have_a_time(device: PlayedDevice) -> None:
    stream = device.new_stream()
    begun = device.mark(stream)
    device.told(stream, work(0.25))
    ended = device.mark(stream)
    with pytest.raises(RuntimeError, match="not reached"):
        device.seconds(begun, ended)
    device.settle()
    assert device.seconds(begun, ended) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="has no time"):
        device.seconds(begun, device.mark())


@shows(rules.TORN)
def test_a_target_is_garbage_until_its_copy_has_ended(device: PlayedDevice, arena: Arena) -> None:
    source, stream = kv(device), device.new_stream()
    device.bind()
    device.register(arena.address, arena.size_bytes)
    device.copy(stream, runs((arena.address, source.data_ptr(), 64), steady=False))
    device.run_on(5e-5)
    held = bytes(arena.view(Slot(0))[:64])
    assert held[:32] == bytes(range(32))
    assert held[32:] == b"\xee" * 32
    device.settle()
    assert bytes(arena.view(Slot(0))[:64]) == bytes(range(64))


@shows(rules.BATCH)
def test_copies_of_a_batch_must_not_meet(device: PlayedDevice, arena: Arena) -> None:
    source, stream = kv(device), device.new_stream()
    device.register(arena.address, arena.size_bytes)
    at = source.data_ptr()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.copy(stream, runs((arena.address, at, 32), (arena.address + 31, at + 32, 32)))
    assert [found.rule for found in device.machine.violations] == [rules.BATCH]


@shows(rules.SOURCES)
@pytest.mark.parametrize("steady", [True, False])
def test_a_source_in_any_order_is_read_before_its_turn(
    steady: bool, device: PlayedDevice, arena: Arena
) -> None:
    target, stream = kv(device), device.new_stream()
    device.register(arena.address, arena.size_bytes)
    device.told(stream, work(0.1, lambda: arena.view(Slot(0)).__setitem__(slice(64), b"n" * 64)))
    device.copy(stream, runs((target.data_ptr(), arena.address, 64), steady=steady))
    device.settle()
    assert bytes(plain(target).numpy()) == (bytes(32) if steady else b"n" * 32) + b"n" * 32


@shows(rules.ATTRIBUTES)
@pytest.mark.parametrize(("order", "first"), [(0, 0), (1, 1)])
def test_a_batch_needs_attributes_for_all_copies(
    order: int, first: int, device: PlayedDevice, arena: Arena
) -> None:
    numbers = [np.array([value], np.uint64) for value in (arena.address, arena.address + 64, 8)]
    attributes, at = ctypes.c_uint64(order), ctypes.c_size_t(first)
    failed = ctypes.c_size_t(9)
    error = device.played.driver.batch(
        *(array.ctypes.data for array in numbers),
        1,
        ctypes.addressof(attributes),
        ctypes.addressof(at),
        1,
        ctypes.addressof(failed),
        device.new_stream().cuda_stream,
    )
    assert error == INVALID_VALUE


@shows(rules.ENGINES)
def test_copies_of_one_direction_take_turns(device: PlayedDevice, arena: Arena) -> None:
    there = kv(device, 256)
    other = kv(device)
    device.register(arena.address, arena.size_bytes)
    streams = [device.new_stream(urgent=urgent) for urgent in (False, True, True)]
    ended: list[list[Any]] = [[], [], []]
    for number, stream in enumerate(streams[:2]):
        for at in (128 * number, 128 * number + 64):
            device.copy(stream, runs((arena.address + at, there.data_ptr() + at, 64)))
            ended[number].append(device.mark(stream))
    device.copy(streams[2], runs((other.data_ptr(), arena.address + 4096, 64)))
    ended[2].append(device.mark(streams[2]))
    device.settle()
    one = ended[0][0].at_s
    assert one >= CALL_S
    times = [event.at_s for events in ended for event in events]
    assert times == pytest.approx([one, 3 * one, 2 * one, 4 * one, one])


@shows(rules.PAGEABLE)
def test_a_copy_of_pageable_memory_waits_for_the_stream(device: PlayedDevice, arena: Arena) -> None:
    source, stream = kv(device), device.new_stream()
    device.told(stream, work(0.3))
    device.copy(stream, runs((arena.address, source.data_ptr(), 64)))
    [(why, seconds)] = device.host_waits
    assert why == "memory that is not registered"
    assert seconds > 0.3


def moved(device: PlayedDevice, *ends: tuple[int, int, int]) -> None:
    """Move runs by the kernel."""
    device.machine.background(iter(()))
    device.prepare()
    assert device.move(device.new_stream(), runs(*ends))
    device.settle()


@shows(rules.KERNEL_HOST)
def test_a_kernel_reaches_registered_memory_alone(device: PlayedDevice, arena: Arena) -> None:
    source = kv(device)
    device.register(arena.address, 4096)
    moved(device, (arena.address, source.data_ptr(), 64))
    assert bytes(arena.view(Slot(0))[:64]) == bytes(range(64))
    with pytest.raises(Violation, match="not registered"):
        moved(device, (arena.address + 4096, source.data_ptr(), 64))


@shows(rules.HOST_POINTER)
def test_a_host_pointer_is_not_always_the_device_s(device: PlayedDevice, arena: Arena) -> None:
    device.played.memory.same_pointers = False  # after CudaDevice has asked
    source, stream = kv(device), device.new_stream()
    device.register(arena.address, arena.size_bytes)
    driver, found = device.played.driver, ctypes.c_void_p()
    assert not driver.cuDeviceGetAttribute(ctypes.byref(ctypes.c_int()), 91, 1)
    assert not driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), arena.address, 0)
    assert found.value == arena.address + ALIAS
    assert not driver.cuMemcpyAsync(arena.address, source.data_ptr(), 64, stream.cuda_stream)
    moved(device, (arena.address + ALIAS + 64, source.data_ptr(), 64))
    assert bytes(arena.view(Slot(0))[:128]) == bytes(range(64)) * 2
    device.copy(stream, runs((arena.address, source.data_ptr(), 64)))
    with pytest.raises(Violation, match="a host's pointer"):
        device.settle()


@shows(rules.REGISTER, rules.UNREGISTER, rules.ONE_RANGE)
def test_registrations_are_exact(device: PlayedDevice, arena: Arena) -> None:
    driver, stream, source = device.played.driver, device.new_stream(), kv(device)
    assert not driver.cuMemHostRegister_v2(arena.address, 4096, 3)
    assert not driver.cuMemHostRegister_v2(arena.address + 4096, 4096, 3)
    assert driver.cuMemHostRegister_v2(arena.address, 8192, 3) == ALREADY_REGISTERED
    assert driver.cuMemHostUnregister(arena.address + 64) == NOT_REGISTERED
    across = (arena.address + 4096 - 32, source.data_ptr(), 64)
    with pytest.raises(RuntimeError, match="invalid argument"):
        device.copy(stream, runs(across))
    device.copy(stream, runs((arena.address, source.data_ptr(), 64)))
    assert not driver.cuMemHostUnregister(arena.address)
    with pytest.raises(Violation, match="was unregistered"):
        device.settle()


def test_a_machine_limits_what_may_be_registered(arena: Arena) -> None:
    for played in (Played(register_max=4096), Played(registered_max=4096)):
        device = PlayedDevice(played)
        assert device.register(arena.address, 4096) == ""
        assert device.register(arena.address + 4096, 8192) == "out of memory (2)"
    refusing = PlayedDevice(Played(registers=False))
    assert refusing.register(arena.address, 4096) == "operation not supported (801)"


@shows(rules.CONTEXT, rules.SELECTED, rules.PRIMARY)
def test_a_new_thread_has_device_0_and_no_context(device: PlayedDevice, arena: Arena) -> None:
    said: list[Any] = []

    def steps() -> Iterator[None]:
        driver = device.played.driver
        said.append(driver.cuMemHostRegister_v2(arena.address, 4096, 3))
        with device.played:
            said.append(torch.cuda.current_device())
            torch.zeros(2).pin_memory()
        said.append(set(device.machine.contexts))
        yield

    device.background(steps())()
    assert said == [INVALID_CONTEXT, 0, {0, 1}]
    with pytest.raises(AssertionError, match="a context on another device"):
        device.played.check()


@shows(rules.PEER)
def test_a_kernel_does_not_reach_another_device(device: PlayedDevice) -> None:
    with device.played:
        other = torch.zeros(8, device="cuda:0")
        other.view(torch.uint8)[:8].add_(kv(device, 8))
    with pytest.raises(Violation, match="elsewhere"):
        device.settle()


@shows(rules.STICKY)
def test_after_an_assertion_all_calls_fail(device: PlayedDevice) -> None:
    with device.played:
        ids = torch.tensor([99]).pin_memory()
        kv(device).index_select(0, ids.to(CUDA))
        with pytest.raises(Violation, match="device-side assertion"):
            device.settle()
        for call in (device.mark, device.new_stream, lambda: torch.zeros(2, device=CUDA)):
            with pytest.raises(RuntimeError, match="device-side assertion"):
                call()


@shows(rules.ALIGNED)
def test_a_kernel_s_accesses_are_aligned(device: PlayedDevice, arena: Arena) -> None:
    device.register(arena.address, arena.size_bytes)
    device.prepare()
    stream, source = device.new_stream(), kv(device)
    with device.played, torch.cuda.stream(stream):
        ends = [arena.address + 4, source.data_ptr(), 8]
        table = torch.tensor(ends).view(3, 1).pin_memory()
        device.played.driver.mover()(table, 8)
    with pytest.raises(Violation, match="aligned"):
        device.settle()


@shows(rules.LAST_ERROR)
def test_the_next_kernel_raises_the_error_of_an_earlier_call(device: PlayedDevice) -> None:
    device.machine.pending = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        device.told(None, work(0.1))
    device.told(None, work(0.1))


@shows(rules.ALLOCATOR)
@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_another_s_in_the_order_of_its_stream(
    recorded: bool, device: PlayedDevice
) -> None:
    stream = device.new_stream()
    with device.played:
        made = torch.zeros(64, dtype=torch.uint8, device=CUDA)
        device.settle()
        device.told(stream, work(0.1))
        with torch.cuda.stream(stream):
            made.add_(1)
        if recorded:
            made.record_stream(stream)
        address = made.data_ptr()
        del made
        if recorded:
            device.settle()
            again = torch.empty(64, dtype=torch.uint8, device=CUDA)
            assert again.data_ptr() == address
        else:
            with pytest.raises(Violation, match="was freed"):
                device.settle()


@shows(rules.FREED_HOST)
def test_freed_host_memory_is_another_s_at_once(device: PlayedDevice) -> None:
    with device.played:
        ids = torch.arange(8).pin_memory()
        assert ids.is_pinned()
        device.told(None, work(0.1))
        there = ids.to(CUDA, non_blocking=True)
        assert device.host_waits == []
        del ids
        with pytest.raises(Violation, match="was freed"):
            device.settle()
        assert there.device == CUDA


def test_torch_may_keep_host_memory_for_its_own_copies() -> None:
    device = PlayedDevice(keeps_host=True)
    with device.played:
        ids = torch.arange(8).pin_memory()
        device.told(None, work(0.1))
        there = ids.to(CUDA, non_blocking=True)
        del ids
        assert there.tolist() == [*range(8)]
    device.played.check()


@shows(rules.UNMAPPED)
def test_unmapped_memory_is_not_touched(device: PlayedDevice) -> None:
    memory = kv(device)
    memory.zero_()
    device.played.memory.unmap(memory)
    with pytest.raises(Violation, match="unmapped"):
        device.settle()


def test_tensors_of_a_device_are_computed_in_stream_order(device: PlayedDevice) -> None:
    with device.played:
        one = torch.zeros(4, 3, dtype=torch.int64, device=CUDA)
        one[1] = 7
        two = one[:, 1:].clone()
        one.fill_(9)
        assert (one.device, one.is_cuda, two.shape) == (CUDA, True, (4, 2))
        with pytest.raises(TypeError, match="can't convert"):
            one.numpy()
        assert device.time_s == 0.0
        assert two.cpu().tolist() == [[0, 0], [7, 7], [0, 0], [0, 0]]
        assert device.time_s > 0.0
        assert one.tolist() == [[9] * 3] * 4


def test_torch_is_its_own_outside() -> None:
    made, cuda = torch.empty, torch.cuda.Stream
    with Played():
        assert torch.empty is not made
    assert torch.empty is made
    assert torch.cuda.Stream is cuda
    assert "pin_memory" not in vars(torch.Tensor)
    with pytest.raises(OSError, match=r"libcuda\.so"):
        CudaDevice(CUDA)


def test_each_rule_is_shown_and_names_its_source() -> None:
    named = [rule for rule in vars(rules).values() if isinstance(rule, Rule)]
    assert {rule.text for rule in named} == SHOWN
    assert all(rule.source for rule in named)
