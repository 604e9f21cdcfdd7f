"""The weights that a rank computes with, and which weights blocks are named after."""

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

if TYPE_CHECKING:  # which needs vLLM, and is asked for nothing else
    from kvladder.connectors.vllm.step import Report, StepMetadata

Module = torch.nn.Module

PROBES: Final = 128
"""How many inputs a layer whose weights cannot be seen is asked about, in each of two ways."""
_PASSING: Final = "_non_persistent_buffers_set"
LOAD: Final = "load_weights"
"""The method of vLLM's models that takes the tensors of a checkpoint."""
LORAS: Final = "lora_manager"
"""The attribute of vLLM's models that has the adapters in memory."""
OFFLOADER: Final = "vllm.model_executor.offloader"


class Loaded:
    """The models of one rank that have layers whose KV is kept: the model, and one for drafts.

    vLLM shows a connector no models, only layers; those above them are found once, at start, among
    all modules of the process. ``close`` undoes what watches them.

    Parameters
    ----------
    layers:
        vLLM's layers by name, those with KV among them.

    Raises
    ------
    ConfigError
        None of them is a module, so nothing can be known of the weights.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._models = models_of(layers)
        managers = (manager_of(vars(one).get(LORAS)) for one in self._models.values())
        self.loras: Any = next((one for one in managers if one is not None), None)
        """vLLM's worker manager of LoRA adapters; None without adapters."""
        if not self._models:
            what = "the model that computes the KV is not found in this process"
            raise ConfigError(what, hint="use a version of vLLM that docs/vllm.md names")
        self._modules = {id(one) for model in self._models.values() for one in model.modules()}
        self._touched = False
        self._parameters: list[torch.nn.Parameter] = []
        self._versions = 0
        self._registering = register_module_parameter_registration_hook(self._registered)
        for model in self._models.values():
            self._watch(model)

    def _registered(self, module: Module, name: str, parameter: Any) -> None:
        """PyTorch calls this whenever a module of the process is given a parameter."""
        if id(module) in self._modules:
            self._touched = True

    def _watch(self, model: Module) -> None:
        """Notice when this model is asked to load weights, by whomever."""
        load: Any = getattr(model, LOAD, None)
        if load is None:
            return

        @wraps(load)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._touched = True
            return load(*args, **kwargs)

        setattr(model, LOAD, watched)

    def touched(self) -> bool:
        """Whether anything is known to have written to the weights since ``fingerprint``.

        That is: tensors were loaded into a model, a parameter was replaced, or one was changed in
        place. What writes to ``parameter.data`` itself is not seen. Takes 60 ns a parameter.
        """
        return self._touched or self._count() != self._versions

    def _count(self) -> int:
        return sum([one._version for one in self._parameters])

    def fingerprint(self) -> bytes:
        """Digest of all parameters, and of the buffers that a checkpoint would have.

        Computed where they lie, or where they are brought to compute with; reads all of them.

        Raises
        ------
        RuntimeError
            They cannot be read, or are half loaded; they count as touched until they can.
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
                        raise RuntimeError(f"{name} is not in memory: a reload is not over")
                    state.update(digest(tensor, device))
        self._touched = False
        return state.digest()

    def close(self) -> None:
        """Let go of the models. May be called again."""
        self._registering.remove()
        for model in self._models.values():
            vars(model).pop(LOAD, None)
        self._models, self._parameters = {}, []
        self._modules.clear()


def models_of(layers: Mapping[str, Any]) -> dict[str, Module]:
    """The outermost modules around these layers, each by the name of its first layer."""
    above: dict[int, list[Module]] = {}
    for one in gc.get_objects():
        if issubclass(type(one), Module):  # isinstance would ask objects that only pose as others
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
    """Where a model computes: some of its weights may lie in host memory all the same."""
    devices = [one.device for one in model.parameters() if not one.is_meta]
    return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))


def prefetched() -> dict[int, torch.Tensor]:
    """By the parameter's identity, weights that vLLM brings in layer by layer, where they stay.

    The parameters are buffers on the device that layers share: they have what was needed last.

    Raises
    ------
    RuntimeError
        There are some, and this vLLM does not tell where.
    """
    offloader: Any = sys.modules.get(OFFLOADER)  # vLLM imported it if it offloads anything
    try:
        layers = getattr(offloader.get_offloader(), "module_offloaders", []) if offloader else []
        kept = [one for layer in layers for one in layer._param_offloaders.values()]
        return {id(one._param): one._cpu_storage.detach() for one in kept}
    except AttributeError as error:
        raise RuntimeError(f"they are prefetched from where nobody can look: {error}") from error


def tensors_of(
    model: Any, stored: Mapping[int, torch.Tensor] = MappingProxyType({})
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a model computes with, by name, whether or not its layers are made for adapters.

    ``stored`` is what ``prefetched`` found.
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
    """The tensors that hold the bytes of one: those of quantized and shared ones lie within."""
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
    """What a linear layer makes of certain inputs: vLLM on a CPU packs weights out of sight.

    Each input adds up the columns of its group, two groupings of them, so every weight counts
    twice, among others. Of a layer with few inputs the answers are the weights, exactly.
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
"""Steps after which requests do not wait any more for ranks that do not answer."""
STEPS_MAX: Final = 16
"""Steps remembered that ranks may not have begun yet; vLLM has two at most."""
OUTDATED_MAX: Final = 4
"""Caches remembered that have other adapters' KV; vLLM has one, and those of steps under way."""


def combined(digests: Sequence[bytes]) -> bytes:
    """Digest of all ranks' weights."""
    return hashlib.sha256(b"kvladder weights of ranks 1" + b"".join(digests)).digest()


MODEL: Final = 0
"""Stands for the model itself among the numbers of adapters, which begin with 1."""


