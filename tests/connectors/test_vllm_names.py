"""The names of an engine's blocks cover all of its settings, except listed ones with reasons."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvladder.connectors.naming import LIBRARIES_SWITCHES, folder_fields
from kvladder.connectors.vllm.identity import fingerprint as vllm_fingerprint
from kvladder.connectors.vllm.identity.fingerprint import LEFT_OUT, left_out, model_fields
from kvladder.connectors.vllm.start import tensor_fields
from kvladder.connectors.weights import SUFFIXES
from kvladder.gpu.copy.pages import BlockPages
from tests.connectors.arguments import ELSEWHERE
from tests.connectors.scripted import configs
from tests.patience import PATIENCE_S, RUN_S
from tests.vllm.harness import HERE, environment

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md"
SETTINGS = left_out("settings")
SWITCHES = left_out("switches")
NEWER = {
    "CacheConfig.simple_cpu_offload_num_blocks",
    "VllmConfig.watchdog_config",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE",
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES",
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
    "VLLM_REQUEST_BODY_LOG_LEVEL",
}
"""Settings that vLLM 0.32 does not have yet."""

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


def fields_of(**changes: Any) -> dict[str, str]:
    """Return the names of an engine with another value of ``part__option``."""
    vllm_config, _ = configs()
    for name, value in changes.items():
        part, _, option = name.partition("__")
        setattr(getattr(vllm_config, part) if option else vllm_config, option or part, value)
    return model_fields(vllm_config)


@pytest.mark.slow
@needs_vllm
def test_every_setting_that_changes_the_bytes_changes_the_name() -> None:
    plain = fields_of()
    assert fields_of() == plain
    rope = SimpleNamespace(to_dict=lambda: {"rope_theta": 5, "_name_or_path": "x"})
    again = SimpleNamespace(to_dict=lambda: {"rope_theta": 5, "transformers_version": "5"})
    changed = [
        fields_of(model_config__model="other"),
        fields_of(model_config__dtype="float16"),
        fields_of(model_config__quantization="fp8"),
        fields_of(model_config__of_a_later_vllm=1),
        fields_of(model_config__original_max_model_len=-1),
        fields_of(cache_config__cache_dtype="fp8"),
        fields_of(cache_config__prefix_caching_hash_algo="sha256_cbor"),
        fields_of(model_config__hf_config=rope),
    ]
    assert plain not in changed
    assert len({json.dumps(one) for one in changed}) == len(changed)
    assert fields_of(model_config__hf_config=again) == changed[-1]
    drafts = [
        fields_of(speculative_config=SimpleNamespace(method=method, model=method))
        for method in ("ngram", "suffix", "eagle", "draft_model")
    ]
    assert drafts[:2] == [plain, plain]  # they keep no KV
    assert plain not in drafts[2:]
    assert drafts[2] != drafts[3]


@dataclass
class Own:
    """Settings of a platform's own."""

    inner: Any = None


class Color(Enum):
    """One of few."""

    RED = 1


def test_values_of_every_kind_have_the_same_text_in_every_process(tmp_path: Path) -> None:
    def text(value: Any) -> str:
        return vllm_fingerprint.settings(SimpleNamespace(part=SimpleNamespace(one=value)))[
            "part.one"
        ]

    kinds: list[Any] = [
        None, True, 1, 0.5, "x", b"x", Color.RED, torch.float16, torch.device("cpu"), [1, [2]],
        {"b": 1, "a": {"_name_or_path": "/x", "c": 2}}, {"z", "y"}, Own, Own(Own(3)), text,
        lambda config: config, SimpleNamespace(to_dict=lambda: {"a": 1}), object(),
        SimpleNamespace(compute_hash=lambda: "own"),
    ]  # fmt: skip
    assert len({text(kind) for kind in kinds}) == len(kinds)
    assert text({"a": 1, "b": 2}) == text({"b": 2, "a": 1})
    assert text({"y", "z"}) == text({"z", "y"}) == '["y", "z"]'
    assert text({"_name_or_path": "x"}) == text({"_commit_hash": "y", "transformers_version": "z"})
    assert not any(re.search("0x[0-9a-f]", text(kind)) for kind in kinds)
    itself: list[Any] = []
    itself.append(itself)
    assert text(itself) == '["above"]'
    file = tmp_path / "scales.json"
    file.write_text("1")
    one = text({"path": str(file)})
    file.write_text("2")
    assert text({"path": str(file)}) != one, "a path of a file stands for what is in it"
    prompt = f"what is in this picture / {'video' * 100}"
    assert text(prompt) == json.dumps(prompt), "too long for a path"


COUNTING = [
    "config.json", "params.json", "inner/config.json", "of_a_later_model", "original/consolidated",
    "adapter_config.json", "quantize_config.json", "hf_quant_config.json",
]  # fmt: skip
"""Files of a model's folder that may change its KV, whatever else is in it."""
SILENT = [
    "model.safetensors", "inner/old.pth", "README.md", ".git/HEAD", "flax_model.msgpack",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja",
    "generation_config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json",
    "model.safetensors.index.fp16.json",
]  # fmt: skip
"""Files that never change KV, or that another field covers."""
TOKENIZER = [
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v3", "vocab.txt",
    "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model",
    "sentencepiece.bpe.model", "qwen.tiktoken",
]  # fmt: skip
"""Files that change it only where something reads the tokenizer that places more than tokens."""
READERS = [
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "modeling_own.py", "tekken.json",
]  # fmt: skip
"""Files of parts that read a tokenizer; each may change KV itself."""


