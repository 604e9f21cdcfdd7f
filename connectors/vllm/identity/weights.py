"""The weights that a rank computes with, and the weights that block keys stand for."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvladder.connectors.vllm.identity.adapters import manager_of
from kvladder.connectors.vllm.identity.seen import Seen, Wanted
from kvladder.connectors.weights import digest
from kvladder.errors import ConfigError

if TYPE_CHECKING:  # importing it needs vLLM, and only types need it here
    from kvladder.connectors.vllm.step import Report, StepMetadata

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


PATIENCE: Final = 1000
"""Number of steps after which requests stop waiting for ranks that have not looked yet."""
STEPS_MAX: Final = 16
"""Number of remembered steps that ranks may not have begun yet; vLLM has two at most."""
OUTDATED_MAX: Final = 4
"""Number of remembered caches with other adapters' KV: vLLM's, and those of steps in flight."""


def combined(digests: Sequence[bytes]) -> bytes:
    """Return the digest of all ranks' weights."""
    return hashlib.sha256(b"kvladder weights of ranks 1" + b"".join(digests)).digest()


MODEL: Final = 0
"""The number of the model itself; the numbers of adapters begin with 1."""


class _Held:
    """The ranks' latest findings for the model, or for one adapter."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self.digests = list(digests)
        self.changes = [0] * len(self.digests)
        self.looked = [0] * len(self.digests)
        self.doubt = 0

    @property
    def digest(self) -> bytes:
        """The digest of all ranks, as of their last looks."""
        return combined(self.digests)

    @property
    def known(self) -> bool:
        """True if all ranks have it in memory, and have looked since the last doubt."""
        return min(self.looked) >= self.doubt and all(self.digests)

    def take(self, rank: int, seen: Seen) -> bool:
        """Record what a rank saw; return whether it has changed."""
        changed = seen.changes != self.changes[rank]
        self.looked[rank], self.changes[rank] = seen.doubt, seen.changes
        self.digests[rank] = seen.digest
        return changed


class _Name:
    """The adapters behind one name and path, which vLLM's own prefix cache uses for its hashes."""

    def __init__(self) -> None:
        self.digest: bytes | None = None
        """Digest of the adapter that the last request computed with; None if not known."""
        self.cache: object = self
        """vLLM's own prefix cache at the time of that request."""
        self._outdated: deque[object] = deque(maxlen=OUTDATED_MAX)
        """Caches that may have KV made by another adapter."""

    def outdate(self, cache: object) -> None:
        """Record that ``cache`` may have KV made by another adapter."""
        if not self.outdated(cache):
            self._outdated.append(cache)

    def outdated(self, cache: object) -> bool:
        """Return whether ``cache`` may have KV made by another adapter."""
        return any(cache is one for one in self._outdated)


