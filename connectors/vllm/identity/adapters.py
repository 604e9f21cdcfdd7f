"""What the LoRA adapters of requests are: digests of their weights, read beside the engine."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvladder.connectors.weights import downloaded, stamp, weight_files, weights_digest
from kvladder.errors import ConfigError


class Adapters:
    """Digests of LoRA adapters, each found out once, in a thread of its own: gigabytes are read."""

    def __init__(self) -> None:
        self._readings: dict[tuple[int, str], _Reading] = {}

    def begin(self, lora_request: Any) -> None:
        """A request with this adapter has come, which vLLM may load anew for it."""
        if lora_request is None:
            return
        key = _key(lora_request)
        found = self._readings.get(key)
        if found is None or found.failed:
            self._readings[key] = _Reading(str(lora_request.lora_path))
        elif getattr(lora_request, "load_inplace", False):
            found.again()
        else:
            found.compare()

    def digest(self, lora_request: Any) -> bytes | None:
        """Digest of an adapter's weights that ``begin`` was told of, None while it is not known.

        Empty without an adapter.

        Raises
        ------
        ConfigError
            They are not on this machine, or not yet; or they have changed, and nobody knows which
            ones vLLM has, which reads them again once it had no room for the adapter.
        """
        if lora_request is None:
            return b""
        found = self._readings.get(_key(lora_request))
        return None if found is None else found.digest()


def _key(lora_request: Any) -> tuple[int, str]:
    return int(lora_request.lora_int_id), str(lora_request.lora_path)


class Changed(ConfigError):
    """An adapter's files are others than those that were read."""


class _Reading:
    """One adapter's files, read by a thread that ends with the process at the latest."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rounds = 0
        """How often they are still to be read."""
        self._found: bytes | ConfigError | None = None
        self._stamps: dict[Path, str] = {}
        """What was read."""
        self.again()

    def again(self) -> None:
        """They may be others by now: read them once more."""
        with self._lock:
            self._found = None
            self._rounds, is_idle = min(2, self._rounds + 1), not self._rounds
        if is_idle:
            threading.Thread(target=self._read, name="kvladder-adapter", daemon=True).start()

    def compare(self) -> None:
        """Look, without reading them, whether they are still those that were read."""
        if isinstance(self._found, bytes) and not self._same():
            self._found = self._changed()

    def _same(self) -> bool:
        for file, before in self._stamps.items():
            with suppress(OSError):  # of one that was deleted: vLLM cannot read it again either
                if stamp(file) != before:
                    return False
        return True

    def _changed(self) -> Changed:
        hint = "give new weights a number or a folder of their own"
        return Changed(f"the files of adapter {self._path} have changed", hint=hint)

    @property
    def failed(self) -> bool:
        """Whether they were not there."""
        return isinstance(self._found, ConfigError) and not isinstance(self._found, Changed)

    def digest(self) -> bytes | None:
        """See ``Adapters.digest``."""
        found = self._found
        if isinstance(found, ConfigError):
            raise found
        return found

    def _read(self) -> None:
        while True:
            found = self._attempt()
            with self._lock:
                self._rounds -= 1
                if not self._rounds:
                    self._found = found
                    return

    def _attempt(self) -> bytes | ConfigError:
        try:
            path = Path(self._path).expanduser()
            if not path.exists():
                path = downloaded(self._path, what="adapter")
            self._stamps = {file: stamp(file) for file in weight_files(path)}
            found = bytes.fromhex(weights_digest(path))
            return found if self._same() else self._changed()
        except ConfigError as error:
            return error
        except OSError as error:
            return ConfigError(f"adapter {self._path}: {error.strerror}")
