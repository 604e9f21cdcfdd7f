"""Codecs, which change a block's bytes between a level and its tier."""

from kvladder.tiers.codecs.base import Codec as Codec
from kvladder.tiers.codecs.base import Stage as Stage
from kvladder.tiers.codecs.base import Subject as Subject
