"""Make a tiny random model that vLLM can serve: ``python tiny_model.py DIRECTORY SEED``.

Its weights are larger than a trained model's would be, so that what it says depends on all that
it has read: with a wrong KV cache the answer is another one.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make(directory: Path, seed: int) -> None:
    """Save a Llama of 1.5 million parameters; other seeds are other weights of the same size."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
