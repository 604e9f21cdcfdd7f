"""Block pools over tiers, for engines that bring no pool of their own."""

from kvladder.device.cache import DeviceGroup as DeviceGroup
from kvladder.device.cache import open_device as open_device
from kvladder.device.preempt import Suspended as Suspended
