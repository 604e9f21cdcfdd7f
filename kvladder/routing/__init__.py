"""Who holds what: an index over the KV events of many engines, for routers.

``Index`` alone needs nothing but numpy; ``kvladder.routing.feed.Feed`` needs the extra ``events``.
"""

from kvladder.routing.index import HOT_TO_COLD as HOT_TO_COLD
from kvladder.routing.index import Index as Index
from kvladder.routing.index import Match as Match
