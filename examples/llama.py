"""transformers' Llama through tk: results compared; prefill, decoding and a training step timed.

    python examples/llama.py [--device cuda] [--layers 4] [--compile] [--all]

The weights are random: nothing is downloaded. On CUDA the layers are those of Llama-3 8B, in bfloat16, and decoding
runs as a CUDA graph; on the CPU a small model shows that all of it works. Needs `pip install transformers`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tk

LLAMA_8B = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
SMALL = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2)
Step = Callable[[], Tensor]


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


def as_graph(step: Step) -> Step:
    """The same step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is set up by the first calls must not be recorded
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def milliseconds(step: Step, device: str, rounds: int) -> float:
    """The median."""
    for _ in range(3):
        step()
    taken = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# --- The comparison ---


def difference(a: Tensor, b: Tensor) -> float:
    """The largest, as a share of the largest value."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def compare(
    name: str, make: Callable[[Any], Step], model: nn.Module, device: str, settings: argparse.Namespace
) -> dict[str, float]:
    """Eager torch, the same through tk, and compiled: milliseconds of each, and how far tk's result is from torch's."""
    is_graph = device.startswith("cuda") and name.startswith("decode")
    finish = as_graph if is_graph else lambda step: step
    found: dict[str, float] = {}
    step = finish(make(model))
    expected = step().clone()
    found["torch"] = milliseconds(step, device, settings.rounds)
    if settings.compile and not is_graph:
        step = make(torch.compile(model))
        found["compiled"] = milliseconds(step, device, settings.rounds)
    with tk.use(model, only_faster=not settings.all):
        step = finish(make(model))
        found["difference"] = difference(step(), expected)
        found["tk"] = milliseconds(step, device, settings.rounds)
        if settings.compile and not is_graph:
            torch._dynamo.reset()
            found["tk compiled"] = milliseconds(make(torch.compile(model)), device, settings.rounds)
    torch._dynamo.reset()
    times = ", ".join(f"{key} {value:.2f} ms" for key, value in found.items() if key != "difference")
    print(f"{name}: {times}; {found['torch'] / found['tk']:.2f} × torch, off by {found['difference']:.1e}", flush=True)
    return found


def run(settings: argparse.Namespace) -> dict[str, dict[str, float]]:
    device = settings.device
    model = build(device, settings.layers)
    with tk.use(model, only_faster=not settings.all) as report:
        print(report)
    small = not device.startswith("cuda")
    length, batches, context = (16, (1, 2), 8) if small else (4096, (1, 4, 16, 64), 1024)
    found = {
        f"prefill {length}": compare(f"prefill {length}", lambda m: prefill(m, 1, length), model, device, settings)
    }
    for batch in batches:
        name = f"decode, batch {batch}"
        found[name] = compare(name, lambda m, batch=batch: decode(m, batch, context), model, device, settings)
    model.train()
    found["training step"] = compare("training step", lambda m: train(m, 1, length), model, device, settings)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="time torch.compile as well")
    parser.add_argument("--all", action="store_true", help="also what no measurement says is as fast")
    return parser.parse_args(given)


if __name__ == "__main__":
    run(arguments())
