"""Real Redis or Valkey servers for tests: on free loopback ports, ended by their process.

The program is ``redis-server``, or what ``KVLADDER_REDIS_SERVER`` names, e.g. ``valkey-server``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from itertools import count
from pathlib import Path
from typing import Any, Self

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

START_TIMEOUT_S = 300.0
_TRIES_PER_S = 100
_RANGE = range(18_000, 22_700)
"""Below the ports that Linux gives to connections (from 32,768 on), as is 10,000 above each of
them, where a node of a Redis cluster listens too."""
_claims = os.open(
    Path(tempfile.gettempdir()) / f"kvladder-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600
)
"""A file of which each byte's lock claims a port for one process, until that ends."""
_given: set[int] = set()
_choosing = threading.Lock()
"""Held while this process claims: its threads would all have one lock."""


def program() -> str | None:
    """The server's program, or None if there is none here."""
    return shutil.which(os.environ.get("KVLADDER_REDIS_SERVER", "redis-server"))


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, and that no process is given a second time.

    Raises
    ------
    RuntimeError
        If all of them are taken.
    """
    ports: list[int] = []
    first = os.getpid() * 61  # so that processes rarely meet, and one's ports rest for a while
    for number in range(first, first + len(_RANGE)):
        if len(ports) == count:
            break
        port = _RANGE[number % len(_RANGE)]
        with _choosing:
            if port not in _given and _claim(port):
                _given.add(port)
                ports.append(port)
    if len(ports) < count:
        raise RuntimeError(f"no {count} ports are free from {_RANGE.start} to {_RANGE.stop - 1}")
    return ports


def _claim(port: int) -> bool:
    try:
        fcntl.lockf(_claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        with socket.socket() as probe:
            probe.bind(("", port))
    except OSError:
        return False
    return True


class ServerProcess:
    """A server in a process of its own; a context manager, at whose end it is killed.

    Parameters
    ----------
    log:
        The file that it writes to.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def launch(self, command: Sequence[str], *conditions: Callable[[], bool]) -> None:
        """Start the process and wait until all these hold; if they do not, it is killed."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - ours
        try:
            for condition in conditions:
                self.wait_for(condition)
        except BaseException:
            self.kill()
            raise

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until ``condition`` holds."""
        assert self._process is not None
        for _ in range(int(timeout_s * _TRIES_PER_S)):
            if condition():
                return
            with suppress(subprocess.TimeoutExpired):  # a wait that ends with the process
                self._process.wait(1 / _TRIES_PER_S)
                raise AssertionError(self._log.read_text())
        raise AssertionError(f"not within {timeout_s:g} s: {condition}")

    def pause(self) -> None:
        """Stop the process where it is: its sockets stay open and nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class RedisServer(ServerProcess):
    """One server. What it logs is in ``folder``.

    Parameters
    ----------
    folder:
        Where it works.
    settings:
        Options of its command line, without dashes.
    tls:
        The folder of :func:`certificates`: it listens for TLS only.
    mode:
        ``""`` or ``"--sentinel"``.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[tuple[str, str]] = (),
        *,
        tls: Path | None = None,
        mode: str = "",
    ) -> None:
        self.port = free_ports(1)[0]
        self.folder = folder / f"redis-{self.port}"
        self.folder.mkdir(parents=True)
        super().__init__(self.folder / "log")
        self.path = self.folder / "server.sock"
        self._tls = tls
        self._mode = mode
        self._settings = [("bind", "127.0.0.1"), ("dir", str(self.folder))]
        if not mode:
            self._settings += [("save", ""), ("unixsocket", str(self.path))]
        if tls is None:
            self._settings.append(("port", str(self.port)))
        else:
            self._settings += [("port", "0"), ("tls-port", str(self.port))]
            self._settings += [
                ("tls-auth-clients", "no"),
                ("tls-ca-cert-file", str(tls / "ca.crt")),
            ]
            self._settings += [("tls-cert-file", str(tls / "server.crt"))]
            self._settings += [("tls-key-file", str(tls / "server.key"))]
        self._settings += settings
        self.start()

    @property
    def url(self) -> str:
        """Its URL, without a user."""
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process, again on the same port, and wait until it answers."""
        found = program()
        assert found is not None, "install redis-server"
        config = self.folder / "server.conf"
        if not config.exists():  # a Sentinel, and CONFIG REWRITE, write into it
            rows = (f'{name} "{value}"' for name, value in self._settings)
            config.write_text("\n".join(rows) + "\n")
        arguments = [found, str(config), *([self._mode] if self._mode else [])]
        self.launch(arguments, self.answers)

    def answers(self) -> bool:
        """Whether it takes commands; one that wants a password first does as well."""
        client = self.client()
        try:
            client.ping()
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        finally:
            client.close()
        return True

    def client(self, **settings: Any) -> Any:
        """A plain client of redis-py's, to look behind a tier's back."""
        if self._tls is not None:
            settings |= {"ssl": True, "ssl_ca_certs": str(self._tls / "ca.crt")}
        return redis.Redis(port=self.port, socket_timeout=60, **settings)

    def run(self, *command: str | int | bytes, **settings: Any) -> Any:
        """The reply to one command."""
        client = self.client(**settings)
        try:
            return client.execute_command(*command)
        finally:
            client.close()

    def configure(self, **settings: str | int) -> None:
        """Change settings while it runs; their names with ``_`` for ``-``."""
        for name, value in settings.items():  # servers before 7.0 take one at a time
            self.run("CONFIG", "SET", name.replace("_", "-"), value)


@contextmanager
def redis_cluster(
    folder: Path,
    nodes: int = 3,
    *,
    replicas: int = 0,
    settings: Sequence[tuple[str, str]] = (),
) -> Generator[list[RedisServer]]:
    """Servers that share the slots of one cluster evenly; they are killed at the end.

    With ``replicas``, so many of each follow in the list, at first one of each, in the same order.
    """
    settings = [("cluster-enabled", "yes"), ("cluster-node-timeout", "2000"), *settings]
    with ExitStack() as started:
        count_all = nodes * (1 + replicas)
        servers = [started.enter_context(RedisServer(folder, settings)) for _ in range(count_all)]
        for number, server in enumerate(servers[:nodes]):
            slots = range(16384 * number // nodes, 16384 * (number + 1) // nodes)
            server.run("CLUSTER", "ADDSLOTS", *slots)
        tries = count()

        def are_whole() -> bool:
            if all(_is_whole(server, nodes, count_all) for server in servers):
                return True
            if next(tries) % (5 * _TRIES_PER_S) == 0:  # who is busy forgets whom it was to meet
                for server in servers:
                    server.run("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
            return False

        servers[0].wait_for(are_whole)
        for number, replica in enumerate(servers[nodes:]):
            replica.run("CLUSTER", "REPLICATE", servers[number % nodes].run("CLUSTER", "MYID"))
        yield servers


def _is_whole(server: RedisServer, masters: int, nodes: int) -> bool:
    info = server.run("CLUSTER", "INFO")
    is_ok = b"cluster_state:ok" in info and b"cluster_known_nodes:%d\r" % nodes in info
    return is_ok and len(server.run("CLUSTER", "SLOTS")) == masters


def certificates(folder: Path) -> Path:
    """A folder with ``ca.crt``, ``server.crt`` and ``server.key`` for 127.0.0.1, valid a day."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvladder tests")])
    names = [x509.IPAddress(IPv4Address("127.0.0.1")), x509.DNSName("localhost")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    for file in ("ca.crt", "server.crt"):
        (folder / file).write_bytes(certificate)
    (folder / "server.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return folder
