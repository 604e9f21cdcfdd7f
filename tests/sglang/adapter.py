"""Make tiny random LoRA adapters for the tiny Llama: ``python adapter.py DIRECTORY ...``."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, RANK = 4, 256, 8
OUTPUTS = {"q_proj": 256, "v_proj": 128}


def make(directory: Path, seed: int) -> None:
    """Save an adapter large enough to change the model's answers, keys and values."""
    numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, outputs in OUTPUTS.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in (("A", (RANK, HIDDEN)), ("B", (outputs, RANK))):
                made = 0.3 * torch.randn(shape, generator=numbers)
                weights[f"{at}.lora_{half}.weight"] = made
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "m",
        "r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none",
        "target_modules": [*OUTPUTS],
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(told))


if __name__ == "__main__":
    for number, name in enumerate(sys.argv[1:]):
        make(Path(name), number)
