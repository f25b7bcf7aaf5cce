"""transformers' Llama through tk: results compared; prefill, decoding and a training step timed.

    python examples/llama.py [--device cuda] [--layers 4] [--compile] [--all]

The weights are random: nothing is downloaded. On CUDA the layers are those of Llama-3 8B, in bfloat16, and decoding
runs as a CUDA graph; on the CPU a small model shows that all of it works. Needs `pip install transformers`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from compared import Step, compare, parser
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tk

LLAMA_8B = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
SMALL = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2)


def build(device: str, layers: int) -> LlamaForCausalLM:
    is_cuda = device.startswith("cuda")
    sizes = dict(LLAMA_8B, vocab_size=128256) if is_cuda else dict(SMALL, vocab_size=1000)
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        rope_parameters=dict(rope_type="default", rope_theta=5e5),
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.bfloat16 if is_cuda else torch.float32).eval()


# --- What is timed ---


def prefill(model: Any, batch: int, length: int) -> Step:
    tokens = random_tokens(model, batch, length)

    @torch.no_grad()
    def step() -> Tensor:
        return model(tokens, use_cache=False, logits_to_keep=1).logits

    return step


def decode(model: Any, batch: int, context: int) -> Step:
    """One token for each sequence after ``context`` tokens: always the same step, which a CUDA graph can repeat."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(random_tokens(model, batch, context), past_key_values=cache, logits_to_keep=1)
    held = [(layer, layer.keys, layer.values) for layer in cache.layers]
    tokens = random_tokens(model, batch, 1)
    positions = torch.full((1, 1), context, device=tokens.device)

    @torch.no_grad()
    def step() -> Tensor:
        for layer, keys, values in held:
            layer.keys, layer.values = keys, values
        return model(tokens, past_key_values=cache, position_ids=positions).logits

    return step


def train(model: Any, batch: int, length: int) -> Step:
    tokens = random_tokens(model, batch, length + 1)

    def step() -> Tensor:
        model.zero_grad()
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return step


def random_tokens(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def run(settings: argparse.Namespace) -> dict[str, dict[str, float]]:
    model = build(settings.device, settings.layers)
    with tk.use(model, only_faster=not settings.all) as report:
        print(report)
    is_cuda = settings.device.startswith("cuda")
    length, batches, context = (4096, (1, 4, 16, 64), 1024) if is_cuda else (16, (1, 2), 8)
    name = f"prefill {length}"
    found = {name: compare(name, lambda m: prefill(m, 1, length), model, settings)}
    for batch in batches:
        name = f"decode, batch {batch}"
        found[name] = compare(name, lambda m, batch=batch: decode(m, batch, context), model, settings, is_cuda)
    model.train()
    found["training step"] = compare("training step", lambda m: train(m, 1, length), model, settings)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--layers", type=int, default=4)
    return options.parse_args(given)


if __name__ == "__main__":
    run(arguments())
