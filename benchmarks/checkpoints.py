"""How long two CPU ranks stand still for a checkpoint, and how long it is written beside the training.

    python benchmarks/checkpoints.py [--quick]

Medians over saves, of the slower rank, with masters on every rank and sharded. `checkpoint_pause_ratio`: the pause
over the seconds until the checkpoint is whole, which is the pause of a run that waits for its checkpoints.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from tqdm import tqdm  # noqa: E402

import parallel  # noqa: E402
from checkpoint import Checkpoints, load_model  # noqa: E402
from core import Example, SampleId, Span  # noqa: E402
from loss import LossConfig  # noqa: E402
from sampling import SamplingConfig  # noqa: E402
from trainer import Trainer, TrainerConfig  # noqa: E402
from warm_start import WarmStartConfig, make_model  # noqa: E402

RANKS = 2
LARGE = WarmStartConfig(steps=0, hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12)
QUICK = WarmStartConfig(steps=0)


def measure(rank: int, base: Path, port: int, saves: int) -> None:
    """Save often, once nothing is new any more; write the medians of pauses and of whole writes by sharding."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": str(port)}
    world, source = parallel.start("cpu", 600.0), base / "model"
    found: dict[str, list[float]] = {}
    for shard in (1, RANKS):
        model = load_model(source, world.device, torch.float32)
        loss, limits = LossConfig(name="sft"), (64, 1)
        trainer = Trainer(model, TrainerConfig(shard=shard), loss, SamplingConfig(), world, *limits)
        trainer.accumulate([Example(SampleId(0, 0, rank), (1,), tuple(range(2, 34)), (Span(0, 32, 0),), (), 1.0)])
        trainer.update()
        checkpoints = Checkpoints(base / f"run{shard}", source, 1, world, shard)
        rows = []
        for step in tqdm(range(saves + 1), desc=f"shard {shard}", disable=True if rank else None):
            parallel.barrier(world)
            start = time.perf_counter()
            with trainer.saved_tensors() as tensors:
                checkpoints.save(step, model, tensors, {})
            pause = time.perf_counter() - start
            checkpoints.wait()
            told = parallel.gather_objects(world, (pause, time.perf_counter() - start))
            rows.append([*map(max, zip(*told, strict=True))])  # each of its slowest rank
        found[str(shard)] = [statistics.median(seconds) for seconds in zip(*rows[1:], strict=True)]
    if world.is_main:
        found["parameters"] = [sum(p.numel() for p in model.parameters())]
        (base / "found.json").write_text(json.dumps(found))
    parallel.stop(world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model: seconds")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("localhost", 0)) as free:
        base, port = Path(folder), free.getsockname()[1]
        free.close()
        alone = parallel.World(0, 1, torch.device("cpu"))
        make_model(QUICK if quick else LARGE, "hailstone", base / "model", alone)
        mp.start_processes(measure, (base, port, 1 if quick else 5), nprocs=RANKS, start_method="spawn")
        found = json.loads((base / "found.json").read_text())
    metrics = {"name": "checkpoints", "parameters": found["parameters"][0]}
    for shard in ("1", "2"):
        pause, write = found[shard]
        print(f"shard {shard}: {pause:.2f} s pause, {write:.2f} s until whole")
        metrics |= {f"pause_seconds_shard{shard}": round(pause, 3), f"write_seconds_shard{shard}": round(write, 3)}
    metrics["checkpoint_pause_ratio"] = round(max(found[s][0] / found[s][1] for s in ("1", "2")), 3)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
