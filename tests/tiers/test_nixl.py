"""The NIXL tier against a real far end, over real agents."""

from __future__ import annotations

import itertools
import socket
import threading
from contextlib import suppress

import pytest
import yaml

import kvladder
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.testing import TierTests
from kvladder.testing.redisserver import free_ports
from kvladder.tiers.isolated.tier import IsolatedTier

for needed in ("zmq", "nixl_cu13"):
    pytest.importorskip(needed, reason="the extra nixl is not installed")

from kvladder.tiers.nixl import plane  # noqa: E402
from kvladder.tiers.nixl.curve import make_keys, read_keys  # noqa: E402
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier  # noqa: E402
from tests.kit.far import Far  # noqa: E402
from tests.kit.starts import REQUIRED  # noqa: E402
from tests.patience import PATIENCE_S  # noqa: E402

TESTS = itertools.count()


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    with Far(tmp_path_factory.mktemp("far")) as far:
        yield far


def options(far, **more):
    return NixlOptions(servers=(far.address,), keys=far.keys, **more)


@pytest.mark.slow
class TestNixl(TierTests):
    real = True

    @pytest.fixture(autouse=True)
    def _far(self, far):
        self.far = far

    @pytest.fixture
    def namespace(self, layout):
        """One per test: they share a far end."""
        return layout.namespace(salt=f"test {next(TESTS)}")

    @pytest.fixture
    def make(self, far):
        return lambda: IsolatedTier(NixlTier, options(far))

    async def raw_get(self, tier, ref):
        return self.far("stored", tier.context.namespace, ref.key)

    async def raw_put(self, tier, ref, label, data):
        self.far("store", tier.context.namespace, ref.key, label, data)

    async def raw_corrupt(self, tier, ref):
        self.far("damage", tier.context.namespace, ref.key)


# ---- bad input

LAYOUT = kvladder.Layout(block_tokens=4, block_bytes=8192)


def stack(far, **changed):
    level = {"type": "nixl", "servers": [far.address], "keys": far.keys, "capacity": "8 MiB"}
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, {**level, **changed}]}


def refused(far, layout=LAYOUT, **changed):
    """Why a cache over it is not opened, and where."""
    with pytest.raises(ConfigError) as error:
        kvladder.open_cache(stack(far, **changed), layout=layout)
    return str(error.value), error.value.path


@pytest.mark.slow
def test_a_client_with_another_key_is_refused(far, tmp_path):
    make_keys(tmp_path)
    what, where = refused(far, keys=str(tmp_path / "client.keys"))  # of another server
    assert "another key" in what
    assert where == "tiers[1].servers"
    own = read_keys(far.keys)
    stranger = tmp_path / "stranger.keys"
    secret = read_keys(str(tmp_path / "client.keys")).secret
    stranger.write_text(f'secret: "{secret}"\npeers: ["{own.peers[0]}"]\n')
    stranger.chmod(0o600)
    what, _ = refused(far, keys=str(stranger))
    assert "it does not know this client's key" in what
    assert far("counts")["clients"] == 0


@pytest.mark.slow
def test_blocks_that_are_too_large_for_the_server_are_refused(far):
    layout = kvladder.Layout(block_tokens=4, block_bytes=96 << 10)
    what, where = refused(far, layout)
    assert "a slot of the cache holds at most 65536" in what
    assert where == "tiers[1].servers"


@pytest.mark.slow
def test_a_missing_server_is_named(far, tmp_path):
    (port,) = free_ports(1)
    what, where = refused(far, servers=[f"127.0.0.1:{port}"], required=True)
    assert f"127.0.0.1:{port}: no process listens there" in what
    assert f"(check that kvladder serve runs there; or {REQUIRED})" in what
    assert where == "tiers[1].servers"


@pytest.mark.slow
def test_a_foreign_server_is_not_accepted_as_a_far_end(far):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            for _ in range(9):
                with suppress(OSError):
                    came, _ = other.accept()
                    came.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
                    came.close()

        threading.Thread(target=answer, daemon=True).start()
        servers = [f"127.0.0.1:{other.getsockname()[1]}"]
        what, _ = refused(far, servers=servers, required=True)
        assert "is not a kvladder cache" in what or "the connection was closed" in what
        other.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_missing_interface_is_named(far):
    what, _ = refused(far, interfaces="none0", required=True)
    assert "NIXL" in what


@pytest.mark.slow
def test_interfaces_of_the_environment_apply_where_none_are_named(far, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "none0")
    what, _ = refused(far, required=True)
    assert "NIXL" in what
    with kvladder.open_cache(stack(far, interfaces="lo"), layout=LAYOUT):
        pass


