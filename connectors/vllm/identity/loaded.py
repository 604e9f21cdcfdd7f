"""The weights that a rank computes with, as they are in its memory."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvladder.connectors.digests import digest
from kvladder.connectors.vllm.identity.adapters import manager_of
from kvladder.errors import ConfigError

Module = torch.nn.Module

PROBES: Final = 128
"""Maximum number of probe inputs, in each of two groupings, for a layer with hidden weights."""
_PASSING: Final = "_non_persistent_buffers_set"
LOAD: Final = "load_weights"
"""The method of vLLM's models that loads the tensors of a checkpoint."""
LORAS: Final = "lora_manager"
"""The attribute of vLLM's models that holds the adapters in memory."""
OFFLOADER: Final = "vllm.model_executor.offloader"


class Loaded:
    """The models of one rank that have layers with KV: the model, and one for drafts.

    vLLM shows a connector only layers, not models. The modules above the layers are found once,
    at start, among all modules of the process. ``close`` removes the hooks that watch them.

    Parameters
    ----------
    layers:
        vLLM's layers by name, including those with KV.

    Raises
    ------
    ConfigError
        No layer is a module, so the weights cannot be found.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._models = models_of(layers)
        managers = (manager_of(vars(one).get(LORAS)) for one in self._models.values())
        self.loras: Any = next((one for one in managers if one is not None), None)
        """vLLM's worker manager of LoRA adapters; None if the engine has none."""
        if not self._models:
            what = "the model that computes the KV is not found in this process"
            raise ConfigError(what, hint="use a version of vLLM that docs/how-to/vllm.md lists")
        self._modules = {id(one) for model in self._models.values() for one in model.modules()}
        self._touched = False
        self._parameters: list[torch.nn.Parameter] = []
        self._versions = 0
        self._registering = register_module_parameter_registration_hook(self._registered)
        for model in self._models.values():
            self._watch(model)

    def _registered(self, module: Module, name: str, parameter: Any) -> None:
        """Mark the weights as touched if ``module`` is part of a watched model.

        PyTorch calls this whenever a parameter is registered in any module.
        """
        if id(module) in self._modules:
            self._touched = True

    def _watch(self, model: Module) -> None:
        """Wrap the model's ``load_weights``, so that any call of it marks them as touched."""
        load: Any = getattr(model, LOAD, None)
        if load is None:
            return

        @wraps(load)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._touched = True
            return load(*args, **kwargs)

        setattr(model, LOAD, watched)

    def touched(self) -> bool:
        """Return whether a write to the weights was detected since ``fingerprint``.

        It detects tensors loaded into a model, replaced parameters, and changes in place. It does
        not detect writes to ``parameter.data``. Takes 60 ns per parameter.
        """
        return self._touched or self._count() != self._versions

    def _count(self) -> int:
        return sum([one._version for one in self._parameters])

    def fingerprint(self) -> bytes:
        """Return the digest of all parameters, and of the buffers that a checkpoint would have.

        Reads all of them, on the device where they lie or where the model computes.

        Raises
        ------
        RuntimeError
            The weights cannot be read, or are half loaded. They count as touched until a call
            succeeds.
        """
        self._touched = True
        self._parameters = [
            one
            for model in self._models.values()
            for one in model.parameters()
            if not one.is_inference()
        ]
        self._versions = self._count()
        stored = prefetched()
        state = hashlib.sha256(b"kvladder weights in memory 1")
        with torch.inference_mode():
            for where, model in self._models.items():
                device = device_of(model)
                for name, tensor in sorted(tensors_of(model, stored), key=lambda pair: pair[0]):
                    shape = tuple(tensor.shape)
                    state.update(f"{where} {name} {tensor.dtype} {shape}\n".encode())
                    if tensor.is_meta:
                        raise RuntimeError(f"{name} is not in memory: a reload has not ended")
                    state.update(digest(tensor, device))
        self._touched = False
        return state.digest()

    def close(self) -> None:
        """Release the models, and stop watching them. May be called again."""
        self._registering.remove()
        for model in self._models.values():
            vars(model).pop(LOAD, None)
        self._models, self._parameters = {}, []
        self._modules.clear()


