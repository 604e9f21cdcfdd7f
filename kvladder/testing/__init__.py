"""The test kit for authors of connectors, tiers, codecs, policies and handlers.

It needs the extra ``testing``.

Its pytest plugin runs async tests on the simulated loop, see :mod:`kvladder.testing.plugin`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvladder.testing import _rewrite as _rewrite
from kvladder.testing.cancel import cancel_at as cancel_at
from kvladder.testing.codecs import CodecTests as CodecTests
from kvladder.testing.fakes import Delay as Delay
from kvladder.testing.fakes import Fail as Fail
from kvladder.testing.fakes import FakeStore as FakeStore
from kvladder.testing.fakes import FakeTier as FakeTier
from kvladder.testing.fakes import Full as Full
from kvladder.testing.fakes import Hang as Hang
from kvladder.testing.fakes import Hold as Hold
from kvladder.testing.fakes import ShortRead as ShortRead
from kvladder.testing.policies import PolicyTests as PolicyTests
from kvladder.testing.sim import Deadlock as Deadlock
from kvladder.testing.sim import InlineBlocking as InlineBlocking
from kvladder.testing.sim import Livelock as Livelock
from kvladder.testing.sim import SimClock as SimClock
from kvladder.testing.sim import SimLoop as SimLoop
from kvladder.testing.sim import inline_blocking as inline_blocking
from kvladder.testing.sim import sim_run as sim_run
from kvladder.testing.stacks import LevelSpec as LevelSpec
from kvladder.testing.stacks import SimCache as SimCache

if TYPE_CHECKING:
    from kvladder.testing.engines.engine import ConnectorEngine as ConnectorEngine
    from kvladder.testing.engines.engine import SampleEngine as SampleEngine
    from kvladder.testing.engines.hinted import HintedEngine as HintedEngine
    from kvladder.testing.engines.hinted import HintedSample as HintedSample
    from kvladder.testing.engines.hinted import Served as Served
    from kvladder.testing.engines.hints import HintTests as HintTests
    from kvladder.testing.engines.suite import ConnectorTests as ConnectorTests
    from kvladder.testing.handlers import HandlerTests as HandlerTests
    from kvladder.testing.tiers import TierTests as TierTests

_ROOMS = {
    "ConnectorEngine": "engines.engine",
    "ConnectorTests": "engines.suite",
    "HandlerTests": "handlers",
    "HintTests": "engines.hints",
    "HintedEngine": "engines.hinted",
    "HintedSample": "engines.hinted",
    "SampleEngine": "engines.engine",
    "Served": "engines.hinted",
    "TierTests": "tiers",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:  # imported on first use, since every pytest run imports this package
        return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
