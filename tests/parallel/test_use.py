"""tk.use on models that torch's engines parallelise: tensor and sequence parallel, FSDP2, checkpointing, pipelines; a
training step equals that of one process without tk."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from harness import Ranks, World
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from use_models import calls

import tk

WIDTH, HEADS, HIDDEN, VOCABULARY = 32, 4, 48, 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made() -> Llama:
    torch.manual_seed(7)
    return Llama()


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(3))


def tensor_parallel(model: Llama, world: World) -> Llama:
    mesh = world.mesh()
    layers = dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ColwiseParallel())
    layers |= dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, layers)
    ends = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, ends)


def sequence_parallel(model: Llama, world: World) -> Llama:
    """Between the products each rank has its part of the sequence, also in the norms."""
    mesh = world.mesh()
    inner = dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ColwiseParallel())
    rows = RowwiseParallel(output_layouts=Shard(1))
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {**inner, "attention.out": rows, "mlp.down": rows, "attention": gather, "mlp": gather,
            "norm": SequenceParallel(), "norm2": SequenceParallel()}  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)


def fsdp(model: Llama, world: World, **policies: Any) -> Llama:
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh(), **policies)
    fully_shard(model, mesh=world.mesh(), **policies)
    return model


def both(model: Llama, world: World) -> Llama:
    """FSDP2 over one dimension of the mesh, tensor parallel over the other."""
    mesh = world.mesh(2, world.size // 2, names=("data", "tensor"))
    layers = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], layers)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def checkpointed(model: Llama, world: World) -> Llama:
    for name, block in list(model.blocks.named_children()):
        setattr(model.blocks, name, checkpoint_wrapper(block))
    return fsdp(model, world)


ENGINES: dict[str, Callable[[Llama, World], Llama]] = {
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
    "FSDP2": fsdp,
    "FSDP2 and tensor parallel": both,
    "checkpointing under FSDP2": checkpointed,
}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """One of an optimiser: the loss, and all parameters after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    given = tokens()
    loss = F.cross_entropy(model(given[:, :-1].contiguous()).flatten(0, 1), given[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach(), [whole(p).detach().cpu() for p in model.parameters()]


def trained(rank: int, world: World, engine: str, order: str) -> dict[str, int]:
    """Raises where a step differs from that of one process without tk. Returns how often each op of tk is called."""
    expected_loss, expected = step(made())
    model = made()
    if order == "use first":
        tk.use(model)
    model = ENGINES[engine](model, world)
    if order == "use last":
        report = tk.use(model)
        assert not [r for r in report if r.reason and "DTensor" in r.reason], str(report)
    loss, parameters = step(model)
    torch.testing.assert_close(whole(loss), expected_loss)
    for mine, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-4)
    return calls(model, tokens()[:, 1:])


@pytest.mark.parametrize("order", ["use first", "use last"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_step_is_that_of_one_process(ranks: Ranks, engine: str, order: str) -> None:
    for found in ranks(4 if engine == "FSDP2 and tensor parallel" else 2, trained, engine, order):
        assert found["linear"] == 15, found
        assert found["rms_norm"] == 3, found
        assert found["layer_norm"] == 2, found


# --- What an engine does beside sharding ---


def of_bfloat16(rank: int, world: World, used: bool) -> Tensor:
    model = made()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp(model, world, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if used:
        tk.use(model)
    loss, parameters = step(model)
    return torch.cat([loss.float().reshape(1), *(p.flatten() for p in parameters)])


def test_mixed_precision_and_offload(ranks: Ranks) -> None:
    """As near to float32 as torch's own."""
    loss, parameters = step(made())
    exact = torch.cat([loss.reshape(1), *(p.flatten() for p in parameters)])
    theirs = max((x - exact).abs().max() for x in ranks(2, of_bfloat16, False))
    mine = max((x - exact).abs().max() for x in ranks(2, of_bfloat16, True))
    assert 0 < mine <= 2 * theirs


def undone(rank: int, world: World) -> None:
    model = tensor_parallel(made(), world)
    given = tokens()
    expected = model(given)
    report = tk.use(model)
    torch.testing.assert_close(model(given), expected)
    assert calls(model, given)
    report.undo()
    assert torch.equal(model(given), expected)
    assert not calls(model, given)


def test_undone_on_every_rank(ranks: Ranks) -> None:
    ranks(2, undone)


def saved_and_loaded(rank: int, world: World, folder: Path) -> None:
    """Under tensor parallel with tk, then under FSDP2 without."""
    model = tensor_parallel(made(), world)
    tk.use(model)
    step(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    other = fsdp(Llama(), world)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(mine), whole(theirs))


def test_a_checkpoint_of_one_engine_is_loaded_under_another(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, saved_and_loaded, tmp_path)


def in_stages(rank: int, world: World) -> Tensor | None:
    """Half of the layers on each rank; what the last one has."""
    torch.manual_seed(11)
    stages = [nn.Sequential(Block(), Block()) for _ in range(world.size)]
    model = copy.deepcopy(stages[rank])
    tk.use(model)
    stage = PipelineStage(model, rank, world.size, world.device)
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    x = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = functools.reduce(lambda y, f: f(y), stages, x)
        found = schedule.step(x) if rank == 0 else schedule.step()
    if found is not None:
        torch.testing.assert_close(found, expected)
    assert calls(model, x)["linear"] == 14
    return found


def test_stages_of_a_pipeline(ranks: Ranks) -> None:
    assert [x is None for x in ranks(2, in_stages)] == [True, False]


# --- Decisions that every rank makes alike ---


def by_a_sample(rank: int, world: World) -> None:
    """What a rank measures decides nothing about DTensors: another rank's collectives would not be met."""
    model = tensor_parallel(made(), world)
    report = tk.use(model, sample=tokens())
    ops = {m.op for m in report.measured}
    assert "sdpa" in ops  # of each rank's own heads
    assert "linear" not in ops


def test_distributed_calls_are_not_measured(ranks: Ranks) -> None:
    ranks(2, by_a_sample)
