"""Prompts with pictures, for a tiny LLaVA: ``python pictures.py DIRECTORY`` makes one.

Its prompts are bytes; its pictures are noise, one for each number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

SIZE = 56
IMAGE = "<image>"


def without_torchvision() -> None:
    """Let vLLM process pictures without torchvision, by Pillow.

    Transformers looks for torchvision before the stub is installed, so that it does not use it.
    """
    from transformers.utils.import_utils import is_torchvision_available

    stubs = str(Path(__file__).parent / "stubs")
    if not is_torchvision_available():
        sys.path.insert(0, stubs)
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), stubs])


def make(directory: Path, seed: int = 1) -> None:
    """Save a tiny random LLaVA with its processor and a tokenizer of bytes."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for sign in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[sign] = len(vocabulary)
    vocabulary |= {f"<x{number}>": number for number in range(len(vocabulary), 1000)}
    signs = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    signs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    signs.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=signs, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    pixels = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    transformers.LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    eyes = transformers.CLIPVisionConfig(
        **sizes, num_attention_heads=2, image_size=SIZE, patch_size=14, projection_dim=64,
        initializer_range=0.3,
    )  # fmt: skip
    mouth = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=1024, max_position_embeddings=4096,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    whole = transformers.LlavaConfig(
        vision_config=eyes,
        text_config=mouth,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        dtype="float32",
        tie_word_embeddings=False,
    )
    transformers.LlavaForConditionalGeneration(whole).save_pretrained(directory)
    file, inner = directory / "model.safetensors", "vision_tower.vision_model."
    weights = {  # as checkpoints on the hub are, and as vLLM wants them
        name if inner in name else name.replace("vision_tower.", inner): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def picture(number: int) -> Any:
    """Noise."""
    from PIL import Image

    random = Random(number)
    return Image.frombytes("RGB", (SIZE, SIZE), random.randbytes(SIZE * SIZE * 3))


def look(
    engine: Any, *, prompts: list[tuple[str, list[int]]], uuid: str | None = None
) -> dict[str, Any]:
    """Answers to prompts with pictures, one after the other; all pictures under ``uuid``."""
    from vllm import SamplingParams

    before, sampling = engine.external_hits(), SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False
    )  # fmt: skip
    answers: list[list[int]] = []
    for text, numbers in prompts:
        prompt = {"prompt": text, "multi_modal_data": {"image": [*map(picture, numbers)]}}
        if uuid is not None:
            prompt["multi_modal_uuids"] = {"image": [uuid] * len(numbers)}
        [output] = engine.llm.generate([prompt], sampling, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    engine.half.settle()
    return {"tokens": answers, "external": engine.external_hits() - before}


def forget(engine: Any) -> None:
    """Empty vLLM's own caches, except that of encoded pictures."""
    engine.stats()
    engine.llm.reset_prefix_cache()
    engine.llm.reset_mm_cache()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
