"""What the figures of ROLL Flash share: its workloads and runs. (arXiv 2510.11345)

The paper's text was not at hand, only some of its figures. Its GPU, its batch and the asynchronous ratio of a run are
not known: here they are H800, 256 prompts x 16 responses, which is what the training times of Figure 5 come to on
H800, and 2. One engine and one trainer serve both models; only their lengths differ.
"""

from dataclasses import replace
from typing import Any

from paper import ClusterConfig, SimulationConfig, StreamConfig, command, mean

from policies.flow import OverlapConfig
from scheduler import RELAXED, SchedulerConfig
from simulate import EndlessSimulation, ModelFile, Simulation, load_model_file, simulate
from simulation.episodes import EpisodesConfig
from simulation.workload import LengthModel

MODELS = {"Think": "qwen3-8b-think", "Base": "qwen3-8b-base"}
PAPER = "arXiv 2510.11345"
ALPHA = 2
STEPS, EDGE = 15, 3  # simulated steps; the first and the last that are no steady state
SYNCHRONOUS_STEPS = 4
EPISODES = (32, 8)  # of a step, groups x size, on 32 GPUs
TURN_TOKENS = 32  # that the model writes in a turn; not known
WINDOW = 1024  # engine steps: replicas wait for the slowest at its end, so short ones cost more


def config(model: str, gpus: int, steps: int, **overlap: Any) -> SimulationConfig:
    """Return a run of 256 x 16 on whole replicas; `overlap` is its section, and without one it is synchronous."""
    overlap |= {"clock": "time"} if overlap else {}  # new weights are taken as soon as they are there
    window = WINDOW if overlap else WINDOW // RELAXED  # where nothing races they are so many times as long
    scheduler = SchedulerConfig("synchronous", 256, 16, 1.0, 1.0, window_iterations=window)
    cluster = ClusterConfig(model=MODELS[model], gpus=gpus, steps=steps)
    return SimulationConfig(cluster, scheduler, stream=StreamConfig("off"), overlap=OverlapConfig(**overlap))


def synchronous(model: str, gpus: int, file: ModelFile | None = None) -> Simulation:
    """Simulate rollout and training one after the other, on all GPUs."""
    return simulate(config(model, gpus, SYNCHRONOUS_STEPS), file)


def endless(
    model: str, gpus: int, train: int, depth: float = ALPHA, file: ModelFile | None = None, **overlap: Any
) -> EndlessSimulation:
    """Simulate a rollout that never ends, beside training on `train` of the GPUs (0: in turns with it)."""
    run = simulate(config(model, gpus, STEPS, depth=depth, train_ranks=train, **overlap), file)
    assert isinstance(run, EndlessSimulation)
    return run


def episodes(
    env: EpisodesConfig,
    steps: int,
    launched: tuple[int, int] = EPISODES,
    train_seconds: float | None = None,
    **overlap: Any,
) -> Simulation:
    """Simulate steps that train EPISODES, groups x size, and launch so many; `overlap` as in `config`."""
    (groups, size), races = EPISODES, launched != EPISODES or overlap
    etas, window = (launched[0] / groups, launched[1] / size), 16 if races else 2  # where nothing races, 8 times that
    scheduler = SchedulerConfig("tail_batching", groups, size, *etas, window_iterations=window)
    file = load_model_file(MODELS["Base"])
    tokens = LengthModel(TURN_TOKENS * env.turns, 0.0, 0.0, 0.0, limit=file.lengths.limit, code=0.0, judge=0.0)
    efficiency = replace(file.efficiency, train_seconds=train_seconds or file.efficiency.train_seconds)
    cluster = ClusterConfig(model=MODELS["Base"], gpus=32, steps=steps)
    run = SimulationConfig(cluster, scheduler, overlap=OverlapConfig(**overlap), env=env)
    return simulate(run, replace(file, lengths=tokens, efficiency=efficiency))


def step_seconds(run: Simulation) -> float:
    """Return the mean seconds of a step in the steady state."""
    inner = run.records[EDGE:-EDGE] if isinstance(run, EndlessSimulation) else run.records
    return mean(r["seconds"]["step"] for r in inner)


if __name__ == "__main__":
    command(lambda: None, f"{__doc__} For other figures: alone it does nothing.")
