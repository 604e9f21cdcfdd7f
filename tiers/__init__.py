"""Tiers, and the ladder of levels that they stand on; what an author of a tier needs."""

from kvladder.tiers.base import NO_PLACE as NO_PLACE
from kvladder.tiers.base import NO_SLOT as NO_SLOT
from kvladder.tiers.base import Item as Item
from kvladder.tiers.base import Progress as Progress
from kvladder.tiers.base import Tier as Tier
from kvladder.tiers.base import TierContext as TierContext
