"""Trains a small Llama on several ranks: tensor parallel layers, and the loss of logits that no rank has whole.

    torchrun --nproc-per-node 2 examples/parallel.py [--steps 20]

With a GPU for each rank the ranks talk over NCCL, else they are processes on the CPU, over gloo. torch's own
`parallelize_module` shards the layers; tk's ops run on each rank's part. The logits stay sharded over the vocabulary:
tk.cross_entropy reduces a few numbers of each row over the ranks. First the loss and the gradients are compared with
those of one process. Takes 1, 2 or 4 ranks.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tk

WIDTH, HEADS, KV_HEADS, HIDDEN, VOCABULARY, LAYERS = 256, 8, 4, 512, 250, 2
HEAD_SIZE = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return tk.rms_norm(x, (WIDTH,), self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # As many heads as this rank has: each is whole on one rank, so attention needs no communication.
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = tk.rope(q, cos, sin), tk.rope(k, cos, sin)
        y = tk.sdpa(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(tk.swiglu(self.gate(x), self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.norms = Attention(), MLP(), nn.ModuleList(RMSNorm() for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        return x + self.mlp(self.norms[1](x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S] -> logits [B, S, VOCABULARY], sharded over the last where the model is."""
        angles = torch.outer(
            torch.arange(tokens.shape[1], device=tokens.device),
            1e4 ** -(torch.arange(0, HEAD_SIZE, 2, device=tokens.device) / HEAD_SIZE),
        )
        x, cos, sin = self.tokens(tokens), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Each pair of products is sharded by the outputs of the first and the inputs of the second: one all_reduce."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    layers = dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), columns)
    layers |= dict.fromkeys(("attention.out", "mlp.down"), rows)
    for block in model.blocks:
        parallelize_module(block, mesh, layers)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, ends)


def loss_of(model: Llama, tokens: Tensor) -> Tensor:
    """Of each next token. Of a parallel model a DTensor, which is the same on all ranks."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return tk.cross_entropy(logits, tokens[:, 1:].flatten())


def batch(step: int, device: torch.device, B: int = 4, S: int = 64) -> Tensor:
    """Each token follows from the one before it. All ranks draw the same."""
    tokens = [torch.randint(VOCABULARY, (B,), generator=torch.Generator().manual_seed(step))]
    for _ in range(S):
        tokens.append((7 * tokens[-1] + 3) % VOCABULARY)
    return torch.stack(tokens, 1).to(device)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def difference(model: Llama, sharded: Llama, device: torch.device) -> float:
    """The largest difference between one process's loss or gradients and the sharded model's, as a share of the largest
    element."""
    tokens = batch(0, device)
    losses = [loss_of(m, tokens) for m in (model, sharded)]
    for loss in losses:
        loss.backward()
    pairs = [(losses[0].detach(), whole(losses[1]).detach())]
    for one, several in zip(model.parameters(), sharded.parameters(), strict=True):
        pairs.append((one.grad, whole(several.grad)))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def train(steps: int, mesh: DeviceMesh, device: torch.device) -> tuple[float, list[float]]:
    """(the difference from one process, the loss of each step)"""
    torch.manual_seed(0)  # all ranks make the same model, then each keeps its part
    model = Llama().to(device)
    sharded = parallel(copy.deepcopy(model), mesh)
    differ = difference(model, sharded, device)
    # Not foreach: that takes no list of parameters of which only some are DTensors.
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(sharded, batch(step, device))
        loss.backward()
        optimizer.step()
        losses.append(whole(loss).item())
    return differ, losses


def main(steps: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if KV_HEADS % world:
        raise SystemExit(f"{world} ranks do not divide {KV_HEADS} heads of keys and values: start 1, 2 or 4")
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    mesh = init_device_mesh(device.type, (world,))
    differ, losses = train(steps, mesh, device)
    if rank == 0:
        print(f"{world} ranks, {dist.get_backend()}: differs from one process by {differ:.1e}")
        for step, loss in enumerate(losses):
            if step % 5 == 0 or step == steps - 1:
                print(f"step {step:3}: loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
