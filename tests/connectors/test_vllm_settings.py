"""Settings that the vLLM connector accepts and refuses at start, and the names of its blocks."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvladder.connectors import weights
from kvladder.connectors.vllm import groups as vllm_groups
from kvladder.connectors.vllm import plugin as vllm_plugin
from kvladder.connectors.vllm.options import VllmOptions, parse
from kvladder.connectors.vllm.start import (
    check_engine,
    check_features,
    check_groups,
    check_layers,
    check_recompute,
    check_roles,
    group_pages,
    runs_layers,
)
from kvladder.connectors.weights import weights_digest
from kvladder.errors import ConfigError, LayoutError
from kvladder.notices import Notices
from kvladder.schema import keys_of
from tests.connectors.scripted import configs, kv_spec
from tests.patience import until

HOST = {"host": "64 MiB"}
QUIET = Notices(lambda: 0.0)


def test_the_short_form_and_the_file_give_a_stack(tmp_path: Path) -> None:
    options, config = parse({**HOST, "load": "sync", "save_decode": False})
    assert (options.load, options.save_decode) == ("sync", False)
    assert config.arena.size_bytes == 64 << 20
    path = tmp_path / "stack.yaml"
    path.write_text("arena: {size: 32 MiB}\ntiers: [{type: host}]\n")
    options, config = parse({"config": str(path)})
    assert (options.load, config.arena.size_bytes) == ("async", 32 << 20)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, when vLLM is imported
def test_paths_of_a_stack_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    """vLLM asks whether CUDA graphs are to be cut while it makes its configuration."""
    pytest.importorskip("vllm")
    from kvladder.connectors.vllm.connector import KVLadderConnector

    asked = KVLadderConnector.requires_piecewise_for_cudagraph
    assert asked({**HOST, "files": str(tmp_path / "kv"), "capacity": "1 MiB"}) is False
    with pytest.raises(ConfigError, match=r"files: .*none does not exist"):
        asked({**HOST, "files": str(tmp_path / "none" / "kv"), "capacity": "1 MiB"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"lod": "sync", **HOST}, r"kv_connector_extra_config.lod: unknown key .*'load'"),
        ({"hots": "1 GiB"}, r"kv_connector_extra_config.hots: unknown key .*'host'"),
        ({"load": "later", **HOST}, r"kv_connector_extra_config.load: 'later' .*'async'"),
        ({"save_decode": "yes", **HOST}, r"save_decode: 'yes' .*true or false"),
        ({}, r"kv_connector_extra_config: no stack .*stack.yaml"),
        ({"load": "sync"}, "no stack"),
        ({"config": "stack.yaml", **HOST}, r"host: cannot be combined with config .*stack.yaml"),
        ({"config": "/nowhere/stack.yaml"}, r"/nowhere/stack.yaml: No such file"),
        ({"host": "64 XB"}, "host: '64 XB' .*unknown unit"),
        (
            {"events": {"publish": "ipc://x"}, **HOST},
            "events.publish: ipc://x .*--kv-events-config",
        ),
    ],
)
def test_errors_of_settings_say_where_what_was_found_and_what_is_expected(
    extra: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        parse(extra)


def test_the_page_names_every_setting_and_every_kind_of_kv_cache() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md").read_text()
    first = page.split("## Settings")[1].split("## ")[0]
    rows = [line.split("|")[1].strip(" `") for line in first.splitlines() if line.startswith("| `")]
    assert rows == keys_of(VllmOptions)
    kinds = page.split("## Models")[1].split("## ")[0]
    assert set(re.findall(r"`(\w+Spec)`", kinds)) == set(vllm_groups.KINDS)


@pytest.mark.parametrize(
    ("part", "option", "value", "text"),
    [
        ("parallel_config", "decode_context_parallel_size", 2, "--decode-context-parallel-size"),
        ("parallel_config", "nnodes", 3, "--nnodes: 3 .*supports only 1"),
        ("cache_config", "prefix_caching_hash_algo", "xxhash_cbor", "sha256 or sha256_cbor"),
        ("cache_config", "calculate_kv_scales", True, "--calculate-kv-scales"),
    ],
)
def test_engines_that_are_not_supported_are_refused(
    part: str, option: str, value: object, text: str
) -> None:
    vllm_config, _ = configs()
    check_engine(vllm_config)
    setattr(getattr(vllm_config, part), option, value)
    with pytest.raises(ConfigError, match=text):
        check_engine(vllm_config)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_a_connector_that_loads_is_refused_where_the_engine_only_produces(role: str) -> None:
    for whole in ("kv_consumer", "kv_both"):
        check_roles(role, whole)
        check_roles("kv_producer", whole)
    check_roles("kv_producer", "kv_producer")
    with pytest.raises(ConfigError, match=f"kv_role: 'kv_producer', .*{role}.*use kv_both for"):
        check_roles(role, "kv_producer")


@pytest.mark.parametrize("load", ["sync", "layers"])
def test_loads_that_a_runner_would_recompute_wrongly_are_refused(load: str) -> None:
    runner = SimpleNamespace(use_v2_model_runner=True)
    with pytest.raises(ConfigError, match=f"load: '{load}'.*V2.*use async, kv_load_failure"):
        check_recompute(runner, "recompute", load=load)
    check_recompute(runner, "recompute", load="async")
    check_recompute(runner, "fail", load=load)
    check_recompute(SimpleNamespace(use_v2_model_runner=False), "recompute", load=load)


def test_kinds_of_blocks_that_are_not_supported_are_refused_by_name() -> None:
    def check(spec: Any, *, load: str = "async", **more: Any) -> None:
        vllm_config, kv_config = configs()
        group = SimpleNamespace(layer_names=["m"], kv_cache_spec=spec, **more)
        kv_config.kv_cache_groups.append(group)
        check_groups(vllm_config, kv_config, load=load)

    window = kv_spec("SlidingWindowSpec", sliding_window=8)
    check(window)
    check(kv_spec("ChunkedLocalAttentionSpec", attention_chunk_size=8))
    check(kv_spec("MambaSpec", mamba_cache_mode="align"))
    with pytest.raises(LayoutError, match=r"tiny: m ... has KV cache of kind CrossAttentionSpec"):
        check(kv_spec("CrossAttentionSpec"))
    with pytest.raises(LayoutError, match="does not keep for later requests"):
        check(kv_spec("SlidingWindowMLASpec", sliding_window=8, prefix_cacheable=False))
    with pytest.raises(LayoutError, match="does not keep for later requests"):
        check(window, enable_kv_transfer=False)
    with pytest.raises(LayoutError, match="--mamba-cache-mode align"):
        check(kv_spec("MambaSpec", mamba_cache_mode="none"))
    with pytest.raises(ConfigError, match=r"load: .* tiny \(KV cache: full, window\).*async"):
        check(window, load="sync")
    with pytest.raises(ConfigError, match=r"load: .* \(KV cache: full, window\).*async"):
        check(window, load="layers")
    mixed = kv_spec("UniformTypeKVCacheSpecs")
    mixed.kv_cache_specs = {"m": window, "n": kv_spec("FullAttentionSpec")}
    vllm_config, kv_config = configs()
    group = SimpleNamespace(layer_names=["m", "n"], kv_cache_spec=mixed)
    kv_config.kv_cache_groups.append(group)
    with pytest.raises(LayoutError, match="of kind FullAttentionSpec, SlidingWindowSpec"):
        check_groups(vllm_config, kv_config, load="async")
    vllm_config, kv_config = configs()
    vllm_config.speculative_config = SimpleNamespace(model="draft")
    check_groups(vllm_config, kv_config, load="async")
    with pytest.raises(
        ConfigError, match=r"load: the layers of draft models do not report .*async"
    ):
        check_groups(vllm_config, kv_config, load="layers")
    state = kv_spec("MambaSpec", mamba_cache_mode="align")
    kv_config.kv_cache_groups = [SimpleNamespace(layer_names=["m"], kv_cache_spec=state)]
    with pytest.raises(ConfigError, match="--speculative-config: with drafts"):
        check_groups(vllm_config, kv_config, load="async")
    vllm_config, kv_config = configs()
    kv_config.hash_block_size = 3
    with pytest.raises(LayoutError, match="hashes every 3 tokens, but blocks have 4"):
        check_groups(vllm_config, kv_config, load="async")


def test_layers_that_do_not_announce_their_reads_are_refused() -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention import Attention

    vllm_config, _ = configs()
    layers = vllm_config.compilation_config.static_forward_context
    layers.update(good=object.__new__(Attention), other=SimpleNamespace())
    check_layers(vllm_config, ["good"])
    with pytest.raises(
        ConfigError, match=r"load: other, a SimpleNamespace, does not report .*async"
    ):
        check_layers(vllm_config, ["good", "other"])


def test_layers_are_waited_for_one_by_one_where_each_of_them_runs() -> None:
    """A graph of the whole forward pass runs none of the hooks, micro-batches two at a time."""

    def context(mode: str, *, metadata: Any = ("x",), ubatches: Any = None) -> Any:
        runs = SimpleNamespace(name=mode)
        return SimpleNamespace(
            cudagraph_runtime_mode=runs, attn_metadata=metadata, ubatch_slices=ubatches
        )

    assert runs_layers(context("NONE"))
    assert runs_layers(context("PIECEWISE"))
    assert not runs_layers(context("FULL"))
    assert not runs_layers(context("NONE", metadata=None))  # how one way of vLLM's shows a graph
    assert not runs_layers(context("NONE", ubatches=[1, 2]))
    assert not runs_layers(SimpleNamespace())


def test_layers_of_one_group_may_have_sizes_and_parts_of_their_own() -> None:
    spec = kv_spec("UniformTypeKVCacheSpecs")
    mla = kv_spec("MLAAttentionSpec", page_size_bytes=128, unpadded_page_size_bytes=96)
    plain = kv_spec("FullAttentionSpec", page_size_bytes=32)
    spec.kv_cache_specs = {"l0": plain, "l1": mla}
    group = SimpleNamespace(layer_names=["l0", "l1"], kv_cache_spec=spec)
    wide = torch.zeros(5, 128, dtype=torch.uint8)[:, :96]
    pages = group_pages(group, {"l0": torch.zeros(5, 8), "l1": wide}, blocks=5)
    assert pages is not None
    assert pages.describe() == "l0=32;l1=96"
    with pytest.raises(LayoutError, match="0 KV tensors for l1"):
        group_pages(group, {"l0": torch.zeros(5, 8)}, blocks=5)
    state = kv_spec("MambaSpec", shapes=((2, 3), (4,)), dtypes=(torch.int16, torch.float32))
    group = SimpleNamespace(layer_names=["s"], kv_cache_spec=state)
    parts = [torch.zeros(5, 2, 3, dtype=torch.int16), torch.zeros(5, 4)]
    pages = group_pages(group, {"s": parts}, blocks=5)
    assert pages is not None
    assert pages.describe() == "s.0=12;s.1=16"
    whole = group_pages(group, {"s": torch.zeros(5, 40, dtype=torch.int8)[:, :28]}, blocks=5)
    assert whole is not None
    assert whole.describe() == "s=28"
    assert group_pages(SimpleNamespace(layer_names=[], kv_cache_spec=state), {}, blocks=5) is None


def test_a_vllm_without_a_needed_method_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"lack handle_preemptions, needed for fencing saves"):
        check_features(object)


# ---- weights


def safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [begin, begin + len(data)],
        }
        begin += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights.json"


def test_other_weights_have_another_digest(tmp_path: Path, cache: Path) -> None:
    base = {"a": bytes(100_000), "b": bytes(1000), "c": bytes(50)}
    variants = [base, {**base, "a": b"\1" * 100_000}, {**base, "c": b"\1" * 50}, {**base, "d": b""}]
    digests = []
    for index, tensors in enumerate([*variants, base]):
        safetensors(tmp_path / str(index) / "model.safetensors", tensors)
        digests.append(weights_digest(tmp_path / str(index), cache=cache))
    assert digests[-1] == digests[0]
    assert len(set(digests)) == len(variants)


def test_changed_weights_under_the_same_path_are_noticed(tmp_path: Path, cache: Path) -> None:
    file = safetensors(tmp_path / "m" / "model.safetensors", {"a": bytes(9000)})
    first = weights_digest(tmp_path / "m", cache=cache)
    stat = file.stat()
    safetensors(file, {"a": b"\7" * 9000})
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights_digest(tmp_path / "m", cache=cache) != first


def test_files_that_did_not_change_are_not_read_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors(tmp_path / "m" / "model.safetensors", {"a": bytes(9000)})
    first = weights_digest(tmp_path / "m", cache=cache)

    def unread(*_: object) -> str:
        raise AssertionError("it was read")

    monkeypatch.setattr(weights, "_file_digest", unread)
    assert weights_digest(tmp_path / "m", cache=cache) == first
    cache.write_text("not JSON")
    with pytest.raises(AssertionError, match="it was read"):
        weights_digest(tmp_path / "m", cache=cache)


READER = """
import sys
from kvladder.connectors.weights import read_weights_digest
from kvladder.errors import ConfigError
for line in sys.stdin:
    try:
        print(read_weights_digest(line.strip()), flush=True)
    except ConfigError as error:
        print(error, flush=True)