def models_of(layers: Mapping[str, Any]) -> dict[str, Module]:
    """Return the outermost modules around these layers, each by the name of its first layer."""
    above: dict[int, list[Module]] = {}
    for one in gc.get_objects():
        if issubclass(type(one), Module):  # isinstance would run the code of proxy objects
            for part in one._modules.values():
                above.setdefault(id(part), []).append(one)
    found: dict[int, tuple[str, Module]] = {}
    for name in sorted(layers):
        if not isinstance(layers[name], Module):
            continue
        waiting, seen = [layers[name]], set[int]()
        while waiting:
            module = waiting.pop()
            parents = above.get(id(module), ())
            if not parents:
                found.setdefault(id(module), (name, module))
            waiting += [one for one in parents if id(one) not in seen]
            seen.update(id(one) for one in parents)
    return dict(found.values())


def device_of(model: Any) -> torch.device:
    """Return the device where a model computes, even if some of its weights lie in host memory."""
    devices = [one.device for one in model.parameters() if not one.is_meta]
    return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))


def prefetched() -> dict[int, torch.Tensor]:
    """Return the host copies of weights that vLLM prefetches layer by layer, by parameter id.

    The parameters themselves are device buffers that layers share, with the last layer's weights.

    Raises
    ------
    RuntimeError
        vLLM offloads weights, but this version does not tell where they are.
    """
    offloader: Any = sys.modules.get(OFFLOADER)  # vLLM imported it if it offloads anything
    try:
        layers = getattr(offloader.get_offloader(), "module_offloaders", []) if offloader else []
        kept = [one for layer in layers for one in layer._param_offloaders.values()]
        return {id(one._param): one._cpu_storage.detach() for one in kept}
    except AttributeError as error:
        what = f"this version of vLLM does not show where offloaded weights are: {error}"
        raise RuntimeError(what) from error


def tensors_of(
    model: Any, stored: Mapping[int, torch.Tensor] = MappingProxyType({})
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a model computes with, by name.

    The names are the same with and without layers for adapters. ``stored`` is what ``prefetched``
    returned.
    """
    device = device_of(model)
    modules: Iterator[tuple[str, Any]] = model.named_modules()
    for prefix, module in modules:
        where = prefix.replace(".base_layer", "")
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        passing: set[str] = getattr(module, _PASSING)  # they follow from the configuration
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        own = parameters | {name: one for name, one in buffers.items() if name not in passing}
        held = [
            part
            for name, one in own.items()
            for part in _parts(f"{where}.{name}", stored.get(id(one), one))
        ]
        yield from held
        if not any(one.numel() and one.dim() > 1 for _, one in held):
            yield from _answers(where, module, device)


def _parts(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that hold the bytes of a tensor; quantized and shared ones wrap several."""
    partitions: Mapping[Any, Any] | None = getattr(tensor, "partitions", None)
    if partitions is not None:
        for index, one in partitions.items():
            yield from _parts(f"{name}.{index}", one)
    elif is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor.data


def _answers(name: str, module: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a linear layer's outputs for probe inputs, which stand for its weights.

    Needed because vLLM on a CPU packs weights where they cannot be read. Each input sums the
    columns of one group. There are two groupings, so every weight counts in two sums. If a layer
    has at most ``PROBES`` inputs, the outputs are its weights.
    """
    apply = getattr(getattr(module, "quant_method", None), "apply", None)
    width = getattr(module, "input_size_per_partition", 0)
    dtype = getattr(module, "params_dtype", None)
    if apply is None or dtype is None or not width:
        return
    columns = torch.arange(width, device=device)
    rows = min(width, PROBES)
    for kind, group in (("apart", columns % rows), ("together", columns * rows // width)):
        inputs = torch.zeros(rows, width, dtype=dtype, device=device)
        inputs[group, columns] = 1
        yield f"{name} {kind}", apply(module, inputs, None)
