"""Running caches: where they answer, and requests to them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kvladder.config.stack import load_config
from kvladder.control.sockets import (
    REPLY_BYTES_MAX,
    WHERE,
    NobodyThere,
    NotAnswering,
    UnixConnection,
    sockets,
)
from kvladder.errors import ConfigError

TIMEOUT_S: Final = 10.0
HINT: Final = "expected the control socket or the HTTP port of a running cache"
JSON: Final = {"Content-Type": "application/json"}
_SCHEMES: Final[Mapping[str, type[HTTPConnection]]] = {
    "http": HTTPConnection,
    "https": HTTPSConnection,
}


class RunningCache:
    """One running cache, asked at its control socket or at its HTTP port."""

    def __init__(self, name: str, token: str | None = None) -> None:
        self.name = name
        self._token = token

    def _connection(self, timeout_s: float) -> HTTPConnection:
        parts = urlsplit(self.name)
        if parts.scheme not in _SCHEMES:
            return UnixConnection(Path(self.name), timeout_s)
        return _SCHEMES[parts.scheme](parts.hostname or "", parts.port, timeout=timeout_s)

    def status(self) -> dict[str, Any]:
        """Return everything that the page shows; see ``ask`` for errors."""
        return self.ask("GET", "/status")

    def describe(self) -> str:
        """Return the resolved configuration; see ``ask`` for errors."""
        status, text = self._send("GET", "/describe", None, TIMEOUT_S)
        if status != HTTPStatus.OK:
            raise ConfigError(f"refused with {status}", path=self.name)
        return text.decode(errors="replace")

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        """Send one request and return the answer.

        Raises
        ------
        NotAnswering
            No process answers there, or it is no running cache.
        ConfigError
            The cache refuses the request; the message says why.
        """
        status, text = self._send(method, path, body, timeout_s)
        try:
            reply = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise NotAnswering(f"not JSON: {error}", path=self.name, hint=HINT) from error
        if status != HTTPStatus.OK:
            raise ConfigError(str(reply.get("error", status)), path=self.name)
        return reply

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """Return the status and the body of the answer; NotAnswering if there is none."""
        headers = dict(JSON)
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else msgspec.json.encode(body)
        try:
            with closing(self._connection(timeout_s)) as client:
                client.request(method, path, data, headers)
                answer = client.getresponse()
                return answer.status, answer.read(REPLY_BYTES_MAX)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            why = f"no answer: {error.strerror}"
            raise NobodyThere(why, path=self.name, hint=HINT) from error
        except (OSError, HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or repr(error)
            raise NotAnswering(f"no answer: {why}", path=self.name, hint=HINT) from error


def caches(target: str, *, token_file: Path | None = None) -> list[RunningCache]:
    """Return the running caches of a control socket, a URL, or a YAML file, one or more.

    ``token_file`` has the token that changes through a port need, in its first line.

    Raises
    ------
    ConfigError
        The file names neither a socket nor a port, or its engine does not run.
    """
    if target.startswith("unix:") or "://" in target:
        scheme = urlsplit(target).scheme
        if scheme not in {*_SCHEMES, "unix"}:
            hint = "expected http://HOST:PORT, a control socket, or a YAML file"
            raise ConfigError(target, path="target", hint=hint)
        token = None if token_file is None else _token(token_file)
        return [RunningCache(target.removeprefix("unix:"), token)]
    with suppress(OSError):  # a path that the system rejects is reported by load_config
        if Path(target).is_socket():
            return [RunningCache(target)]
    config = load_config(Path(target))
    if config.control.path is not None:
        found = sockets(config.control.path)
        if not found:
            what = f"no control socket at {config.control.path}"
            raise ConfigError(what, path=WHERE, hint="start the engine")
        return [RunningCache(str(one)) for one in found]
    if config.http.listen:
        token = config.http.secret if token_file is None else _token(token_file)
        return [RunningCache(f"http://{config.http.listen}/", token or None)]
    hint = "add `control: PATH` or `http: 127.0.0.1:9480`, and restart the engine"
    raise ConfigError("neither control nor http is configured", path=target, hint=hint)


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", path="--token-file") from error
