"""What clients and servers need: a small model with a tokenizer, and a trace of requests."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

MODEL = "MODEL"
"""The model's folder and, as clients run beside it, its name."""
BLOCK_TOKENS = 32
TOKENS_MAX = 2048
"""The longest prompt and answer together."""
CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiou"
SPACE, NEWLINE = "Ġ", "Ċ"
"""A space and the end of a line, as byte-level tokenizers write them."""
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def merges() -> list[tuple[str, str]]:
    """Return the merges of a byte-level tokenizer: 10,000 words of two syllables are one token.

    LMCache's ``kv-tier-pressure`` needs 8,000 words with a token each. Everything else is split
    into syllables and ASCII characters.
    """
    syllables = [a + b for a, b in product(CONSONANTS, VOWELS)]
    found = [(syllable[0], syllable[1]) for syllable in syllables]
    found += [(SPACE, syllable) for syllable in syllables]
    return found + [(SPACE + one, other) for one, other in product(syllables, syllables)]


def make_tokenizer(folder: Path) -> int:
    """Save a tokenizer with a chat template in a folder; return the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(code) for code in range(33, 127)] + [SPACE, NEWLINE]
    joined = [one + other for one, other in merges()]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters, *joined])}
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges(), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": TOKENS_MAX,
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return len(vocabulary)


def make_hub(folder: Path, model: Path) -> None:
    """Make a cache of Hugging Face's hub in a folder, as if ``MODEL`` had been downloaded.

    aiperf's child processes look for tokenizers only there.
    """
    revision = "0" * 40
    place = folder / "hub" / f"models--{MODEL}"
    (place / "snapshots").mkdir(parents=True)
    (place / "snapshots" / revision).symlink_to(model)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(revision)


def make_model(folder: Path, seed: int = 0) -> None:
    """Save a random Llama of about 20 million parameters with its tokenizer in a folder.

    Its weights are larger than a trained model's, so its answer depends on the whole prompt.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    config = LlamaConfig(
        vocab_size=make_tokenizer(folder),
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=TOKENS_MAX,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    made: Any = LlamaForCausalLM(config)
    made.save_pretrained(folder)


def conversations(
    *, sessions: int = 6, turns: int = 4, between_s: float = 0.5, seed: int = 0
) -> list[dict[str, Any]]:
    """Return a trace in Mooncake's format: conversations that grow, over one shared system prompt.

    Timestamps are milliseconds, a block has ``BLOCK_TOKENS`` tokens, and requests arrive every
    ``between_s``, in the order of their turns.
    """
    draw = Random(seed)
    system = [*range(4)]
    unused = 1000
    contexts = [[*system] for _ in range(sessions)]
    lines: list[dict[str, Any]] = []
    for turn in range(turns):
        for context in contexts:
            blocks = draw.randint(10, 14) if not turn else draw.randint(1, 3)
            context += range(unused, unused + blocks)
            unused += blocks
            lines.append(
                {
                    "timestamp": round(1000 * between_s * len(lines)),
                    "input_length": len(context) * BLOCK_TOKENS,
                    "output_length": 8,
                    "hash_ids": [*context],
                }
            )
    return lines


def write_trace(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a trace as JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
