"""Digests of the models of this server, computed from what its processes hold in memory.

Files do not tell what an engine computes with. Weights may be random, or come from another engine
or from files in another format, and files may be replaced after the engine has read them.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, compress
from typing import Any, Final

import torch
from sglang.srt import runtime_context
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.model_executor.model_runner import ModelRunner

from kvladder.connectors.digests import digest
from kvladder.connectors.naming import text_of
from kvladder.connectors.vllm.identity.loaded import device_of, tensors_of
from kvladder.errors import ConfigError

engine: Any = runtime_context  # its settings have no types
AUTO: Final = "auto"
"""Fingerprint setting that makes kvladder digest the weights itself."""
WHERE: Final = "model.fingerprint"
HINT: Final = "set it to text of your own that changes whenever the weights do"


def model_fields(fingerprint: str) -> dict[str, str]:
    """Return digests of the models of all ranks, the same texts on every rank.

    All ranks must call this at the same time. SGLang itself also waits for all ranks when it
    attaches a storage.

    Parameters
    ----------
    fingerprint:
        Text that stands for the target model's weights, or "auto" to read them.

    Raises
    ------
    ConfigError
        On every rank, if one of them cannot read its weights.
    """
    try:
        own, failure = _own(fingerprint), ""
    except ConfigError as error:
        own, failure = {}, str(error)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
        own, failure = {}, repr(error)
    ranks: list[tuple[dict[str, str], str]] = _gathered((own, failure))
    for rank, (_, found) in enumerate(ranks):
        if found:
            what = f"the weights of rank {rank} cannot be read: {found}"
            raise ConfigError(what, path=WHERE, hint=HINT)
    names = {name: None for fields, _ in ranks for name in fields}
    return {name: _together(fields.get(name, "") for fields, _ in ranks) for name in names}


def _own(fingerprint: str) -> dict[str, str]:
    """Return digests of this rank's target model, its drafts and its adapters."""
    found = _all_of(ModelRunner, LoRAManager)
    runners = sorted(found[ModelRunner], key=lambda one: bool(one.is_draft_worker))
    if not runners or runners[0].is_draft_worker:
        raise ConfigError("the model is not found in this process")
    target, *drafts = runners
    given = fingerprint != AUTO
    return {
        "weights": f"given {fingerprint}" if given else _weights(target.model),
        "config": _config(target),
        "draft": " ".join(sorted(f"{_weights(one.model)} {_config(one)}" for one in drafts)),
        "adapters": json.dumps(dict(sorted(_adapters(found[LoRAManager])))),
    }


def _all_of(*kinds: type) -> dict[type, list[Any]]:
    """Return the objects of these classes in this process: SGLang does not pass them to us."""
    found: dict[type, list[Any]] = {kind: [] for kind in kinds}
    is_frozen = gc.get_freeze_count() > 0  # SGLang may freeze: then get_objects lists none of them
    if is_frozen:
        gc.unfreeze()
    try:
        everything = gc.get_objects()
        wanted: dict[type, type] = {}
        for own in set(map(type, everything)):  # not ``__class__``, which proxies may fake
            kind = next((kind for kind in kinds if issubclass(own, kind)), None)
            if kind is not None:
                wanted[own] = kind
        # There are millions of objects, so no Python code runs for each one.
        for one in compress(everything, map(wanted.__contains__, map(type, everything))):
            found[wanted[type(one)]].append(one)
    finally:
        if is_frozen:
            gc.freeze()
    return found


def _gathered(mine: Any) -> list[Any]:
    """Return the values of ``mine`` of all ranks of this replica, in the order of ranks."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return [mine]
    group = engine.get_parallel().world_group.cpu_group
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, mine, group=group)
    return found


def _together(several: Iterable[str]) -> str:
    """Return the ranks' text if all agree, else a digest of all their texts in order."""
    texts = list(several)
    if len({*texts}) == 1:
        return texts[0]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _weights(model: Any) -> str:
    """Return the digest of a model's parameters and of the buffers that it saves.

    Raises
    ------
    ConfigError
        The model is not a PyTorch module, or a tensor is not in this process's memory.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} is not a PyTorch module")
    return tensors_digest(tensors_of(model), device_of(model))


def tensors_digest(named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> str:
    """Return the digest of tensors and their names, computed on ``device``.

    Raises
    ------
    ConfigError
        A tensor is not in this process's memory.
    """
    state = hashlib.sha256(b"kvladder weights in memory 1")
    with torch.inference_mode():
        for name, tensor in sorted(named, key=lambda pair: pair[0]):
            if tensor.is_meta:
                raise ConfigError(f"{name} is not in the memory of this process")
            state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            state.update(digest(tensor, device))
    return state.hexdigest()


def _config(runner: Any) -> str:
    """Return the digest of a model's configuration, with overrides applied."""
    plain = text_of(runner.model_config.hf_config, lambda _: ())
    return hashlib.sha256(plain.encode()).hexdigest()


def _adapters(managers: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and path of each adapter with an id that survives a restart, and its digest.

    These adapters were given at the start: SGLang derives their ids from name and path alone.
    Adapters that are loaded at run time have random ids, which are part of their pages' names.
    """
    for manager in managers:
        loaded: Mapping[str, Any] = manager.loras
        for lora_id, ref in manager.lora_refs.items():
            if lora_id != type(ref).deterministic_id(ref.lora_name, ref.lora_path):
                continue
            adapter = loaded[lora_id]
            held = chain(
                adapter.embedding_layers.items(),
                adapter.added_tokens_embeddings.items(),
                (
                    (f"{at} {name}", weight)
                    for at, layer in enumerate(adapter.layers)
                    for name, weight in layer.weights.items()
                ),
            )
            plain = text_of(vars(adapter.config), lambda _: ())
            found = f"{plain} {tensors_digest(held, torch.device('cpu'))}"
            yield f"{ref.lora_name} {ref.lora_path}", hashlib.sha256(found.encode()).hexdigest()
