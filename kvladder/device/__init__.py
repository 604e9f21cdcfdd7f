"""Block pools over tiers, for engines that bring no pool of their own."""

from kvladder.errors import needed

with needed("torch"):
    from kvladder.device.cache import DeviceCache as DeviceCache
    from kvladder.device.memory import PlanMemory as PlanMemory
    from kvladder.device.opening import open_device as open_device
    from kvladder.device.preempt import Suspended as Suspended
