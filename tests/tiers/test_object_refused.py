"""Errors of an object store tier at the start, and errors of its settings before that."""

from __future__ import annotations

import subprocess
import sys

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

import kvladder
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError, TierError, TierFull
from kvladder.layout import Layout
from kvladder.preflight import preflight
from kvladder.testing.redisserver import free_ports
from kvladder.tiers.object.options import ObjectOptions, Value
from kvladder.tiers.object.tier import failure
from tests.kit import starts
from tests.kit.objectserver import BUCKET, ObjectServer
from tests.tiers import objecttests  # noqa: F401 - starts the library

SECRET = "hunter2"
LAYOUT = Layout(block_tokens=16, block_bytes=256 << 10)


def stack(**settings):
    level = {"type": "object", "capacity": "64 MiB", "timeout": "2 s", **settings}
    return {"arena": {"size": "2 MiB"}, "tiers": [{"type": "host"}, level]}


def refused(**settings):
    """The error with which a cache that requires this tier does not open; see ``starts``."""
    error = starts.refused(stack(**settings), LAYOUT)
    assert SECRET not in str(error)
    return error


# ---- settings


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({}, "url"),
        ({"url": "blocks"}, "url"),
        ({"url": "s3://"}, "url"),
        ({"url": "http://here/blocks"}, "url"),
        ({"url": "memory:///"}, "url"),
        ({"url": "s3://[blocks"}, "url"),
        ({"url": "s3://id:hunter2@blocks/kv"}, "url"),
        ({"url": "s3://blocks/kv?secret_access_key=hunter2"}, "url"),
        ({"url": "s3://blocks/kv#hunter2"}, "url"),
        ({"url": "az://account"}, "url"),
        ({"url": "file:///"}, "url"),
        ({"url": "file://host/folder"}, "url"),
        ({"url": "file:///tmp", "options": {"region": "here"}}, "options"),
        ({"url": "s3://blocks", "options": {"secret_access_key": [SECRET]}}, "options"),
        ({"url": "s3://blocks", "requests": 0}, "requests"),
        ({"url": "s3://blocks", "requests": 257}, "requests"),
        ({"url": "s3://blocks", "bucket": "blocks"}, "bucket"),
    ],
)
def test_contradictory_settings_are_refused(settings, path):
    with pytest.raises(ConfigError) as caught:
        load_config(stack(**settings), env={})
    assert caught.value.path.startswith(f"tiers[1].{path}"), caught.value
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://b", "gs://b/kv", "az://account/b/kv", "file:///mnt/kv"])
def test_valid_urls_are_accepted(url):
    assert load_config(stack(url=url), env={}).levels[0].options.url == url


def test_two_levels_in_one_place_are_refused():
    source = stack(url="s3://blocks/kv")
    source["tiers"].append(source["tiers"][1] | {"name": "second", "url": "s3://blocks/kv/"})
    with pytest.raises(ConfigError, match="is already the url of tiers"):
        load_config(source, env={})


def test_options_are_taken_apart_for_the_library():
    given: dict[str, Value] = {
        "region": "here",
        "aws_allow_http": True,
        "TIMEOUT": "9 s",
        "proxy_url": "http://p",
    }
    config, client = ObjectOptions(url="s3://blocks", options=given).split()
    assert config == {"region": "here"}
    assert client == {"allow_http": True, "timeout": "9 s", "proxy_url": "http://p"}


def test_secrets_are_not_shown():
    options = {"access_key_id": SECRET, "secret_access_key": SECRET, "session_token": SECRET}
    options |= {"sas_key": SECRET, "proxy_url": f"http://me:{SECRET}@proxy", "region": "nearby"}
    config = load_config(stack(url="s3://blocks", options=options), env={})
    shown = [config.describe(LAYOUT), repr(config.levels[0].options), repr(config.levels[0])]
    tier = config.levels[0].make_tier()
    shown += [str(tier.describe()), repr(tier)]
    assert SECRET not in "".join(shown)
    assert "region=nearby" in tier.describe()["options"]