def changed(folder: Path, name: str) -> bool:
    """Return whether the fields of a model's folder change without a file, or with another one."""
    plain, before = folder_fields({"model": folder}), (folder / name).read_text()
    (folder / name).write_text(f"{before} changed")
    other = folder_fields({"model": folder}) != plain
    (folder / name).unlink()
    assert (folder_fields({"model": folder}) != plain) == other, name
    (folder / name).write_text(before)
    assert folder_fields({"model": folder}) == plain
    return other


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model's folder with a file of each kind, except files that read a tokenizer."""
    for name in [*COUNTING, *SILENT, *TOKENIZER]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": 1, "quantization_config": {}}')
    (tmp_path / "inner" / "back").symlink_to(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_files_that_cannot_change_kv_name_no_blocks(folder: Path) -> None:
    for name in COUNTING:
        assert changed(folder, name), name
    for name in [*SILENT, *TOKENIZER]:
        assert not changed(folder, name), name
        parts = Path(name).parts
        assert [r for p, r in left_out("files").items() for q in parts if fnmatch(q, p)], name
    plain = folder_fields({"model": folder})
    (folder / "added.json").write_text("{}")
    assert folder_fields({"model": folder}) != plain


@pytest.mark.slow
@pytest.mark.parametrize("reader", [*READERS, "config.json"])
def test_a_tokenizer_names_blocks_where_another_part_reads_it(folder: Path, reader: str) -> None:
    (folder / reader).write_text('{"vision_config": {}}')
    for name in [*COUNTING, reader, *TOKENIZER]:
        assert changed(folder, name) or name == reader == "config.json", name
    for name in SILENT:
        assert not changed(folder, name), name


@pytest.mark.parametrize("key", ["auto_map", "text_config", "audio_config", "mm_vision_tower"])
def test_a_composite_models_tokenizer_names_blocks(folder: Path, key: str) -> None:
    (folder / "config.json").write_text(json.dumps({key: {}}))
    assert changed(folder, "tokenizer.json")


@needs_vllm
def test_a_tokenizer_names_blocks_where_vllm_reads_it(folder: Path) -> None:
    def named(**changes: Any) -> dict[str, str]:
        return fields_of(model_config__model=str(folder), **changes)

    draft = SimpleNamespace(method="draft_model", draft_model_config=SimpleNamespace(model="x"))
    for reads, changes in (
        (False, {}),
        (True, {"model_config__multimodal_config": SimpleNamespace()}),
        (True, {"model_config__trust_remote_code": True}),
        (True, {"speculative_config": draft}),
    ):
        assert ("model.model/tokenizer.json" in named(**changes)) == reads


@needs_vllm
def test_folders_of_model_tokenizer_draft_and_code_name_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(name: str, file: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(name)
        return str(tmp_path / name)

    monkeypatch.chdir(tmp_path)
    folder("org", "inner")
    folder("org/code", "modeling.py")
    names = ["config.json", "tokenizer.json", "draft.json", "modeling.py"]
    vllm_config, _ = configs()
    model = vllm_config.model_config
    model.model, model.tokenizer = folder("model", names[0]), folder("signs", names[1])
    model.hf_config = SimpleNamespace(
        to_dict=dict, auto_map={"AutoModel": "org/code--modeling.Own", "AutoX": ["own.X", None]}
    )
    draft = SimpleNamespace(model=folder("draft", names[2]))
    vllm_config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
    found = model_fields(vllm_config)
    assert {Path(name).name for name in found if "/" in name} == set(names)
    (tmp_path / "org" / "code" / names[3]).write_text("changed")
    assert model_fields(vllm_config) != found


@needs_vllm
def test_versions_and_plugins_name_blocks_on_every_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = vllm_fingerprint.code_fields()
    assert {"vllm", "torch", "transformers", "plugins"} <= set(plain)
    version = metadata.version
    for name in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(
                metadata, "version", lambda dist, own=name: "9" if dist == own else version(dist)
            )
            assert vllm_fingerprint.code_fields() != plain
    with monkeypatch.context() as patch:
        patch.setattr(vllm_fingerprint, "vllm_version", lambda: "9")
        assert vllm_fingerprint.code_fields() != plain
    point = SimpleNamespace(dist=SimpleNamespace(name="own-models", version="1"))
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if "general" in group else []
    )
    assert vllm_fingerprint.code_fields()["plugins"] == "own-models 1"


def test_the_kind_of_device_names_blocks() -> None:
    vllm_config, _ = configs()
    pages = BlockPages.of({"l0": torch.zeros(5, 8)}, blocks=5)
    assert tensor_fields(vllm_config, {0: pages}, ["l0"])["device"] == "cpu"


# ---- with vLLM's own classes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny LLaVA and a link to it."""
    found = tmp_path_factory.mktemp("names") / "model"
    command = [sys.executable, str(HERE / "pictures.py"), str(found)]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=PATIENCE_S)
    (found.parent / "other").symlink_to(found)
    return found


