"""vLLM's own LRU caches of LoRA adapters, of adapters that are a number in a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

FILE = "adapter_model.safetensors"


class Registered(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """The adapters that are in memory, and those in slots; of no model."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.lora_config = SimpleNamespace(max_loras=slots, max_cpu_loras=capacity)
        self._registered_adapters = AdapterLRUCache(capacity, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(slots, self._deactivate_adapter)
        self.lora_index_to_id = [None] * slots
        self.modules: dict[str, Any] = {}

    def _add_adapter(self, lora: Any) -> None:
        self._registered_adapters[lora.id] = lora


class Loras(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """The adapters of one rank's model runner."""

    def __init__(self, slots: int = 2, capacity: int = 2) -> None:
        self._adapter_manager = Registered(slots, capacity)
        self.reads = 0
        """The number of file reads."""
        self.failing: Exception | None = None

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        if self.failing is not None:
            raise self.failing
        self.reads += 1
        content = int(Path(lora_request.lora_path, FILE).read_text())
        weights = LoRALayerWeights("layer", 1, 1, torch.tensor([[content]]), torch.ones(1, 1))
        return LoRAModel(lora_request.lora_int_id, 1, {"layer": weights})

    def contents(self) -> dict[int, int]:
        """Return the number in the file of each adapter in memory, by adapter number."""
        held = self._adapter_manager.list_adapters()
        return {number: int(one.loras["layer"].lora_a) for number, one in held.items()}


class Server:
    """Adapters as ``vllm serve`` names them: by name, with a number for each time one is loaded."""

    def __init__(self, folder: Path, ranks: list[Loras]) -> None:
        self._folder = folder
        self._ranks = ranks
        self._count = 0
        self.served: dict[str, LoRARequest] = {}

    def put(self, name: str, content: int) -> Path:
        """Replace an adapter's files."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        (folder / "new").write_text(str(content))
        (folder / "new").rename(folder / FILE)
        return folder

    def load(self, name: str, *, in_place: bool = False, lazy: bool = False) -> LoRARequest:
        """Serve an adapter from now on; ``lazy``: it is read when the first request runs."""
        before = self.served.get(name)
        if before is None or not in_place:
            self._count += 1
        number = before.lora_int_id if before is not None and in_place else self._count
        path = str(self._folder / name)
        found = LoRARequest(name, number, path, load_inplace=in_place)
        for rank in [] if lazy else self._ranks:
            rank.add_adapter(found)
        self.served[name] = found
        return found

    def unload(self, name: str) -> None:
        """Serve an adapter no more."""
        for rank in self._ranks:
            rank.remove_adapter(self.served[name].lora_int_id)
        del self.served[name]
