"""The lock of a cache: reentrant, and background threads let others go first."""

from __future__ import annotations

import threading

from kvladder.lock import StackLock, holding
from tests.patience import until


def test_the_lock_is_reentrant_for_one_thread() -> None:
    lock = StackLock()
    seen: list[bool] = []
    with lock:
        with lock:
            assert lock.held()
            assert holding()
        other = threading.Thread(target=lambda: seen.extend([lock.held(), holding()]))
        other.start()
        other.join()
        assert lock.held()
    assert not lock.held()
    assert not holding()
    assert seen == [False, False]


def test_a_background_holder_yields_the_lock_to_a_waiting_thread() -> None:
    lock, order = StackLock(), list[str]()
    held = threading.Event()

    def background() -> None:
        lock.be_patient()
        with lock:
            held.set()
            until(lambda: lock.wanted)
            with lock:  # again, although another waits: it is its own
                order.append("background")
        for _ in range(3):
            with lock:
                order.append("background again")

    def engine() -> None:
        held.wait()
        with lock:
            order.append("engine")

    threads = [threading.Thread(target=work) for work in (background, engine)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["background", "engine", *["background again"] * 3]


def test_a_later_thread_goes_before_background_ones() -> None:
    lock, order = StackLock(), list[str]()
    asked = threading.Event()

    def background() -> None:
        lock.be_patient()
        asked.set()
        with lock:
            order.append("background")

    def engine() -> None:
        with lock:
            order.append("engine")

    with lock:
        patient = threading.Thread(target=background)
        patient.start()
        asked.wait()
        other = threading.Thread(target=engine)
        other.start()
        until(lambda: lock.wanted)
    patient.join()
    other.join()
    assert order == ["engine", "background"]


def test_the_lock_admits_one_thread_at_a_time() -> None:
    lock, inside, most = StackLock(), list[int](), list[int]()

    def work(*, patient: bool) -> None:
        if patient:
            lock.be_patient()
        for _ in range(2000):
            with lock, lock:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, kwargs={"patient": n % 2 == 0}) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 8000
    assert not lock.wanted