def named(model: Path, results: Path, *only: str, **env: str) -> dict[str, Any]:
    """Return the results of ``arguments.py``."""
    paths = [Path(__file__).parent / "arguments.py", model, model.parent / "other", results]
    command = [sys.executable, *map(str, paths), *only]
    given = environment(VLLM_TARGET_DEVICE="cpu", **env)
    run = subprocess.run(command, env=given, capture_output=True, text=True, timeout=RUN_S)
    assert results.exists(), run.stderr[-3000:]
    found: dict[str, Any] = json.loads(results.read_text())
    return found


@cache
def allowed() -> set[str]:
    """The arguments that may change, as the page lists them."""
    section = PAGE.read_text().split("### What may change")[1].split("\n#")[0]
    return {flag.replace("-", "_") for flag in re.findall(r"`--([a-z0-9-]+)`", section)}


@needs_vllm
@pytest.mark.slow
def test_each_engine_argument_names_the_blocks_or_is_listed_on_the_page(
    model: Path, tmp_path: Path
) -> None:
    found = named(model, tmp_path / "1", PYTHONHASHSEED="1")
    aside = {"VLLM_PORT": "4711", "PYTHONHASHSEED": "2"}
    again = named(model, tmp_path / "2", "plain", **aside)
    plain = found.pop("")
    assert again.pop("") == plain, "the same engine has the same name in every process"
    refused = {name: text for name, text in found.items() if text not in ("same", "other")}
    assert not refused, "say in arguments.py how to change it, or where that can be done"
    same = {name for name, text in found.items() if text == "same" and name[0] != "_"}
    elsewhere = {name for name, field in ELSEWHERE.items() if field in SETTINGS}
    assert same | elsewhere == allowed()


def tree(value: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return an object of each of vLLM's classes of settings in a configuration, by name."""
    if is_dataclass(value) and not hasattr(value, "to_dict") and type(value).__name__ not in found:
        found[type(value).__name__] = value
        for field in fields(value):
            tree(getattr(value, field.name, None), found)
    return found


@needs_vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_field_of_vllms_configuration_names_the_blocks_or_is_left_out() -> None:
    from vllm import config as vllm

    whole = vllm.VllmConfig(device_config=vllm.DeviceConfig("cpu"))
    found = tree(whole, {})
    for name in ("ModelConfig", "LoRAConfig", "SpeculativeConfig", "MultiModalConfig"):
        kind = getattr(vllm, name, None) or getattr(vllm.multimodal, name)
        found[name] = object.__new__(kind)
    drafts = SimpleNamespace(method="eagle")
    for kind, part in found.items():
        parent = SimpleNamespace(part=part, speculative_config=drafts)
        above = whole if part is whole else parent
        if kind == "ModelConfig":  # more than its fields is read of this one
            part.__dict__.update({field.name: None for field in fields(part)})
        plain = vllm_fingerprint.settings(above)
        for field in fields(part):
            before, there = getattr(part, field.name, None), field.name in vars(part)
            object.__setattr__(part, field.name, SimpleNamespace(method="changed"))
            bound = vllm_fingerprint.settings(above) != plain
            if there:
                object.__setattr__(part, field.name, before)
            else:
                object.__delattr__(part, field.name)
            where = f"{kind}.{field.name}"
            assert bound != (where in SETTINGS), where
    classes = {name for name in found if is_dataclass(found[name])}
    known = {f"{kind}.{field.name}" for kind in classes for field in fields(found[kind])}
    assert set(SETTINGS) - NEWER <= known, "what is left out is there"
    becomes = {name for name in ELSEWHERE.values() if name.partition(".")[0] in classes}
    assert becomes - NEWER - {"KernelConfig.monokernel"} <= known


@needs_vllm
@pytest.mark.filterwarnings("ignore")
def test_each_switch_of_the_environment_names_the_blocks_or_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.envs import environment_variables

    plain = vllm_fingerprint.switches()
    assert set(plain) == (set(environment_variables) - set(SWITCHES) | set(LIBRARIES_SWITCHES))
    assert set(SWITCHES) - NEWER <= set(environment_variables), "what is left out is there"
    for name in environment_variables:
        with monkeypatch.context() as patch:
            patch.setitem(environment_variables, name, lambda: "changed")
            assert (vllm_fingerprint.switches() != plain) == (name not in SWITCHES), name
    for name in LIBRARIES_SWITCHES:
        monkeypatch.setenv(name, "changed")
        assert vllm_fingerprint.switches()[name] != plain[name]


def test_each_list_gives_a_reason_once() -> None:
    assert {f"*{suffix}" for suffix in SUFFIXES} <= left_out("files").keys()
    for lists in LEFT_OUT.values():
        names = [name for text in lists.values() for name in text.split()]
        assert len(names) == len(set(names))
        assert all(len(reason) > 20 for reason in lists)
