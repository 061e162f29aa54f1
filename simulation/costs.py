"""Costs of decoding, prefill, training and weight sync: a roofline and a few efficiencies. Pure.

Decode is memory-bound: every step reads the weights and the cached tokens once. Further costs are seconds per layer
(launches, small kernels) and per sequence (sampling, bookkeeping), which are fitted; see figures/fit.py and
configs/simulate/.
"""

from bisect import bisect
from dataclasses import dataclass

import numpy as np

from config import option
from policies.step_times import FittedTimes, SizeProfile, StepTimes

BYTES = 2  # of a weight or a cached value: bfloat16


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and the node around it."""

    flops: float = option(989e12, "dense bfloat16 operations per second", above=0)
    bandwidth: float = option(3.35e12, "memory bytes per second", above=0)
    memory: float = option(80e9, "bytes of memory", above=0)
    link: float = option(200e9, "bytes per second and direction between GPUs of a node", above=0)
    link_latency: float = option(12e-6, "seconds of a small all-reduce inside a node", min=0)
    network: float = option(50e9, "bytes per second of one GPU to other nodes", above=0)
    node_gpus: int = option(8, "GPUs in a node", min=1)


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense decoder that decide its cost."""

    parameters: float = option(7.6e9, "weights", above=0)
    layers: int = option(28, "decoder layers", min=1)
    hidden: int = option(3584, "width", min=1)
    kv_heads: int = option(4, "heads of keys and values", min=1)
    head_dim: int = option(128, "width of a head", min=1)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one cached token, all ranks together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


@dataclass(frozen=True)
class Efficiency:
    """The shares of the roofline that engine and trainer reach, and costs beside it."""

    bandwidth: float = option(0.85, "share of the memory bandwidth that decoding reaches", above=0, max=1)
    prefill: float = option(0.5, "share of the peak operations that prefill reaches", above=0, max=1)
    layer_seconds: float = option(140e-6, "per layer and decode step, whatever the batch (fitted)", min=0)
    sequence_seconds: float = option(88.57e-6, "per sequence and decode step (fitted)", min=0)
    kv_memory: float = option(0.85, "share of the GPU memory that weights and KV pages may take", above=0, max=1)
    train: float = option(0.4, "share of the peak operations that training reaches", above=0, max=1)
    padded: int = option(1, "tokens that a shorter sample is padded to in training (fitted)", min=1)
    passes: float = option(
        5.0, "forward passes that a trained token costs: 3 to train, 1 for old and 1 for reference log-probs", above=0
    )
    streamable: float = option(
        0.6, "share of passes that freed GPUs take over: the gradient; log-probs wait", min=0, max=1
    )
    train_seconds: float = option(4.0, "per step, whatever the batch: optimizer, moves of memory", min=0)
    response_seconds: float = option(0.0, "per response, whatever its length: admission, its text to a grader", min=0)
    window_seconds: float = option(0.0, "of an exchange of events between replicas", min=0)
    rollout_seconds: float = option(
        11.97, "per rollout, whatever the batch: engines wake up and go to sleep (fitted)", min=0
    )


class Costs(StepTimes):
    """Seconds of the work of one replica of `tp` GPUs, and of all GPUs together."""

    def __init__(
        self,
        hardware: Hardware,
        shape: Shape,
        efficiency: Efficiency,
        tp: int = 1,
        pages: int = 0,
        page_size: int = 64,
    ):
        """`pages`: KV pages of one replica, of `page_size` tokens."""
        h, s, e = hardware, shape, efficiency
        self.hardware, self.shape, self.efficiency, self.tp = h, s, e, tp
        self.pages, self.capacity, self.response_seconds = pages, pages * page_size, e.response_seconds
        reduces = 2 * s.layers if tp > 1 else 0
        self._step = s.layers * e.layer_seconds + reduces * h.link_latency
        self._read = s.parameters * BYTES / (tp * h.bandwidth * e.bandwidth)
        self._compute = 2 * s.parameters / (tp * h.flops * e.prefill)  # per token
        reduced = reduces * 2 * (tp - 1) / tp * s.hidden * BYTES / h.link
        self._sequence = e.sequence_seconds + reduced
        self._token = s.kv_bytes / (tp * h.bandwidth * e.bandwidth)

    def costs(self, sequences: float) -> tuple[float, float]:
        each = self._step + max(self._read, sequences * self._compute) + sequences * self._sequence
        return each, self._token

    def beside(self, sequences: int, drafted: np.ndarray) -> np.ndarray:
        """Seconds that computing so many drafted tokens adds to a decode step: none while it waits for the weights."""
        before = max(self._read, sequences * self._compute)
        return np.maximum(self._read, (sequences + drafted) * self._compute) - before

    def prefill(self, tokens: int) -> float:
        """Seconds that computing `tokens` of context adds to the decode steps beside them."""
        return tokens * (
            self._compute + self._attention(tokens) / (self.tp * self.hardware.flops * self.efficiency.prefill)
        )

    def train(self, lengths: list[int], gpus: int) -> float:
        """Seconds of gradient work for samples of these `lengths` (prompt and response), spread over `gpus`."""
        e, padded = self.efficiency, [max(n, self.efficiency.padded) for n in lengths]
        operations = sum(n * (2 * self.shape.parameters + self._attention(n)) for n in padded) * e.passes
        return operations / (gpus * self.hardware.flops * e.train)

    def _attention(self, tokens: int) -> float:
        """Operations a token of a causal forward pass over `tokens` spends on attention, on average."""
        return 2 * self.shape.layers * self.shape.hidden * tokens

    def weight_sync(self) -> float:
        """Seconds until every replica has the new weights: each rank receives its shard over the network."""
        return self.shape.parameters * BYTES / self.tp / self.hardware.network


class Measured(Costs):
    """Decode and prefill times are measured by profiler.py, all others come from the roofline."""

    def __init__(
        self, hardware: Hardware, shape: Shape, efficiency: Efficiency, tp: int, profile: SizeProfile, page_size: int
    ):
        super().__init__(hardware, shape, efficiency, tp, profile.pages, page_size)
        self._fitted, points = FittedTimes.of(profile, page_size), profile.decode
        _, self._token = self._fitted.costs(1)
        self._rows = sorted({n for n, *_ in points})
        # A CPU's step does not grow evenly with its rows, so the rest of its time is interpolated between them.
        rest = {n: [t - n * c * self._token for m, c, t in points if m == n] for n in self._rows}
        self._steps = [sum(times) / len(times) for times in rest.values()]
        if len(self._rows) == 1:  # an engine of one row: more would take as long each
            self._rows, self._steps = [0, *self._rows], [0.0, *self._steps]

    def costs(self, sequences: float) -> tuple[float, float]:
        """Beyond the last point the last line goes on."""
        i = min(max(bisect(self._rows, sequences), 1), len(self._rows) - 1)
        (n, m), (a, b) = self._rows[i - 1 : i + 1], self._steps[i - 1 : i + 1]
        return a + (sequences - n) * (b - a) / (m - n), self._token

    def beside(self, sequences: int, drafted: np.ndarray) -> np.ndarray:
        """A drafted token takes the time of a row."""
        (n, m), (a, b) = self._rows[-2:], self._steps[-2:]
        rows, far = sequences + drafted, m + 2**20
        steps = np.interp(rows, [*self._rows, far], [*self._steps, b + (b - a) / (m - n) * 2**20])
        return steps - self.costs(sequences)[0]

    def prefill(self, tokens: int) -> float:
        return self._fitted.prefill(tokens)
