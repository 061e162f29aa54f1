"""The control path by the number of GPUs: seconds of a simulated response, and of an exchange of events and samples.

    python benchmarks/control_path.py [--quick]

Rules, placement and replicas of the simulator are those of real runs, so its seconds grow where theirs do. They are
processor seconds of one core. The exchange is that of `rounds.Round`, over gloo between two processes, each of which
tells what half of the ranks would, in as many bytes: the events and rewards of a simulated round window by window, the
headers of its samples at the end, and one rank's share of tokens. Both do what every rank does with all of it, and read
a message of each rank. The hops of a collective between more processes are not in it. `share`: seconds of all of this
in a round over the simulated seconds of its rollout.
"""

import argparse
import json
import os
import pickle
import socket
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.multiprocessing as mp  # noqa: E402
from tqdm import tqdm  # noqa: E402

import parallel  # noqa: E402
from core import Decision, Finished, Reward, Sample, SampleId, Span  # noqa: E402
from envs.episodes import Episodes  # noqa: E402
from metrics import Clock  # noqa: E402
from policies.placement import Placement  # noqa: E402
from policies.scale_down import StreamConfig  # noqa: E402
from rollout import Engine  # noqa: E402
from rounds import Round  # noqa: E402
from scheduler import RoundPolicy, SchedulerConfig  # noqa: E402
from simulate import (  # noqa: E402
    ClusterConfig,
    SimulatedRound,
    Simulation,
    SimulationConfig,
    load_hardware,
    load_model_file,
    simulate,
)

GPUS, RANKS, PROCESSES = (16, 64, 256, 1024), (64, 128, 256, 512), 2
PROMPTS, RESPONSES, STEPS = 4, 8, 5  # prompts a GPU, responses a prompt; steps with short rounds and a long one
MANY_STEPS, BATCH = 100, 512  # of the run on 1,024 GPUs: prompts of a step


def settings(gpus: int, prompts: int, steps: int, dynamic_sampling: bool = False) -> SimulationConfig:
    policy = SchedulerConfig("tail_batching", prompts, RESPONSES, eta_responses=1.25, dynamic_sampling=dynamic_sampling)
    stream = StreamConfig("off" if dynamic_sampling else "estimate")
    return SimulationConfig(cluster=ClusterConfig(gpus=gpus, steps=steps), scheduler=policy, stream=stream)


def timed(gpus: int, prompts: int, steps: int, repeats: int = 1) -> dict[str, float]:
    """Simulate a run; return its processor seconds and responses."""
    start, responses = time.process_time(), 0
    for _ in range(repeats):
        run = simulate(settings(gpus, prompts, steps))
        responses += sum(record["round"]["responses"] for record in run.records)
    seconds = time.process_time() - start
    return {"gpus": gpus, "responses": responses, "seconds": seconds, "microseconds": 1e6 * seconds / responses}


# ---- the exchange ------------------------------------------------------------------------------------------------


class Recorder:
    """A referee that notes the events and rewards of each window."""

    def __init__(self, policy: RoundPolicy):
        self.policy = policy
        self.windows: list[list[Finished]] = []
        self.rewards: dict[SampleId, float] = {}

    def observe(self, finished: Sequence[Finished], rewards: Mapping[SampleId, float]) -> Decision:
        self.windows.append(list(finished))
        self.rewards |= rewards
        return self.policy.observe(finished, rewards)


def opened(ranks: int) -> Simulation:
    """Return a run whose short round asks for rewards too. Two of the same size begin alike."""
    config = settings(ranks, PROMPTS * ranks, 1, dynamic_sampling=True)
    config = replace(config, cluster=replace(config.cluster, steps=8))  # so that it begins with a short round
    return Simulation(config, load_model_file(config.cluster.model), load_hardware(config.cluster.hardware))


def record(ranks: int, path: Path) -> float:
    """Play a round in the simulator and keep its windows; return the seconds of one, as simulated."""
    run = opened(ranks)
    rollout = SimulatedRound(run, run.policy.begin(run.cursor.take, run.config.cluster.steps), 0)
    recorder = Recorder(run.policy)
    rollout.play(cast(RoundPolicy, recorder))
    path.write_bytes(pickle.dumps((recorder.windows, recorder.rewards)))
    return rollout.seconds / rollout.windows


class Replayed(Round):
    """A real round's exchange without its engine: what ended is told, what is stopped or launched only noted."""

    def __init__(self, world: parallel.World, run: Simulation, rewards: Mapping[SampleId, float]):
        self.world, self.clock, self.config, self.known = world, Clock(), run.config.scheduler, rewards
        nobody = SimpleNamespace(rank=0, replica=-1)
        self.engine = cast(Engine, SimpleNamespace(is_idle=False, parallel=nobody, abort=lambda ids: {}))
        self.episodes = cast(Episodes, SimpleNamespace(withdraw=lambda ids: ()))
        self.placement = Placement(run.config.cluster.gpus)
        self.prompts, self.samples, self.rewards, self.dropped, self.aborted, self.audited = {}, {}, {}, {}, {}, {}
        self.windows, self.migrated, self.resized, self.decision = 0, 0, [], Decision()
        self.begin(run.policy.begin(run.cursor.take, run.config.cluster.steps), run.policy)

    def _rewards_of(self, ids: Collection[SampleId]) -> dict[SampleId, float]:
        return {id: self.known[id] for id in ids if id in self.samples}

    def ended_here(self, finished: Sequence[Finished]) -> list[Finished]:
        """Return the events of this process's half of the prompts, and have their samples."""
        here = [event for event in finished if event.id.prompt % PROCESSES == self.world.rank]
        for id, n in ((event.id, event.num_tokens) for event in here):
            packed = array("i", bytes(4 * n)), array("f", bytes(4 * n))
            self.samples[id] = Sample(id.prompt, id.response, id.epoch, *packed, "stop", (Span(0, n, 0),))
            self.rewards[id] = Reward(self.known.get(id, 0.0))
        return here


