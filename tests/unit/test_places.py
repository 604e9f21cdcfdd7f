"""Places are given out once, withheld when the medium is full, and kept while they are read."""

from __future__ import annotations

from kvladder.tiers.ladder.records.places import FULL_RETRY_S, PlaceAllocator


def test_places_are_given_out_lowest_neighbours_first_and_never_twice() -> None:
    places = PlaceAllocator(4)
    assert places.take(3) == [0, 1, 2]
    assert places.take(3) == [3]
    assert places.take(1) == []
    places.give([2, 0])
    assert places.free == 2
    assert places.take(5) == [0, 2]
    places.check()


def test_a_place_that_is_read_is_free_only_after_the_last_read() -> None:
    places = PlaceAllocator(2)
    places.take(2)
    places.begin_reads([1])
    places.begin_reads([1])
    places.give([0, 1])
    assert places.take(2) == [0]
    places.end_reads([1])
    assert places.being_read(1)
    assert places.take(1) == []
    places.end_reads([1])
    assert places.take(1) == [1]
    places.check()


def test_a_read_of_a_wanted_place_frees_nothing() -> None:
    places = PlaceAllocator(1)
    places.take(1)
    places.begin_reads([0])
    places.end_reads([0])
    assert places.free == 0


def test_a_full_medium_limits_the_places_and_is_tried_again_later() -> None:
    places = PlaceAllocator(10)
    assert places.take(2) == [0, 1]
    failed = places.take(2)
    places.withhold(failed)
    assert places.limited
    assert places.free == 0
    places.give([0])
    assert places.take(3) == [0]
    places.check()
    places.unlimit()
    assert places.free == 8
    assert places.take(8) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert places.full([9], 100.0, all_free=False)
    places.retry(100.0 + FULL_RETRY_S - 0.1)
    assert places.limited
    places.retry(100.0 + FULL_RETRY_S)
    assert not places.limited
    assert not places.full([8], 200.0, all_free=False), "it was full not long ago"
    places.check()


def test_a_full_medium_limits_no_place_for_what_it_has() -> None:
    places = PlaceAllocator(6)
    places.take(3)
    places.full([2], 100.0, all_free=True)
    places.give([0])
    assert (places.free, places.untaken) == (1, 5)
    assert places.take_held(3) == [2, 3, 4]
    assert places.take(2) == [0], "room that the medium has is for new blocks"
    places.give([0])
    assert places.take_held(3) == [0, 5]
    places.check()
    places.unlimit()
    assert (places.free, places.untaken) == (0, 0)


def test_occupied_places_are_not_given_out() -> None:
    places = PlaceAllocator(5)
    places.occupy([3, 1])
    assert places.take(9) == [0, 2, 4]
    assert places.taken == 5
    places.check()