"""


def swapped_file(folder: Path) -> None:
    safetensors(folder / "new", {"a": b"\7" * 9000}).replace(folder / "model.safetensors")


def written_file(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\7")


def swapped_folder(folder: Path) -> None:
    folder.rename(folder.with_name("old"))
    folder.with_name("other").rename(folder)


def swapped_link(folder: Path) -> None:
    link = folder.with_name("link")
    (aside := link.with_name("aside")).symlink_to(folder.with_name("other"))
    aside.replace(link)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["m", "link"])
@pytest.mark.parametrize("change", [swapped_file, written_file, swapped_folder, swapped_link])
def test_weights_replaced_since_the_process_began_are_refused(
    tmp_path: Path, named: str, change: Callable[[Path], None]
) -> None:
    """The engine reads them at an unknown time in between, so its weights are not known."""
    for name, content in (("m", b"\1"), ("other", b"\2")):
        file = safetensors(tmp_path / name / "model.safetensors", {"a": content * 9000})
    (tmp_path / "link").symlink_to(tmp_path / "m")
    until(lambda: time.time() > file.lstat().st_ctime + 0.1)  # the start counts in 10 ms
    with subprocess.Popen(
        [sys.executable, "-c", READER],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:

        def told() -> str:
            assert child.stdin is not None
            assert child.stdout is not None
            print(tmp_path / named, file=child.stdin, flush=True)
            return child.stdout.readline()

        first = told()
        assert re.fullmatch("[0-9a-f]{64}\n", first)
        (tmp_path / named / "README.md").write_text("it is not read")
        assert told() == first
        change(tmp_path / "m")
        concerned = named == "link" or change is not swapped_link
        assert ("was replaced after the engine began" in told()) == concerned
        assert child.stdin is not None
        child.stdin.close()


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_one_changed_byte_anywhere_changes_the_digest(
    tmp_path: Path, cache: Path, suffix: str
) -> None:
    whole = 200_000
    found: set[str] = set()
    for at in (None, 0, 1, 4999, whole // 3, whole - 1):
        data = bytearray(whole)
        if at is not None:
            data[at] = 1
        file = safetensors(tmp_path / f"{at}" / "model.safetensors", {"a": bytes(data)})
        file.rename(file.with_suffix(suffix))
        found.add(weights_digest(file.parent, cache=cache))
    assert len(found) == 6


def test_an_adapter_with_another_scale_has_another_name(tmp_path: Path, cache: Path) -> None:
    safetensors(tmp_path / "adapter_model.safetensors", {"a": bytes(100)})
    found = {weights_digest(tmp_path, cache=cache)}
    for alpha in (16, 32):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
        found.add(weights_digest(tmp_path, cache=cache))
    assert len(found) == 3


def test_only_files_that_an_engine_loads_change_the_digest(tmp_path: Path, cache: Path) -> None:
    """Files beside the configuration count; a trainer's other files beside or below them do not."""
    for name in ("training_args.bin", "optimizer.pt", "checkpoint-500/adapter_model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"old")
    below = weights_digest(tmp_path, cache=cache)
    (tmp_path / "checkpoint-500" / "adapter_model.safetensors").write_bytes(b"other")
    assert weights_digest(tmp_path, cache=cache) != below, "there is nothing else to load"
    found = set[str]()
    for content in (b"one", b"two"):
        (tmp_path / "adapter_model.bin").write_bytes(content)
        found.add(weights_digest(tmp_path, cache=cache))
    assert len(found) == 2
    for file in ("training_args.bin", "optimizer.pt", "checkpoint-500/adapter_model.safetensors"):
        (tmp_path / file).write_bytes(b"new")
        found.add(weights_digest(tmp_path, cache=cache))
    assert len(found) == 2


def test_other_formats_and_damaged_headers_are_read_as_well(tmp_path: Path, cache: Path) -> None:
    found = set()
    for index, content in enumerate([b"", b"abc", bytes(3_000_000), b"\xff" * 3_000_000]):
        for suffix in (".bin", ".safetensors"):
            folder = tmp_path / f"{index}{suffix}"
            folder.mkdir()
            (folder / f"x{suffix}").write_bytes(content)
            found.add(weights_digest(folder, cache=cache))
    assert len(found) == 8


def test_an_index_changes_the_digest_only_by_the_files_it_leaves_out(
    tmp_path: Path, cache: Path
) -> None:
    for name in ("a", "b"):
        safetensors(tmp_path / f"{name}.safetensors", {name: bytes(100)})
    index = tmp_path / "model.safetensors.index.json"
    whole = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    plain = weights_digest(tmp_path, cache=cache)
    for text in (
        *map(json.dumps, (whole, {"metadata": {"total_size": 1}, **whole}, {}, [], 1)),
        *('{"weight_map": {"x": "gone.safetensors"}}', '{"weight_map": {"x": []}}', "\0", ""),
    ):
        index.write_text(text)
        assert weights_digest(tmp_path, cache=cache) == plain, text
    index.write_text('{"weight_map": {"x": "a.safetensors"}}')
    assert weights_digest(tmp_path, cache=cache) != plain, "b is not loaded"
    assert weights_digest(tmp_path / "a.safetensors", cache=cache) != plain


def test_a_directory_without_weights_asks_for_a_fingerprint(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.fingerprint: no weights in .*text of your own"):
        weights_digest(tmp_path, cache=cache)
    with pytest.raises(ConfigError, match="no weights in .*gone.safetensors"):
        weights_digest(tmp_path / "gone.safetensors", cache=cache)


def test_a_model_that_was_never_downloaded_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ConfigError, match="weights of model no/such are not found"):
        weights.downloaded("no/such", cache_dir=str(tmp_path))


# ---- the rest


def test_the_plugin_registers_the_connector_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, tuple[str, str]] = {}

    def register_connector(name: str, module: str, cls: str) -> None:
        if name in registered:
            raise ValueError("already registered")
        registered[name] = (module, cls)

    factory = SimpleNamespace(
        KVConnectorFactory=SimpleNamespace(register_connector=register_connector)
    )
    path = ["vllm", "distributed", "kv_transfer", "kv_connector", "factory"]
    for end in range(1, len(path) + 1):
        monkeypatch.setitem(sys.modules, ".".join(path[:end]), factory)
    vllm_plugin.register()
    vllm_plugin.register()
    assert registered == {"KVLadderConnector": ("kvladder.connectors.vllm", "KVLadderConnector")}
