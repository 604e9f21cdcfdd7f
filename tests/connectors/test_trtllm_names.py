"""The fields that separate the blocks of one TensorRT-LLM from those of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvladder.connectors import weights
from kvladder.connectors.naming import LIBRARIES_SWITCHES
from kvladder.connectors.trtllm import names
from tests.connectors.executor import args_of


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which nothing is set that counts."""
    for name in names.switches():
        monkeypatch.delenv(name)


def fields() -> dict[str, str]:
    """Return the fields that name blocks."""
    pages = names.pages_of({"kv": torch.zeros(4, 2, 2, 8)})
    layout = names.layout_of(args_of(), pages, tokens=16, ranks=1, fingerprint="w")
    return dict(layout.fields)


@pytest.mark.parametrize(
    "name",
    [
        *LIBRARIES_SWITCHES,
        *names.SWITCHES,
        "TRTLLM_ENABLE_ATTENTION_NVFP4_OUTPUT",
        "TLLM_OVERRIDE_LAYER_NUM",
        "TRTLLM_SOMETHING_NEW",
    ],
)
def test_a_switch_of_the_environment_names_blocks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = fields()
    monkeypatch.setenv(name, "1")
    assert fields() == {**before, f"environment.{name}": "1"}


@pytest.mark.parametrize(
    "name",
    [
        "TRTLLM_KVLADDER",
        "TRTLLM_KVLADDER_PATIENCE",
        "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR",
        "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY",
        "TLLM_DISAGG_INSTANCE_IDX",
        "TLLM_LOG_LEVEL",
        "HOME",
    ],
)
def test_settings_that_change_from_run_to_run_name_no_blocks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = fields()
    monkeypatch.setenv(name, "changed")
    assert fields() == before


def test_blocks_are_named_by_the_weights_of_the_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def downloaded(name: str, *, revision: str | None = None) -> Path:
        folder = tmp_path / str(revision)
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(f"{name} {revision}")
        return folder

    monkeypatch.setattr(weights, "downloaded", downloaded)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pages = names.pages_of({"kv": torch.zeros(4, 2, 2, 8)})
    found = {
        names.layout_of(args, pages, tokens=16, ranks=1, fingerprint="auto").fields["weights"]
        for args in (args_of("a/b"), args_of("a/b", revision="one"), args_of("a/b", revision="two"))
    }
    assert len(found) == 3


def test_each_argument_names_blocks_unless_it_is_listed_as_left_out() -> None:
    plain = names.arguments(args_of(max_seq_len=1, max_batch_size=1))
    assert plain != names.arguments(args_of(max_seq_len=2, max_batch_size=1))
    assert plain == names.arguments(args_of(max_seq_len=1, max_batch_size=2))
    changed = args_of(max_seq_len=1, max_batch_size=1)
    changed.kv_cache_config.dtype = "fp8"
    assert plain != names.arguments(changed)
    changed = args_of(max_seq_len=1, max_batch_size=1)
    changed.kv_cache_config.free_gpu_memory_fraction = 0.5
    assert plain == names.arguments(changed)
    assert all(names.LEFT_OUT.values())
