"""Whether weights changed while SGLang ran, which neither its hashes nor its storage hear of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, Protocol
from weakref import WeakSet

from kvladder.errors import ConfigError

logger = logging.getLogger("kvladder.sglang")

UPDATES: Final = (
    "begin_weight_update",
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""What changes weights, of SGLang's ``WeightUpdater``."""


class Keeper(Protocol):
    """Who has to know."""

    def weights_change(self) -> None:
        """Weights are about to change; on the scheduler's thread."""
        ...


class Watch:
    """Hears of changes in this process, from when it is first asked to tell somebody."""

    def __init__(self) -> None:
        self.changed = False
        """Whether the files that the model was started from say nothing of its weights now."""
        self._keepers: WeakSet[Any] = WeakSet()
        self._updaters: set[type] = set()

    def tell(self, keeper: Keeper, updater: type) -> None:
        """Tell ``keeper`` of each change from now on; ``updater`` is what makes them."""
        self._keepers.add(keeper)
        if updater in self._updaters:
            return
        self._updaters.add(updater)
        missing = [name for name in UPDATES if not hasattr(updater, name)]
        if missing:
            logger.warning(
                "this SGLang's weights are not changed by %s: detach the storage before you change"
                " them while it runs",
                ", ".join(missing),
            )
        for name in UPDATES:
            if hasattr(updater, name):
                setattr(updater, name, self._told_before(getattr(updater, name)))

    def _told_before(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(update)
        def telling(*args: Any, **kwargs: Any) -> Any:
            self.changed = True
            for keeper in list(self._keepers):
                keeper.weights_change()
            return update(*args, **kwargs)

        return telling

    def require_known(self, fingerprint: str) -> None:
        """Raise ConfigError if ``fingerprint`` would name weights that the engine has no more."""
        if self.changed and fingerprint == "auto":
            raise ConfigError(
                "weights were changed while the engine ran: their files do not name them",
                path="model.fingerprint",
                hint="set it to text of your own that changes whenever the weights do",
            )


watch = Watch()
"""Of this process."""
