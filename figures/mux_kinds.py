"""What the figures of single groups share: the paper's kinds of jobs, alone and in groups. (RollMux, arXiv 2512.11306)

The paper gives neither lengths nor, but for D and E, the responses of a batch: here lengths are those that fit other
figures (configs/simulate). The turns of D and E are drawn as one response of up to 16k tokens.
"""

from collections.abc import Sequence
from functools import cache

from paper import command

from simulation.mux_group import APART, Alone, Group, Job, Kind, alone

KINDS = {
    "7B-4k": Kind("qwen2.5-7b", 4096),
    "A": Kind("qwen2.5-7b", 8192),
    "B": Kind("qwen2.5-14b", 8192, switch=(1.8, 4.7), sync=1.7),
    "C": Kind("qwen2.5-32b", 8192, nodes=2, tensor_parallel=2, switch=(1.7, 5.9), sync=12.3),
    "D": Kind("qwen3-8b-base", 16384, prompts=256, ratio=2.5),
    "E": Kind("qwen2.5-14b", 16384, prompts=64, ratio=6.0, switch=(1.8, 4.7), sync=1.7),
}
TAIL_SHARE, TAIL_REPLICAS = 0.8, 3  # of 8: fitted to Figure 11; the paper says a small subset
ITERATIONS = 8


@cache
def solo(kind: str, gpus: tuple[str, str] = APART) -> Alone:
    """Return the mean seconds of a job on nodes of its own."""
    return alone(KINDS[kind], ITERATIONS, gpus)


Places = Sequence[tuple[str, tuple[int, ...]]]  # kinds of jobs, and the nodes where their rollouts run


def group(places: Places, train_nodes: int = 1, migrates: bool = True, depths: Sequence[int] = ()) -> Group:
    jobs = []
    for i, (name, nodes) in enumerate(places):
        kind = KINDS[name]
        given = solo(name).train - kind.sync if kind.ratio else 0.0
        jobs.append(Job(f"{name} {i}", kind, nodes, given, depth=depths[i] if depths else 0, seed=i))
    return Group(jobs, train_nodes, TAIL_SHARE if migrates else 1.0, TAIL_REPLICAS)


def throughput(places: Places, played: Group) -> list[float]:
    """Return each job's iterations an hour in a group over those alone, without running ahead."""
    return [solo(name).period / seconds for (name, _), seconds in zip(places, played.play(ITERATIONS), strict=True)]


if __name__ == "__main__":
    command(lambda: None, f"{__doc__} For other figures: alone it does nothing.")
