"""Whole models of transformers, timm and torchvision, a UNet and a recommender, with random weights under tk.use,
against eager torch and, with ``--compiled``, torch.compile: inference eagerly and as a CUDA graph, decoding as a CUDA
graph, a training step.

tk's calls are chosen twice: measured with the very batch as a sample, and by tk's own rules. A result that differs by
more than the dtype allows is a failure. A row's label begins with its model's name (benchmarks/zoo_models.py).
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

import tk
from benchmarks.report import Figure, Goal, Report, Row
from benchmarks.runner import ROOT, Options
from benchmarks.zoo_models import MODELS, Inputs, Model
from tk.dropin import decisions

sys.path.append(str(ROOT / "examples"))
from compared import Step, difference, each_round, graphed

GOALS = {"eager": Goal(1.10, 0.97), "graph": Goal(1.12, 1.0), "training": Goal(1.10, 0.98)}
UNMEASURED = Goal(0.95, 0.95)
MEMORY = 1.05  # the most, as a share of torch's
TITLES = {"eager": "models, eagerly", "graph": "models, as a CUDA graph", "training": "models, a training step"}
DIFFERENCE = 0.05  # of the largest value, after many layers in bfloat16; of a loss, and of the norm of gradients
ROUTED_DIFFERENCE = 0.15  # in the L2 norm, where a few tokens may go to another expert
TURNS = 4  # of all ways
TURN_MS, MOST_ROUNDS = 100, 25  # of one way in a turn; two rounds at least
DECODED = (1, 32)  # batches
CONTEXT = 1024  # tokens before the one that is decoded
MOST_ON_CPU = 4  # samples of a batch


@dataclass(frozen=True)
class Place:
    """Where models run."""

    device: str

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_cuda else torch.float32


@dataclass(frozen=True)
class Case:
    """A model at a batch. kind: inference, decode or training. modes: the groups of its rows."""

    model: Model
    kind: str
    batch: int
    modes: tuple[str, ...]

    def label(self, mode: str) -> str:
        how = "decode graph" if self.kind == "decode" else mode
        return f"{self.model.name}, {how}, batch {self.batch}"

    def inputs(self, module: nn.Module, place: Place) -> Callable[[], Inputs]:
        """What makes the keywords of a call, always the same."""
        if self.kind == "decode":
            return decoded(self.model, module, place, self.batch)
        given = self.model.arguments(place.device, place.dtype, not place.is_cuda, self.batch)
        return lambda: given if self.kind == "training" else given | self.model.inference

    def step(self, module: nn.Module, inputs: Callable[[], Inputs]) -> Step:
        if self.kind != "training":
            return lambda: self.model.result(module(**inputs()))

        def train() -> Tensor:
            module.zero_grad()
            given = inputs()
            loss = self.model.loss(self.model.result(module(**given)), given)
            loss.backward()
            return loss.detach()

        return train

    def outcome(self, step: Step, module: nn.Module) -> Tensor:
        """What is compared: the result; of training, the loss and the norm of the gradients."""
        result = step().detach().clone()
        if self.kind != "training":
            return result
        norms = [p.grad.float().norm() for p in module.parameters() if p.grad is not None]
        return torch.stack((result.float(), torch.stack(norms).norm()))

    def judge(self, found: Tensor, expected: Tensor) -> float:
        """How far it is from torch's. Raises AssertionError where that is too far, or not a number."""
        if self.kind == "training":
            off = max(difference(a, b) for a, b in zip(found, expected, strict=True))
        elif self.model.routed:
            off = float((found.double() - expected.double()).norm() / expected.double().norm())
        else:
            off = difference(found, expected)
        allowed = ROUTED_DIFFERENCE if self.model.routed else DIFFERENCE
        if not off <= allowed:
            raise AssertionError(f"off by {off:.1e}, allowed are {allowed:g}")
        return off


def cases(model: Model, place: Place) -> list[Case]:
    """Of inference at two batches, decoding at two, and a training step."""
    most = sys.maxsize if place.is_cuda else MOST_ON_CPU
    found = [Case(model, "inference", min(batch, most), ("eager", "graph")) for batch in (model.small, model.large)]
    if model.decodes:
        found += [Case(model, "decode", min(batch, most), ("graph",)) for batch in DECODED]
    return [*found, Case(model, "training", min(model.training, most), ("training",))]