class _Held:
    """What the ranks have in memory of the model, or of one adapter."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self.digests = list(digests)
        self.changes = [0] * len(self.digests)
        self.looked = [0] * len(self.digests)
        self.doubt = 0

    @property
    def digest(self) -> bytes:
        """Of all ranks, as far as they have looked."""
        return combined(self.digests)

    @property
    def known(self) -> bool:
        """Whether all ranks have it, and have looked since the last doubt."""
        return min(self.looked) >= self.doubt and all(self.digests)

    def take(self, rank: int, seen: Seen) -> bool:
        """Take in what a rank saw; whether it is something else than before."""
        changed = seen.changes != self.changes[rank]
        self.looked[rank], self.changes[rank] = seen.doubt, seen.changes
        self.digests[rank] = seen.digest
        return changed


class _Name:
    """What an adapter's name and path stand for, by which vLLM's own prefix cache goes."""

    def __init__(self) -> None:
        self.digest: bytes | None = None
        """What the last request computed with; None if that is not known."""
        self.cache: object = self
        """vLLM's own prefix cache as of that request."""
        self._outdated: deque[object] = deque(maxlen=OUTDATED_MAX)
        """Caches that may have KV which other adapters made."""

    def outdate(self, cache: object) -> None:
        """Note that ``cache`` may have KV which another adapter made."""
        if not self.outdated(cache):
            self._outdated.append(cache)

    def outdated(self, cache: object) -> bool:
        """Whether ``cache`` may have KV which another adapter made."""
        return any(cache is one for one in self._outdated)


class Weights:
    """What the scheduler half knows of the ranks' weights, and of their LoRA adapters.

    The namespace is that of the weights at start. After a change every name has a mark of the new
    ones; with the old ones the old names return. While there is a doubt no name is used: ranks
    look at their memory in a step in which the engine is awake, before its forward pass, and the
    answer comes with the report. A step tells each rank which of its changes are known: a rank
    that has seen another one copies nothing in it.

    An adapter is known by the same means while all ranks have it in memory; see ``want``. Ranks
    look at their adapters in each step, before its forward pass and after it, so there is no
    doubt about them, but where a request wants an adapter read anew.
    """

    def __init__(self, digests: Sequence[bytes]) -> None:
        self._model = _Held(digests)
        self._first = self.digest
        self._adapters: dict[int, _Held] = {}
        self._wanted: Any = None
        """The LoRARequest of an adapter that the ranks are to read in the next step."""
        self._names: dict[tuple[str, str], _Name] = {}
        self._named: dict[int, _Name] = {}
        """By number, the name of an adapter that requests began with."""
        self._awake = False
        self._steps = 0
        self._unanswered = 0
        self._caches: deque[tuple[int, object]] = deque(maxlen=STEPS_MAX)
        """By step, what vLLM's own prefix cache was."""
        self._outdated: object = self

    @property
    def digest(self) -> bytes:
        """Of the weights of all ranks, as far as they were looked at."""
        return self._model.digest

    @property
    def mark(self) -> int:
        """What is added to names, bit by bit without carry; nothing for the weights at start."""
        digest = self.digest
        return 0 if digest == self._first else int.from_bytes(digest)

    @property
    def known(self) -> bool:
        """Whether all ranks have looked since the last doubt."""
        return self._model.known

    @property
    def patient(self) -> bool:
        """Whether it is worth to wait until they are known."""
        return self._unanswered < PATIENCE

    def doubt(self) -> None:
        """They may be others by now."""
        self._model.doubt += 1
        self._unanswered = 0

    def adapter(self, number: int) -> bytes | None:
        """Digest of an adapter on all ranks; None while one does not have it in memory."""
        held = self._adapters.get(number)
        return held.digest if held is not None and held.known else None

    def doubt_adapter(self, number: int) -> None:
        """An adapter is to be read anew before it is known again."""
        self._held(number).doubt += 1

    def want(self, lora: Any) -> None:
        """Have the ranks read an adapter in the next step, if no other is wanted before."""
        self._wanted = self._wanted or lora

    def begins(self, lora: Any, digest: bytes | None, cache: object) -> None:
        """A request begins to compute with an adapter, whose ``digest`` is None if not known.

        ``cache`` is vLLM's own prefix cache, which takes what is computed under the adapter's name.
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
        """A request may be scheduled: the weights are in memory, also after a sleep."""
        self._awake = True

    def prepare(
        self, step: StepMetadata, *, runs: bool, cache: object, kept: Iterable[int] = ()
    ) -> None:
        """Complete a step; ``runs``: it has a forward pass. ``cache`` is vLLM's own.

        ``kept`` are the numbers of the adapters of requests that have begun.
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
        """Take in what ranks saw; which adapters of a rank, or MODEL, are others than before.

        The weights of other ranks may be, too: unless all have looked by now, all look again.
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
        """An adapter has been another one since a step: so has what its name stands for."""
        named = self._named.get(number)
        if named is not None:
            named.digest = self.adapter(number)
            named.outdate(self._before(step))

    def _before(self, step: int) -> object:
        """What vLLM's own prefix cache was in the last step before this one that ran."""
        before = [cache for turn, cache in self._caches if turn < step]
        return before[-1] if before else self

    def outdated(self, cache: object, lora: Any = None, digest: bytes | None = None) -> bool:
        """Whether vLLM's own prefix cache may have KV that other weights made.

        ``digest`` is that of the adapter ``lora`` of the request that would begin with it.
        """
        if cache is self._outdated or lora is None:
            return cache is self._outdated
        one = self._names.get((lora.lora_name, lora.lora_path))
        if one is None:
            return False
        other = digest is None or digest != one.digest
        return (other and cache is one.cache) or one.outdated(cache)
