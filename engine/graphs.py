"""The decode step of the GPU path: CUDA graphs, and the flags of finished rows that follow them to the host.

The host launches step after step and learns one step late which rows have ended; an ended row is dead on the device at
once, so the step in between writes nothing for it. Where there is no GPU (the tests), the same step runs eagerly.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def row_bucket(n: int) -> int:
    """Return how many rows a graph for n rows has: 1, 2, 4, 8, 16, 24 .. 64, 80 .. 256, 288 .."""
    if n <= 8:
        return 1 << (n - 1).bit_length()
    step = 8 if n <= 64 else 16 if n <= 256 else 32
    return -(-n // step) * step


def row_counts(max_rows: int) -> list[int]:
    """Return the rows of all graphs of an engine, largest first."""
    return sorted({min(row_bucket(n), max_rows) for n in range(1, max_rows + 1)}, reverse=True)


class DecodeGraphs:
    """A graph for each of `row_counts` of each layout.

    `ended` [rows] is 0 for the rows that a step may change. `layout` names what else a step reads, such as the
    shards of one tensor-parallel size.
    """

    def __init__(self, ended: Tensor, max_rows: int, max_width: int):
        self.ended, self.max_rows = ended, max_rows
        self.table = torch.zeros(max_rows, max_width, dtype=torch.int32, device=ended.device)
        # Two, in turns: the copy of the step before may still be on its way.
        self.sent = deque(torch.zeros(self.table.shape, dtype=torch.int32, pin_memory=ended.is_cuda) for _ in range(2))
        # Its own: graphs of one stream share a cuBLAS workspace, which the end of any of them frees (pytorch #193402).
        # Of high priority, which a graph's kernels keep wherever it is replayed: a judge's stream has to wait.
        self.stream = torch.cuda.Stream(ended.device, priority=-1) if ended.is_cuda else None
        self.captures = ended.is_cuda  # False: run every step eagerly, to compare
        self.layout = 1
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by layout and rows
        self.memory: Any = None  # a handle, shared: graphs never run side by side

    def clear(self) -> None:
        """Forget all graphs: what they read has moved or will."""
        self.graphs.clear()
        self.memory = None

    def send(self, table: np.ndarray) -> None:
        """Copy the page tables of the running rows to the device, without waiting for it. [n, max_width]"""
        self.sent.rotate()
        rows = self.sent[0][: len(table)].copy_(torch.from_numpy(table))
        self.table[: len(table)].copy_(rows, non_blocking=True)

    def capture(self, step: Callable[[int], None]) -> None:
        """Capture the layout's graphs if it has none, the largest first: the others find room in its memory.

        `step(rows)` computes one decode step on fixed tensors. It may have collectives, which run here too: the ranks
        of a replica capture together.
        """
        if self.captures and (self.layout, self.max_rows) not in self.graphs:
            self.graphs |= {(self.layout, rows): self._capture(step, rows) for rows in row_counts(self.max_rows)}

    def run(self, step: Callable[[int], None], n: int, eager: bool = False) -> None:
        """Launch one step over at least n rows. `eager`: it is not what was captured."""
        rows = min(row_bucket(n), self.max_rows)
        if eager or not self.captures:
            return step(rows)
        self.capture(step)
        self.graphs[self.layout, rows].replay()

    def _capture(self, step: Callable[[int], None], rows: int) -> torch.cuda.CUDAGraph:
        assert self.stream, "only a GPU captures"
        ended = self.ended.clone()
        self.ended.fill_(1)  # steps over dead rows change nothing: they compile kernels and warm libraries up
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                step(rows)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog may ask for events in its own thread meanwhile
        with torch.cuda.graph(graph, self.memory, self.stream, capture_error_mode="thread_local"):
            step(rows)
        self.memory = self.memory or graph.pool()
        self.ended.copy_(ended)
        return graph
