"""Replays traces on the real levels and policies in virtual time, and plans sizes of tiers."""
