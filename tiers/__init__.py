"""Tiers and the ladder of levels above them; exports all names that an author of a tier needs."""

from kvladder.errors import ConfigError as ConfigError
from kvladder.errors import PermissionDenied as PermissionDenied
from kvladder.errors import TierError as TierError
from kvladder.errors import TierFull as TierFull
from kvladder.errors import Unavailable as Unavailable
from kvladder.tiers.base import Tier as Tier
from kvladder.tiers.context import TierContext as TierContext
from kvladder.tiers.label import LABEL_BYTES as LABEL_BYTES
from kvladder.tiers.label import Facts as Facts
from kvladder.tiers.label import Read as Read
from kvladder.tiers.label import RecoveredBlock as RecoveredBlock
from kvladder.tiers.label import Ref as Ref
from kvladder.tiers.label import Write as Write
from kvladder.tiers.label import told as told
from kvladder.tiers.type import TierType as TierType

Kept = RecoveredBlock
"""The name of ``RecoveredBlock`` until version 0.2."""
