"""Copy the first tokens of a block, and nothing else."""

from __future__ import annotations

from typing import Any, Protocol


class Store(Protocol):
    """KV of all blocks of a layer: what numpy and torch arrays have in common.

    The first dimension counts slots, one of the others the tokens of a block.
    """

    @property
    def shape(self) -> Any:
        """Sizes of its dimensions."""
        ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


def copy_tokens(store: Store, *, source: int, target: int, tokens: int, axis: int) -> None:
    """Copy the KV of the first ``tokens`` tokens from slot ``source`` to slot ``target``.

    Parameters
    ----------
    store:
        The array that is changed in place, of any element type.
    tokens:
        0 to the tokens of a block.
    axis:
        The dimension that counts tokens, 1 or more.

    Raises
    ------
    ValueError
        ``axis`` or ``tokens`` is out of its range; nothing was changed.
    """
    dimensions = len(store.shape)
    if not 1 <= axis < dimensions:
        raise ValueError(f"axis {axis}: expected 1 .. {dimensions - 1}")
    if not 0 <= tokens <= store.shape[axis]:
        raise ValueError(f"{tokens} tokens: expected 0 .. {store.shape[axis]}")
    before = (slice(None),) * (axis - 1)
    within = slice(0, tokens)
    store[(target, *before, within)] = store[(source, *before, within)]