class Weights:
    """The scheduler half's state of the ranks' weights, and of their LoRA adapters.

    The namespace is that of the weights at start. After a change, every key has a mark of the new
    weights; if the old weights return, so do the old keys. While there is a doubt, no key is used.
    The ranks then look at their memory before the forward pass of a step in which the engine is
    awake, and answer with the report. Each step tells each rank which of its changes are known. A
    rank that has seen another change copies nothing in that step.

    An adapter is known in the same way while all ranks have it in memory; see ``want``. Ranks look
    at their adapters in each step, before and after its forward pass. So a doubt about an adapter
    arises only if a request wants it read again.
    """

    def __init__(self, digests: Sequence[bytes]) -> None:
        self._model = _Held(digests)
        self._first = self.digest
        self._adapters: dict[int, _Held] = {}
        self._wanted: Any = None
        """The LoRARequest of an adapter that the ranks are to read in the next step."""
        self._names: dict[tuple[str, str], _Name] = {}
        self._named: dict[int, _Name] = {}
        """Name of the adapter that requests began with, by the adapter's number."""
        self._awake = False
        self._steps = 0
        self._unanswered = 0
        self._caches: deque[tuple[int, object]] = deque(maxlen=STEPS_MAX)
        """vLLM's own prefix cache in each of the last steps, with the step's number."""
        self._outdated: object = self

    @property
    def digest(self) -> bytes:
        """The digest of the weights of all ranks, as of their last looks."""
        return self._model.digest

    @property
    def mark(self) -> int:
        """The mark combined (XOR) with all keys; 0 for the weights at start."""
        digest = self.digest
        return 0 if digest == self._first else int.from_bytes(digest)

    @property
    def known(self) -> bool:
        """True if all ranks have looked since the last doubt."""
        return self._model.known

    @property
    def patient(self) -> bool:
        """True if requests should still wait until the weights are known."""
        return self._unanswered < PATIENCE

    def doubt(self) -> None:
        """Record that the weights may have changed, so that all ranks look again."""
        self._model.doubt += 1
        self._unanswered = 0

    def adapter(self, number: int) -> bytes | None:
        """Return the digest of an adapter on all ranks; None unless all have it in memory."""
        held = self._adapters.get(number)
        return held.digest if held is not None and held.known else None

    def doubt_adapter(self, number: int) -> None:
        """Require that ranks read an adapter again before it is known."""
        self._held(number).doubt += 1

    def want(self, lora: Any) -> None:
        """Ask the ranks to read an adapter in the next step, unless one is already asked for."""
        self._wanted = self._wanted or lora

    def begins(self, lora: Any, digest: bytes | None, cache: object) -> None:
        """Record that a request begins to compute with an adapter.

        ``digest`` is the adapter's digest, None if not known. ``cache`` is vLLM's own prefix cache,
        which stores the computed blocks under the adapter's name.
        """
        one = self._names.setdefault((lora.lora_name, lora.lora_path), _Name())
        self._named[int(lora.lora_int_id)] = one
        if digest is None or digest != one.digest:
            one.outdate(one.cache)
        one.digest, one.cache = digest, cache

    def _held(self, number: int) -> _Held:
        ranks = len(self._model.digests)
        return self._adapters.setdefault(number, _Held([b""] * ranks))

    def awake(self) -> None:
        """Record that the engine is awake: a request may run, so the weights are in memory."""
        self._awake = True

    def prepare(
        self, step: StepMetadata, *, runs: bool, cache: object, kept: Iterable[int] = ()
    ) -> None:
        """Set the fields of a step that concern weights and adapters.

        ``runs`` is True if the step has a forward pass. ``cache`` is vLLM's own prefix cache.
        ``kept`` has the numbers of the adapters of requests that have begun.
        """
        self._steps += 1
        step.turn, step.weights = self._steps, tuple(self._model.changes)
        for number in step.owners.values():
            step.adapters[number] = tuple(self._held(number).changes)
        if self._wanted is not None:
            lora, self._wanted = self._wanted, None
            doubt = self._held(int(lora.lora_int_id)).doubt
            step.wanted = Wanted(lora, doubt, frozenset(kept))
        if not self.known and (runs or self._awake):
            step.doubt = self._model.doubt
            self._unanswered += 1
        self._awake = False
        if runs or step.loads:
            self._caches.append((self._steps, cache))

    def report(self, report: Report) -> set[int]:
        """Record what the ranks saw; return the numbers of changed adapters, and MODEL if changed.

        If one rank's weights have changed, those of others may have, too. So all ranks look again,
        unless this report has news from all of them.
        """
        changed, was_known = set[int](), self.known
        for rank, seen in report.seen.items():
            if self._model.take(rank, seen):
                changed.add(MODEL)
                self._outdated = self._before(seen.step)
            for number, one in seen.adapters.items():
                if self._held(number).take(rank, one) and one.changes > 1:
                    changed.add(number)
                    self._rename(number, one.step)
        if MODEL in changed and was_known and len(report.seen) < len(self._model.changes):
            self.doubt()
        return changed

    def _rename(self, number: int, step: int) -> None:
        """Record that an adapter, and so what its name stands for, changed in a step."""
        named = self._named.get(number)
        if named is not None:
            named.digest = self.adapter(number)
            named.outdate(self._before(step))

    def _before(self, step: int) -> object:
        """Return vLLM's own prefix cache in the last remembered step before this one."""
        before = [cache for turn, cache in self._caches if turn < step]
        return before[-1] if before else self

    def outdated(self, cache: object, lora: Any = None, digest: bytes | None = None) -> bool:
        """Return whether vLLM's own prefix cache may have KV made by other weights.

        ``lora`` is the adapter of the request that would begin with this KV, and ``digest`` is the
        adapter's digest.
        """
        if cache is self._outdated or lora is None:
            return cache is self._outdated
        one = self._names.get((lora.lora_name, lora.lora_path))
        if one is None:
            return False
        other = digest is None or digest != one.digest
        return (other and cache is one.cache) or one.outdated(cache)
