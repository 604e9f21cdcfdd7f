"""Settings of the live shadow, and prices."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvladder.errors import ConfigError
from kvladder.policy.prices import Prices
from kvladder.schema import Settings

Price = Annotated[float, msgspec.Meta(ge=0, lt=1e18, description="a number, 0 or more")]
TokenRate = Annotated[float, msgspec.Meta(gt=0, lt=1e18, description="a number above 0")]


class PricesConfig(Settings, frozen=True, kw_only=True):
    """Prices in one currency, with the names of ``kvladder plan --prices``."""

    memory: Price | None = None
    """Price of a GiB of memory for a month."""
    disk: Price | None = None
    """Price of a GiB of disk for a month."""
    gpu: Price | None = None
    """Price of an hour of the device that computes prompts."""

    @property
    def given(self) -> Prices:
        """The prices as the shadow takes them."""
        return Prices(self.memory, self.disk, self.gpu)


class ShadowConfig(Settings, frozen=True, kw_only=True):
    """Measuring of what each level brings at other sizes. ``shadow: true`` is short for it."""

    enabled: bool = False
    """True if it is measured, with a sample of the blocks."""
    prices: PricesConfig = PricesConfig()
    prefill: TokenRate | None = None
    """Prompt tokens that the engine computes per second; by default as the engine reports."""

    def __post_init__(self) -> None:
        if not self.enabled and (self.prices != PricesConfig() or self.prefill is not None):
            hint = "set shadow.enabled: true, or leave the others out"
            raise ConfigError("false", path="enabled", hint=hint)
