"""Detects changes of a model's weights in memory, as far as they leave a trace."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any, Final

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from kvladder.connectors.digests import model_digest

_PASSING: Final = "_non_persistent_buffers_set"


class Watched:
    """Watches the weights of a Hugging Face model, and keeps their digest; ``close`` ends it.

    It detects replaced parameters, buffers and modules, moved tensors, and writes in place. Two
    kinds of writes leave no trace: those to ``parameter.data``, and those to a tensor that was
    made in inference mode. Call ``doubt`` where one may have happened. If nothing changed, a look
    takes less than a microsecond per tensor.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._touched = False
        self._modules: set[int] = set()
        self._hooks: list[Any] = [
            register_module_parameter_registration_hook(self._registered),
            register_module_module_registration_hook(self._registered),
        ]
        self.changes = 0
        """Number of looks that found that the weights had, or may have, changed."""
        try:
            self.first = self.digest = self._read()
        except BaseException:
            self.close()
            raise

    @property
    def mark(self) -> str:
        """The digest of the weights at the last look; empty if they are the first ones."""
        return "" if self.digest == self.first else self.digest

    def look(self) -> bool:
        """Digest the weights again if they may have changed; return whether they may have."""
        if not self._may_have_changed():
            return False
        self._touched = True  # stays if reading them raises
        self.digest = self._read()
        self.changes += 1
        return True

    def doubt(self) -> None:
        """Make the next ``look`` digest the weights, even if it sees no change."""
        self._touched = True

    def _registered(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Mark the weights as touched if ``module`` is part of the model.

        PyTorch calls this whenever a parameter or module is registered in any module.
        """
        if id(module) in self._modules:
            self._touched = True

    def _read(self) -> str:
        """Record the tensors as they are now, and return their digest."""
        modules: list[torch.nn.Module] = [*self._model.modules()]
        self._modules = {id(one) for one in modules}
        self._places: list[tuple[Mapping[str, Any], str]] = []
        for module in modules:
            parameters: Mapping[str, Any] = module._parameters
            buffers: Mapping[str, Any] = module._buffers
            passing: set[str] = getattr(module, _PASSING)
            self._places += [(parameters, name) for name in parameters]
            self._places += [(buffers, name) for name in buffers if name not in passing]
        self._found: list[Any] = [held[name] for held, name in self._places]
        self._tensors: list[torch.Tensor] = [one for one in self._found if one is not None]
        self._counted = [one for one in self._tensors if not one.is_inference()]
        self._versions, self._addresses = self._count(), self._located()
        self._touched = False
        return model_digest(self._model)

    def _may_have_changed(self) -> bool:
        return (
            self._touched
            or self._count() != self._versions
            or not all(map(is_, [held.get(name) for held, name in self._places], self._found))
            or self._located() != self._addresses
        )

    def _count(self) -> int:
        return sum([one._version for one in self._counted])

    def _located(self) -> list[int]:
        return [one.data_ptr() for one in self._tensors]

    def close(self) -> None:
        """Stop watching. May be called again."""
        for hook in self._hooks:
            hook.remove()