@pytest.mark.parametrize("block_bytes", [1, 64 << 10, (256 << 10) - 1])
def test_small_blocks_are_refused_before_anything_is_asked(block_bytes):
    source = stack(url="s3://blocks")
    layout = Layout(block_tokens=16, block_bytes=block_bytes)
    with pytest.raises(ConfigError) as caught:
        kvladder.open_cache(source, layout=layout)
    assert caught.value.path == "tiers[1].type"
    assert "each is one request" in caught.value.message
    assert "at least 256 KiB" in caught.value.hint
    load_config(source, env={}).check(LAYOUT)


# ---- the library

HIDDEN = """
import sys
sys.modules["obstore"] = None
from kvladder.config.registry import load
from kvladder.errors import ConfigError
try:
    load("tiers", "object")
except ConfigError as error:
    print(error)
"""


def test_a_missing_library_is_reported():
    command = [sys.executable, "-W", "ignore", "-c", HIDDEN]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "install kvladder[object]" in found


@pytest.mark.parametrize(
    ("error", "kind", "is_temporary"),
    [
        (GenericError("No space left on device (os error 28)"), TierFull, True),
        (GenericError("<Code>XMinioStorageFull</Code>"), TierFull, True),
        (GenericError("503 Slow Down\n\nDebug source:\nx"), TierError, True),
        (PermissionDeniedError("403"), TierError, False),
        (TimeoutError(), TierError, True),
    ],
)
def test_failures_are_mapped_to_tier_errors(error, kind, is_temporary):
    found = failure(error)
    assert (type(found), found.temporary) == (kind, is_temporary)
    assert str(found)
    assert "Debug" not in str(found)


# ---- stores


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ObjectServer(tmp_path_factory.mktemp("objects")) as server:
        yield server


def over(server, **options):
    return {"url": f"s3://{BUCKET}/kv", "options": server.options | options}


@pytest.mark.slow
def test_preflight_reports_the_url_and_the_access(server):
    found = preflight(load_config(stack(**over(server))))
    assert not found.errors
    assert found.facts["object"] == {"url": f"s3://{BUCKET}/kv", "access": "can be listed"}


@pytest.mark.slow
def test_a_missing_server_is_reported():
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    options = {"endpoint": address, "allow_http": True, "skip_signature": True}
    error = refused(url="s3://blocks", options=options)
    assert address in error.message
    assert starts.REQUIRED in error.hint
    (warning,) = preflight(load_config(stack(url="s3://blocks", options=options))).warnings
    assert address in warning


@pytest.mark.slow
def test_a_missing_bucket_is_reported(server):
    error = refused(**over(server) | {"url": "s3://elsewhere/kv"})
    assert "NoSuchBucket" in error.message
    assert "create the bucket" in error.hint


@pytest.mark.slow
def test_http_has_to_be_allowed(server):
    assert "allow_http: true" in refused(**over(server, allow_http=False)).hint


@pytest.mark.slow
def test_tls_to_a_server_without_it_is_reported(server):
    address = server.address.replace("http:", "https:")
    assert address in refused(**over(server, endpoint=address)).message


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"nonsense": 1}, {"allow_http": "perhaps"}, {"root_certificate": "none"}]
)
def test_options_unknown_to_the_library_are_refused(server, options):
    assert refused(**over(server, **options)).path == "tiers[1].options"


@pytest.mark.slow
def test_a_user_without_permissions_is_reported(tmp_path):
    with ObjectServer(tmp_path) as server:
        server.ask("POST", "moto-api/reset-auth", b"0")  # the server requires a user from now on
        error = refused(**over(server))
        assert "403" in error.message
        assert "may list, get, put and delete" in error.hint


def test_a_missing_folder_is_reported(tmp_path):
    error = refused(url=f"file://{tmp_path}/absent")
    assert f"{tmp_path}/absent" in error.message
    assert error.path == "tiers[1].url"
    assert not (tmp_path / "absent").exists()
