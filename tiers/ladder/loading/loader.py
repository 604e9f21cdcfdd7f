"""Loads: joins the parts that bring blocks up from colder levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvladder.keys import BlockKey
from kvladder.policy.fetch_cost import FetchCostModel, Pace
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.grow import FetchGrower
from kvladder.tiers.ladder.loading.misses import MissExplainer
from kvladder.tiers.ladder.loading.plan import Planner
from kvladder.tiers.ladder.loading.probe import Prober
from kvladder.tiers.ladder.loading.reads import BlockReader
from kvladder.tiers.ladder.loading.tasks import LoadTasks
from kvladder.tiers.ladder.loading.waiting import RoomWaitQueue
from kvladder.tiers.ladder.saving import Saving


class Loader:
    """Fetches blocks into host slots; what the stack, the manager and fetches use of the parts.

    ``FetchGrower`` extends fetches, ``RoomWaitQueue`` keeps blocks that wait for slots, and
    ``BlockReader`` reads blocks and lands them. The grower calls the queue and the reader, the
    queue calls the reader, and the reader calls neither. This class only makes and joins them.

    The one lock is the stack's. Any thread calls ``fetch``, ``unpin`` and ``late``, which take it.
    It is held around ``count``, ``missed``, ``fetchable``, ``recall`` and ``check``. ``resume`` and
    ``aclose`` run on the loop thread without it.

    Parameters
    ----------
    post:
        Schedules a function on the loop thread.
    blocks_max:
        Most pending reads.
    landed:
        Is called when reads have ended, or blocks begin to wait for room.
    discard:
        Forgets blocks with bytes that turned out to be unusable.
    worth:
        Says whether loading is faster than computing.
    saving:
        Blocks that are being saved.
    """

    def __init__(
        self,
        host: HostLevel,
        levels: Sequence[Level],
        shared: Shared,
        *,
        post: Callable[..., object],
        blocks_max: int,
        landed: Callable[[], None],
        discard: Callable[[Sequence[BlockKey]], object],
        worth: FetchCostModel,
        saving: Saving,
    ) -> None:
        answers = Pace()
        self._tasks = tasks = LoadTasks(shared, host.stats, landed)
        self._reader = reader = BlockReader(
            host, levels, shared, tasks, blocks_max=blocks_max, landed=landed
        )
        self.arrivals = reader.arrivals
        """Pending reads by key; others may look at it with the lock held."""
        planner = Planner(worth, host, levels, shared, self.arrivals, answers)
        self.prober = Prober(levels, shared, planner.known, answers)
        self.misses = misses = MissExplainer(host, levels, shared, self.arrivals, saving)
        self._queue = RoomWaitQueue(
            host, levels, shared, planner, reader, misses, post=post, wake=landed
        )
        grower = FetchGrower(
            host,
            levels,
            shared,
            tasks,
            planner=planner,
            prober=self.prober,
            queue=self._queue,
            reader=reader,
            misses=misses,
            post=post,
            wake=landed,
        )
        # bound here, as a call more costs each fetch of a single block some per cent
        self.fetch = grower.fetch
        self.unpin = grower.unpin
        self.late = grower.late
        self.arrange = grower.arrange
        self.limit = reader.limit
        self.missed = misses.count
        self.count = grower.count
        self.fetchable = planner.fetchable
        self.discard = discard
        self.resume = self._queue.resume
        self.check = reader.check

    @property
    def crowded(self) -> bool:
        """True if blocks wait for slots."""
        return len(self._queue) > 0

    def recall(self, keys: Sequence[BlockKey], salt: bytes | None = None) -> None:
        """Throw away what arrives of removed blocks, only those of ``salt`` if one is given."""
        self.prober.recall(keys)
        self._reader.recall(keys, salt)

    async def aclose(self) -> None:
        """End every load; what has not arrived is a miss."""
        self._tasks.stop()  # first: nothing is queued or read from then on
        self._queue.close()
        await self._tasks.aclose()
        self._reader.close()
