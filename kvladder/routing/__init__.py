"""For routers: an index of the blocks that many engines hold, kept by their KV events.

``Index`` alone needs no extra; ``kvladder.routing.feed.Feed`` needs the extra ``events``.
"""

from kvladder.routing.index import HOT_TO_COLD as HOT_TO_COLD
from kvladder.routing.index import Index as Index
from kvladder.routing.index import Match as Match
