"""A played ``torch.cuda`` and driver, below the real ``CudaDevice``, for tests without a GPU.

``rules.py`` has its rules, each with the page of the documentation that states it. ``machine.py``
has time, streams, events and threads; ``memory.py`` what is allocated and registered; ``runs.py``
what copies and kernels do to bytes. Above these are torch's tensors (``tensors.py``),
``torch.cuda`` (``runtime.py``) and the driver's library (``driver.py``). ``device.py`` joins them.
"""

from tests.kit.played.device import Played as Played
from tests.kit.played.device import PlayedDevice as PlayedDevice
from tests.kit.played.machine import Machine as Machine
from tests.kit.played.machine import Operation as Operation
from tests.kit.played.memory import GARBAGE as GARBAGE
from tests.kit.played.rules import Rule as Rule
from tests.kit.played.rules import Violation as Violation
from tests.kit.played.tensors import plain as plain
