"""Replays traces on the real levels and policies in virtual time, and plans sizes of tiers."""

from kvladder.replay.engine import ReplayResult as ReplayResult
from kvladder.replay.engine import ReplaySettings as ReplaySettings
from kvladder.replay.engine import replay as replay
