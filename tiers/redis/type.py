"""The type of the Redis tier."""

from __future__ import annotations

from kvladder.tiers.type import TierType

TYPE = TierType(
    name="redis",
    make="kvladder.tiers.redis.tier:RedisTier",
    summary="Redis or Valkey servers that engines share: standalone, Sentinel, Cluster, TLS",
    survives="yes, as long as the server keeps it",
    docs="how-to/redis.md",
    extra="redis",
    libraries=("redis",),
)