@pytest.mark.slow
def test_a_missing_server_that_is_not_required_gives_misses(far, caplog):
    (port,) = free_ports(1)
    more = {"servers": [f"127.0.0.1:{port}"]}
    with kvladder.open_cache(stack(far, **more), layout=LAYOUT) as cache:
        said = (
            f"127.0.0.1:{port}: no process listens there (check that kvladder serve runs there): "
        )
        assert [text for text in caplog.messages if said in text]
        fetch = cache.fetch([kvladder.BlockKey(bytes(32))])
        fetch.wait()
        assert not fetch.slots
        fetch.release()


@pytest.mark.parametrize("text", ["", "secret: x", "[]", "secret: 1\npeers: []", "\0"])
def test_a_file_that_has_no_keys_is_refused(far, tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as error:
        read_keys(str(file))
    assert error.value.path == "keys"
    assert "new-keys" in error.value.hint


@pytest.mark.parametrize(
    "tenants",
    [
        [{"name": "red", "peers": ["PUBLIC"], "read": ["ab"]}],
        [{"name": "red", "peers": ["PUBLIC"], "write": ["AB" * 32]}],
        [{"name": "red", "peers": ["PUBLIC", "PUBLIC"]}],
        [{"name": "red", "peers": ["PUBLIC"]}, {"name": "blue", "peers": ["PUBLIC"]}],
        [{"name": "red", "peers": ["PUBLIC"], "writes": []}],
        [{"name": "red", "peers": []}],
        [{"peers": ["PUBLIC"]}],
    ],
)
def test_invalid_tenants_are_refused(tmp_path, tenants):
    file, other = make_keys(tmp_path)
    public = read_keys(str(other)).public.decode()
    keys = yaml.safe_load(file.read_text()) | {"peers": [], "tenants": tenants}
    for tenant in tenants:
        tenant["peers"] = [public for _ in tenant["peers"]]
    file.write_text(yaml.safe_dump(keys))
    with pytest.raises(ConfigError) as error:
        read_keys(str(file))
    assert error.value.path == "keys"


def test_keys_that_others_can_read_are_refused(tmp_path):
    server, _ = make_keys(tmp_path / "new")
    server.chmod(0o644)
    with pytest.raises(ConfigError, match="other users have access to"):
        read_keys(str(server))
    with pytest.raises(FileExistsError):
        make_keys(tmp_path / "new")


@pytest.mark.parametrize("missing", ["nixl_cu13._api", "libcudart.so.99: cannot open"])
def test_a_missing_library_is_named(monkeypatch, missing):
    def absent(name):
        kind = ModuleNotFoundError if missing == name else ImportError
        raise kind(f"No module named {name!r}" if missing == name else missing)

    monkeypatch.setattr(plane, "import_module", absent)
    with pytest.raises(ConfigError, match="NIXL cannot be loaded") as error:
        plane.load()
    assert "install kvladder[nixl]" in error.value.hint


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"isolate": False}, "tiers[1].isolate"),
        ({"servers": []}, "tiers[1]"),
        ({"servers": ["nowhere"]}, "tiers[1].servers[0]"),
        ({"peers": ["x:1\n"]}, "tiers[1].peers[0]"),
        ({"servers": ["x:1", "x:1"]}, "tiers[1]"),
        ({"servers": ["x:1"], "peers": ["x:1"]}, "tiers[1]"),
        ({"servers": "x:1"}, "tiers[1].servers"),
        ({"transports": "cma,tcp"}, "tiers[1]"),
        ({"interfaces": ""}, "tiers[1].interfaces"),
    ],
)
def test_invalid_settings_are_refused(changed, path):
    level = {"type": "nixl", "servers": ["x:1"], "keys": "k", "capacity": "8 MiB", **changed}
    with pytest.raises(ConfigError) as error:
        load_config({"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, level]})
    assert error.value.path == path


# ---- as a level of a cache


@pytest.mark.slow
def test_coded_blocks_are_transferred_short_and_come_back_whole(far):
    level = {"when": "commit", "codecs": ["zstd", "checksum"]}
    keys = [kvladder.BlockKey(bytes([n]) * 32) for n in range(8)]
    with kvladder.open_cache(stack(far, **level), layout=LAYOUT) as cache:
        saving = cache.save(keys)
        for key, slot in zip(keys, saving.slots, strict=True):
            cache.arena.view(slot)[:8192] = key * 256
        saving.commit()
        assert cache.flush(timeout_s=PATIENCE_S)
        assert len(far("stored", cache.namespace, keys[0])) < 1000
    with kvladder.open_cache(stack(far, **level), layout=LAYOUT) as cache:
        fetch = cache.fetch(keys)
        fetch.wait()
        for key, slot in zip(keys, fetch.slots, strict=True):
            assert cache.arena.view(slot)[:8192] == key * 256
        fetch.release()