def exchange(rank: int, ranks: int, path: Path, port: int) -> None:
    """Exchange the windows and the samples of a round as one of two processes; the first writes what it took."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "MASTER_PORT": str(port)}
    os.environ["MASTER_ADDR"] = "localhost"
    each = parallel.HEAD_BYTES + parallel.FIRST_BYTES  # bytes that a rank sends at least
    parallel.FIRST_BYTES = ranks // PROCESSES * each - parallel.HEAD_BYTES
    world, (windows, rewards) = parallel.start("cpu", 600.0), pickle.loads(path.read_bytes())
    played, seconds, sizes = Replayed(world, opened(ranks), rewards), list[float](), list[int]()
    for finished in windows:
        here = played.ended_here(finished)
        told = here, played._rewards_of(played.decision.grade), None
        sizes.append(PROCESSES * len(pickle.dumps(told)))  # as parallel.gather_objects
        messages = [pickle.dumps(([e for e in finished if e.id.prompt % ranks == r], {}, None)) for r in range(ranks)]
        parallel.barrier(world)
        start = time.perf_counter()
        played.exchange(here, None)
        for message in messages[PROCESSES:]:  # `exchange` has read its own
            pickle.loads(message)
        seconds.append(time.perf_counter() - start)
    assert played.decision.done, "the replayed round went another way than the simulated one"
    parallel.barrier(world)
    start = time.perf_counter()
    groups = played.collect()
    collected = time.perf_counter()
    samples = [sample for group in groups for sample in group.samples]
    theirs = [sample for sample in samples if sample.id not in played.samples]
    share = theirs[: len(samples) // ranks]
    parallel.bring_tokens(world, share, played.samples.values())
    found = {
        "windows": len(windows),
        "events": sum(map(len, windows)) / len(windows),
        "kib": statistics.mean(sizes) / 1024,
        "milliseconds": 1e3 * statistics.median(seconds),
        "slowest_milliseconds": 1e3 * max(seconds),
        "windows_seconds": sum(seconds),
        "collect_seconds": collected - start,
        "tokens_seconds": time.perf_counter() - collected,
        "token_bytes": 8 * sum(len(sample.token_ids) for sample in share),
    }
    if world.is_main:
        path.write_text(json.dumps(found))
    parallel.stop(world)


def exchanged(ranks: int) -> dict[str, float]:
    """Return what the exchange of a round on so many ranks takes."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("localhost", 0)) as free:
        path, port = Path(folder) / "round", free.getsockname()[1]
        free.close()
        window = record(ranks, path)
        mp.start_processes(exchange, (ranks, path, port), nprocs=PROCESSES, start_method="spawn")
        found = json.loads(path.read_text())
    spent = found["windows_seconds"] + found["collect_seconds"] + found["tokens_seconds"]
    share = spent / (found["windows"] * window)
    return {"ranks": ranks, "simulated_window_seconds": window, **found, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and steps: a minute")
    quick = parser.parse_args().quick
    gpus, ranks = (GPUS[:3], RANKS[::3]) if quick else (GPUS, RANKS)
    steps = 2 if quick else MANY_STEPS
    simulated, told = list[dict[str, float]](), list[dict[str, float]]()
    with tqdm(total=len(gpus) + 1 + len(ranks), disable=None) as progress:
        for count in gpus:
            progress.set_postfix_str(f"simulated, {count} GPUs")
            simulated.append(timed(count, PROMPTS * count, STEPS, max(gpus[-1] // count // 4, 1)))
            progress.update()
        progress.set_postfix_str(f"simulated, {GPUS[-1]} GPUs, {steps} steps")
        long = timed(GPUS[-1], BATCH, steps)
        progress.update()
        for count in ranks:
            progress.set_postfix_str(f"exchange of {count} ranks")
            told.append(exchanged(count))
            progress.update()
    for row in simulated:
        print(f"simulated, {row['gpus']:>5} GPUs: {row['microseconds']:6.1f} us a response")
    print(f"simulated, {GPUS[-1]} GPUs, {steps} steps of {BATCH} x {RESPONSES}: {long['seconds']:.1f} s")
    for row in told:
        print(
            f"exchange, {row['ranks']:>4} ranks: {row['events']:5.1f} events a window, {row['kib']:6.1f} KiB, "
            f"{row['milliseconds']:5.2f} ms; samples {row['collect_seconds']:.3f} s, "
            f"tokens {row['tokens_seconds']:.3f} s; {row['share']:.2%} of the rollout"
        )
    growth = simulated[-1]["microseconds"] / simulated[0]["microseconds"]
    metrics = {"name": "control_path", "largest": gpus[-1], "growth": round(growth, 2), "steps": steps, "batch": BATCH}
    metrics |= {"seconds_many_steps": round(long["seconds"], 1), "responses_many_steps": long["responses"]}
    metrics |= {"most_ranks": ranks[-1], "exchange_share": told[-1]["share"], "simulated": simulated, "exchange": told}
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
