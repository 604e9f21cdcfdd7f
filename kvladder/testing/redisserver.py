"""Real Redis or Valkey servers for tests, on free loopback ports, each in a child process.

The program is ``redis-server``. Set ``KVLADDER_REDIS_SERVER`` to use another, e.g.
``valkey-server``.
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

from kvladder.errors import needed

with needed("testing"):
    import redis
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

START_TIMEOUT_S = 300.0
_TRIES_PER_S = 100
_RANGE = range(18_000, 22_700)
"""Ports for servers. A node of a Redis cluster also listens 10,000 above its port. Both numbers
are below 32,768, from where Linux takes ports for outgoing connections."""
_claims = os.open(
    Path(tempfile.gettempdir()) / f"kvladder-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600
)
"""A file for locks: a lock on byte N claims port N for a process until the process ends."""
_given: set[int] = set()
_choosing = threading.Lock()
"""Held while this process claims a port: a file lock does not separate its threads."""


def program() -> str | None:
    """Return the path of the server's program, or None if it is not installed."""
    return shutil.which(os.environ.get("KVLADDER_REDIS_SERVER", "redis-server"))


def free_ports(count: int) -> list[int]:
    """Return ports without a listener; no other running process is given them.

    Raises
    ------
    RuntimeError
        There are not enough free ports.
    """
    ports: list[int] = []
    # processes start at different ports, and a process that ended leaves its ports unused a while
    first = os.getpid() * 61
    for number in range(first, first + len(_RANGE)):
        if len(ports) == count:
            break
        port = _RANGE[number % len(_RANGE)]
        with _choosing:
            if port not in _given and _claim(port):
                _given.add(port)
                ports.append(port)
    if len(ports) < count:
        raise RuntimeError(
            f"fewer than {count} free ports from {_RANGE.start} to {_RANGE.stop - 1}"
        )
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
    """A server in a child process; a context manager that kills it on exit.

    Parameters
    ----------
    log:
        The file for the server's output.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def launch(self, command: Sequence[str], *conditions: Callable[[], bool]) -> None:
        """Start the process and wait until all conditions hold; kill it if one does not."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - ours
        try:
            for condition in conditions:
                self.wait_for(condition)
        except BaseException:
            self.kill()
            raise

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until ``condition`` holds.

        Raises
        ------
        AssertionError
            The process ended, or the condition did not hold within ``timeout_s``.
        """
        assert self._process is not None
        for _ in range(int(timeout_s * _TRIES_PER_S)):
            if condition():
                return
            with suppress(subprocess.TimeoutExpired):  # returns early only if the process ended
                self._process.wait(1 / _TRIES_PER_S)
                raise AssertionError(self._log.read_text())
        raise AssertionError(f"not true within {timeout_s:g} s: {condition}")

    def pause(self) -> None:
        """Suspend the process (SIGSTOP): its sockets stay open, but nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a suspended process."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
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
    """One Redis or Valkey server, started at construction. Its log is in ``folder``.

    Parameters
    ----------
    folder:
        Parent of the server's working folder.
    settings:
        Settings of its configuration file, as names and values.
    tls:
        A folder made by :func:`certificates`. With it, the server accepts only TLS.
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
        """URL of the server, without a user."""
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process and wait until it answers; a restart uses the same port."""
        found = program()
        assert found is not None, "install redis-server"
        config = self.folder / "server.conf"
        if not config.exists():  # a restart keeps what a Sentinel or CONFIG REWRITE wrote into it
            rows = (f'{name} "{value}"' for name, value in self._settings)
            config.write_text("\n".join(rows) + "\n")
        arguments = [found, str(config), *([self._mode] if self._mode else [])]
        self.launch(arguments, self.answers)

    def answers(self) -> bool:
        """Return whether the server replies, if only to ask for a password."""
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
        """Return a plain redis-py client, to look at the server without the tier."""
        if self._tls is not None:
            settings |= {"ssl": True, "ssl_ca_certs": str(self._tls / "ca.crt")}
        return redis.Redis(port=self.port, socket_timeout=60, **settings)

    def run(self, *command: str | int | bytes, **settings: Any) -> Any:
        """Run one command and return its reply."""
        client = self.client(**settings)
        try:
            return client.execute_command(*command)
        finally:
            client.close()

    def configure(self, **settings: str | int) -> None:
        """Change settings of the running server; write ``_`` for ``-`` in their names."""
        for name, value in settings.items():  # before 7.0, CONFIG SET takes only one setting
            self.run("CONFIG", "SET", name.replace("_", "-"), value)


@contextmanager
def redis_cluster(
    folder: Path,
    nodes: int = 3,
    *,
    replicas: int = 0,
    settings: Sequence[tuple[str, str]] = (),
) -> Generator[list[RedisServer]]:
    """Start a cluster, yield its servers, and kill them at the end.

    The list begins with ``nodes`` masters, which share the slots evenly. The replicas follow: one
    of each master in the masters' order, then the second of each, and so on.
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
            if next(tries) % (5 * _TRIES_PER_S) == 0:  # a busy server gives up a handshake
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
    """Write ``ca.crt``, ``server.crt`` and ``server.key`` into ``folder`` and return it.

    They are for 127.0.0.1 and valid for a day.
    """
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