@torch.no_grad()
def decoded(model: Model, module: nn.Module, place: Place, batch: int) -> Callable[[], Inputs]:
    """One more token for each text. The cache is set back before every step, so that a CUDA graph can repeat it."""
    from transformers import DynamicCache

    length = CONTEXT if place.is_cuda else 16
    cache = DynamicCache(config=module.config)
    texts = model.inputs(not place.is_cuda, batch)["input_ids"].to(place.device)[:, :length]
    module(input_ids=texts, past_key_values=cache, use_cache=True, logits_to_keep=1)
    held = [(layer, dict(vars(layer))) for layer in cache.layers]
    given = {
        "input_ids": texts[:, :1].contiguous(),
        "position_ids": torch.full((1, 1), length, device=place.device),
        "past_key_values": cache,
        "use_cache": True,
    }

    def inputs() -> Inputs:
        for layer, state in held:
            vars(layer).update(state)
        return given

    return inputs


# --- The ways ---


def sharing(module: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers, which takes no memory of the GPU."""
    return copy.deepcopy(module, {id(x): x for x in (*module.parameters(), *module.buffers())})


@contextmanager
def served(module: nn.Module, inputs: Callable[[], Inputs]) -> Iterator[dict[str, nn.Module]]:
    """The model as it is, through tk as a sample decides, and through tk by the rules alone."""
    with ExitStack() as undone:
        ways = {"torch": module, "tk": sharing(module), "unmeasured": sharing(module)}
        for way, settings in (("unmeasured", {}), ("tk", {"sample": inputs})):
            with own_cache():
                report = tk.use(ways[way], **settings)
            undone.callback(report.undo)
        yield ways


@contextmanager
def own_cache() -> Iterator[None]:
    """Nothing that was measured before decides."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TK_CACHE_DIR=folder):
        yield


# --- What is measured ---


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to be timed. before, grown: bytes of the GPU's memory that were taken before it, and how
    many more at its peak."""

    step: Step
    before: int
    grown: int


def prepare(step: Step, module: nn.Module, place: Place, as_graph: bool) -> Prepared:
    step()  # what is set up once, as cuDNN's choice of algorithms, has a peak of its own
    module.zero_grad()
    if not place.is_cuda:
        return Prepared(step, 0, 0)
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # each way counts its own, and a graph holds its own
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ready = graphed(step) if as_graph else step
    for _ in range(2):
        ready()
    torch.cuda.synchronize()
    return Prepared(ready, before, torch.cuda.max_memory_allocated() - before)


def decisions_in(step: Step) -> int:
    """How many calls of a step are looked at, whether tk serves them: none where a model is left as a whole."""
    with patch.object(decisions, "kind_of", wraps=decisions.kind_of) as looked_at:
        step()
    return looked_at.call_count


def synchronizes(step: Step) -> bool:
    """Whether it waits for the GPU, which a CUDA graph cannot record."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def in_turns(steps: dict[str, Step], place: Place) -> dict[str, float]:
    """Milliseconds of each, the medians."""
    taken: dict[str, list[float]] = {way: each_round(step, place.device, 1) for way, step in steps.items()}
    rounds = {way: max(2, min(MOST_ROUNDS, int(TURN_MS / first))) for way, (first,) in taken.items()}
    for turn in range(TURNS):  # clocks and other processes change from second to second
        for way in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            taken[way] += each_round(steps[way], place.device, rounds[way])
    return {way: statistics.median(values) for way, values in taken.items()}


def measure(
    case: Case, mode: str, ways: dict[str, nn.Module], inputs: Callable[[], Inputs], place: Place,
    options: Options, report: Report,
) -> None:  # fmt: skip
    """Adds a row to each group that it belongs to; a way whose result is wrong loses its own alone."""
    label, as_graph = case.label(mode), mode == "graph" and place.is_cuda
    plain = case.step(ways["torch"], inputs)
    plain()
    if as_graph and synchronizes(plain):
        print(f"{label}: left out, the model waits for the GPU, and torch cannot record it", flush=True)
        return
    ready: dict[str, Prepared] = {}
    off: dict[str, float] = {}
    looked_at: dict[str, int] = {}
    expected: Tensor | None = None

    def add_way(way: str, module: nn.Module) -> None:
        nonlocal expected
        one = prepare(case.step(module, inputs), module, place, as_graph)
        found = case.outcome(one.step, module)
        if expected is None:
            expected = found
        else:
            off[way] = case.judge(found, expected)
            looked_at[way] = 0 if as_graph else decisions_in(one.step)
        ready[way] = one

    add_way("torch", ways["torch"])
    for way in ("tk", "unmeasured"):
        report.attempt(f"{label}, {way}", partial(add_way, way, ways[way]))
    ms = in_turns({way: one.step for way, one in ready.items()}, place)
    if options.compiled and "tk" in off:
        report.attempt(f"{label}, compiled", lambda: ms.update(compiled(case, ways["torch"], inputs, place, as_graph)))
    us = {way: 1e3 * value for way, value in ms.items()}
    memory = {way: peak_ratio(ready["torch"], ready[way]) for way in off} if place.is_cuda else {}
    for way, found in off.items():
        more = {"difference": found, "looked_at": looked_at[way]} | ({"memory": memory[way]} if memory else {})
        add_row(report, mode, way, Row(label, us["torch"] / us[way], us, more))
    times = ", ".join(f"{way} {value:.3f} ms" for way, value in ms.items())
    ratios = ", ".join(
        f"{us['torch'] / us[way]:.3f} × torch ({way}, off by {off[way]:.1e}, {looked_at[way]} looked at)" for way in off
    )
    peaks = "".join(f", memory {value:.3f} ({way})" for way, value in memory.items())
    print(f"{label}: {times}; {ratios}{peaks}", flush=True)


def peak_ratio(torchs: Prepared, ours: Prepared) -> float:
    """Of all memory, as if both had begun with what torch began with."""
    return (torchs.before + ours.grown) / (torchs.before + torchs.grown)


def compiled(
    case: Case, module: nn.Module, inputs: Callable[[], Inputs], place: Place, as_graph: bool
) -> dict[str, float]:
    """Milliseconds of torch.compile's."""
    try:
        one = prepare(case.step(torch.compile(module), inputs), module, place, as_graph)
        return in_turns({"compiled": one.step}, place)
    finally:
        torch._dynamo.reset()


def add_row(report: Report, mode: str, way: str, row: Row) -> None:
    if way == "tk":
        report.group(f"zoo_{mode}", TITLES[mode], "eager torch", GOALS[mode]).rows.append(row)
        if "compiled" in row.us:
            against = Row(row.label, row.us["compiled"] / row.us["tk"], row.us, row.more)
            report.group(f"zoo_{mode}_compiled", TITLES[mode], "torch.compile").rows.append(against)
    else:
        title = f"{TITLES[mode]}, without a sample"
        report.group(f"zoo_{mode}_unmeasured", title, "eager torch", UNMEASURED).rows.append(row)


# --- All of them ---


def measure_model(model: Model, wanted: list[Case], place: Place, options: Options, report: Report) -> None:
    module = model.make(place.device, place.dtype, not place.is_cuda)
    for case in wanted:
        if options.has_time():
            measure_case = partial(_measure_case, case, module, place, options, report)
            report.attempt(f"{model.name}, {case.kind}, batch {case.batch}", measure_case)
            free(place)


def _measure_case(case: Case, module: nn.Module, place: Place, options: Options, report: Report) -> None:
    is_training = case.kind == "training"
    module.train(is_training)
    with torch.set_grad_enabled(is_training):
        inputs = case.inputs(module, place)
        with served(module, inputs) as ways:
            for mode in case.modes:
                label = case.label(mode)
                if options.wants(label) and options.has_time():
                    report.attempt(label, partial(measure, case, mode, ways, inputs, place, options, report))
    module.zero_grad()


def free(place: Place) -> None:
    gc.collect()
    if place.is_cuda:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def add_figures(report: Report) -> None:
    """The most memory that a way took."""
    for suffix, how in (("", "measured with a sample"), ("_unmeasured", "without a sample")):
        groups = [report.groups[name] for mode in GOALS if (name := f"zoo_{mode}{suffix}") in report.groups]
        if shares := [row.more["memory"] for group in groups for row in group.rows if "memory" in row.more]:
            title = f"peak memory, {how}, the worst row"
            report.figures.append(Figure(f"zoo_memory{suffix}", title, max(shares), "× torch's", MEMORY))


def run(options: Options, report: Report, device: str = "cuda") -> None:
    """On the CPU the models are tiny, and what would be a CUDA graph runs as Python calls it."""
    place = Place(device)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):  # torch is given the best of cuDNN's algorithms
        for model in MODELS[:: 6 if options.quick else 1]:
            wanted = [
                case for case in cases(model, place) if any(options.wants(case.label(mode)) for mode in case.modes)
            ]
            if wanted and options.has_time():
                report.attempt_part(model.name, partial(measure_model, model, wanted, place, options, report))
                free(place)
    add_figures(report)
