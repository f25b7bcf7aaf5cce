"""CUDA graphs: capture, and many replays beside other work."""

import torch

import tk

from .device import DEVICE

REPLAYS = 10_000


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


class Network:
    """Products with few tiles and many, K cut and whole, one after the other."""

    def __init__(self, rows: int):
        self.x = randn(rows, 1024)
        self.weights = [randn(4096, 1024) / 32, randn(256, 4096) / 64, randn(1024, 256) / 16]
        self.bias = randn(4096)

    def __call__(self) -> torch.Tensor:
        h = tk.linear(self.x, self.weights[0], self.bias, activation="gelu")
        h = tk.linear(h, self.weights[1])
        return tk.linear(h, self.weights[2], activation="silu")


def captured(network: Network) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    network()  # loads what is needed
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = network()
    return graph, out


def test_ten_thousand_replays() -> None:
    """Counters must be as they were after every launch, and calls outside of the graph must not share them."""
    network, other = Network(8), Network(8)
    graph, out = captured(network)
    expected_other = other()
    side = torch.cuda.Stream()
    for part in range(4):
        network.x.copy_(randn(8, 1024))
        for i in range(REPLAYS // 4):
            graph.replay()
            if i % 500 == 0:
                with torch.cuda.stream(side):
                    beside = other()
        torch.cuda.synchronize()
        assert torch.equal(out, network()), f"after {part + 1} quarters"
        assert torch.equal(beside, expected_other)


def test_two_graphs_at_once() -> None:
    networks = [Network(8), Network(100)]
    graphs = [captured(n) for n in networks]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(300):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for network, (_, out) in zip(networks, graphs, strict=True):
        assert torch.equal(out, network())


def test_a_graph_outlives_what_captured_it() -> None:
    """Scratch and counters of a captured launch stay until the graph goes, whatever else runs meanwhile."""
    network = Network(4)
    graph, out = captured(network)
    expected = network()
    for rows in (1, 3, 17, 64, 300):
        other, _ = captured(Network(rows))
        other.replay()
        torch.cuda.synchronize()
        del other
    torch.cuda.empty_cache()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
