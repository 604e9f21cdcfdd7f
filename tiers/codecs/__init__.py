"""What happens to a block's bytes at a level's edge: steps, their chain, and the shipped ones."""

from kvladder.tiers.codecs.base import Codec as Codec
from kvladder.tiers.codecs.base import Stage as Stage
from kvladder.tiers.codecs.base import Subject as Subject
