"""Memory: what a rank plans to hold (policies/memory_plan.py) against what it holds, and what samples take that travel.

    python benchmarks/memory.py [--quick] [--parts plan exchange]

Part `plan`: model, trainer and engine of a run with random weights take two steps of full micro-batches on 1 or 2 CPU
ranks, with training state whole or sharded, with the rollout's weights whole or sharded, with and without
recomputation. Measured is the largest sum of bytes that live tensors hold at any time, on the rank with most. A
dispatch mode sees every tensor that an operation makes, in the backward pass too; resident memory would add what the C
library keeps. It does not see memory inside an operation. Packed copies of weights are off, and tensor-parallel ranks
exchange without memory that they share.
`plan_max_error` is the largest |planned - measured| / measured.

Part `exchange`: 4 CPU ranks have decoded 256k tokens, and exchange them in two forms. *Packed*: every rank gets the
headers of all samples, and the tokens of its own share as arrays. *Tuples*: every rank gets all samples, as tuples of
Python numbers. `exchange_peak_ratio` is packed over tuples: by how much the resident memory of a rank rises at most,
its own samples included, on the rank where it rises most.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import weakref
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import parallel
from buffer import SampleBuffer
from core import Example, ModelShape, Prompt, Sample, SampleId, Span
from engine.memory import RolloutConfig
from engine.sequence import Sequence
from learning import examples_of
from model import Model, parse_shape
from parallel import TensorParallel, World
from policies.memory_plan import Plan
from rollout import Engine
from settings import Config, memory_plan
from trainer import Trainer, TrainerConfig
from weights.lora import LoraConfig

QWEN = {"model_type": "qwen2", "tie_word_embeddings": True, "max_position_embeddings": 4096}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# By SIZES; of Qwen2.5-0.5B. Two ranks with all of its layers would want more than 24 GiB.
MODELS = {
    "nano": (259, 128, 512, 4, 4, 2),  # for tests
    "tiny": (259, 256, 1024, 4, 4, 2),
    "0.5B": (151936, 896, 4864, 24, 14, 2),
    "0.5B, 8 layers": (151936, 896, 4864, 8, 14, 2),
}
RUNS = (  # model, ranks, layout of the rollout's weights
    ("tiny", 1, "whole"),
    ("tiny", 2, "whole"),
    ("tiny", 2, "sharded"),
    ("0.5B", 1, "whole"),
    ("0.5B, 8 layers", 2, "whole"),
    ("0.5B, 8 layers", 2, "sharded"),
)
TOKENS = {259: (2048, 512), 151936: (256, 128)}  # by vocabulary: of a micro-batch, of a chunk of logits
RANKS, SAMPLES, LENGTH, GROUP = 4, 64, 4096, 8  # of the exchange: samples of so many tokens, so many of a prompt
RESPONSE, ROWS = 256, 4  # tokens of a response that is trained; sequences that decode together
MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make while it is active, and keeps the most: `peak`."""

    def __init__(self, fakes: bool = False) -> None:
        """`fakes`: count torch's fake tensors, which have a size and no data; DTensor has some for its own use."""
        super().__init__()
        self.ignored = (DTensor,) if fakes else (DTensor, FakeTensor)
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}  # by id of the storage

    def __enter__(self) -> "LiveBytes":
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if id(storage) in self.sizes:
                self._note(storage)
            return storage

        self.resizes = patch.object(torch.UntypedStorage, "resize_", counted)  # FSDP frees by it what it has gathered
        self.resizes.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.resizes.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors come here again
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            counts = isinstance(tensor, Tensor) and not isinstance(tensor, self.ignored)
            if counts and tensor.device.type != "meta" and tensor.layout is torch.strided:
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        name, size = id(storage), storage.nbytes()
        if name not in self.sizes:
            weakref.finalize(storage, self._forget, name)
        self.now += size - self.sizes.get(name, 0)
        self.sizes[name] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, name: int) -> None:
        self.now -= self.sizes.pop(name)


# ---- the plan ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    model: str
    shard: int  # and ranks
    recompute: str
    weights: str = "whole"  # of the rollout; sharded ones over all ranks
    lora: int = 0  # rank of adapters

    @property
    def shape(self) -> ModelShape:
        return parse_shape(QWEN | dict(zip(SIZES, MODELS[self.model], strict=True)), self.model)

    @property
    def config(self) -> Config:
        tokens, chunk = TOKENS[self.shape.vocab_size]
        trainer = TrainerConfig(
            tokens_per_microbatch=tokens,
            tokens_per_logits=chunk,
            shard=self.shard,
            recompute=self.recompute,
            lora=LoraConfig(rank=self.lora),
        )
        rollout = RolloutConfig(
            max_prompt_tokens=8,
            max_response_tokens=RESPONSE,
            max_running=ROWS,
            step_tokens=64,
            prepack=False,
            weights=self.weights,
            tensor_parallel=self.shard if self.weights == "sharded" else 1,
        )
        return replace(Config(), trainer=trainer, rollout=rollout)


def measure(case: Case, world: World) -> tuple[Plan, dict[str, int]]:
    """Return the plan of a rank, and the largest bytes of each part of its steps."""
    config, shape, peaks = case.config, case.shape, dict[str, int]()
    [plan] = memory_plan(config, shape, world.size, world.node_size, world.device)
    live = LiveBytes()

    def part(name: str, work: Callable[..., object], *args: Any) -> None:
        live.peak = live.now
        work(*args)
        peaks[name] = max(peaks.get(name, 0), live.peak)

    tp = TensorParallel(world, config.rollout.tensor_parallel)
    tp.world = replace(tp.world, shared=None)
    with live:
        told = config.trainer, config.loss, config.sampling, world, RESPONSE, 10
        trainer = Trainer(Model(shape), *told, keeps_model=case.weights == "whole")
        if trainer.learner.shards:
            trainer.learner.shards = replace(trainer.learner.shards, shared=None)
        engine = Engine(trainer.model, config.rollout, config.sampling, (), parallel=tp)
        for step in range(2):
            part("rollout", generate, engine)
            part("gradients", trainer.accumulate, examples(config.trainer.tokens_per_microbatch, 2))
            part("update", trainer.update)
            part("rollout", engine.load_weights, trainer.model, step + 1)
    return plan, peaks


def generate(engine: Engine) -> None:
    for i in range(ROWS):
        engine.add(Sequence(i, 0, 0, (1,) * 8, i, 4))
    while not engine.is_idle:
        engine.step()


def examples(tokens: int, num_batches: int) -> list[Example]:
    """Return samples that fill so many micro-batches."""
    response = RESPONSE - 1
    one = Example(SampleId(0, 0, 0), (1,), (2,) * response, (Span(0, response, 0),), (-1.0,) * response, 1.0)
    return [one] * (num_batches * tokens // RESPONSE)


def on_ranks(ranks: int, *told: str) -> Any:
    """Run this script in processes of their own, told what to `play`; return what the first writes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        # MALLOC_: freed memory goes back to the system (engine/cpu.py), for two ranks need most of a small machine's.
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "131072"}
        subprocess.run([*launch, __file__, *told, f"--out={result}"], env=env, check=True)
        return json.loads(result.read_text(encoding="utf-8"))


def play(measured: Callable[[World], Any], out: Path) -> None:
    """On each rank: measure, and let the first write the rows."""
    world = parallel.start("cpu", 600.0)
    rows = measured(world)
    if world.is_main:
        out.write_text(json.dumps(rows), encoding="utf-8")
    parallel.barrier(world)
    parallel.stop(world)


def row_of(case: Case, world: World) -> dict[str, Any]:
    plan, own = measure(case, world)
    peaks = max(parallel.gather_objects(world, own), key=lambda peaks: max(peaks.values()))
    measured = max(peaks.values())
    return asdict(case) | {
        "planned_mib": round(plan.total / MIB, 1),
        "measured_mib": round(measured / MIB, 1),
        "error": round(plan.total / measured - 1, 4),
        "planned_at": plan.worst,
        "measured_at": max(peaks, key=lambda name: peaks[name]),
    }


def measure_plan(quick: bool) -> dict[str, Any]:
    rows = []
    print(f"{'model':15}{'ranks':>6}{'weights':>9}{'recompute':>11}{'planned MiB':>13}{'measured MiB':>14}{'error':>9}")
    for model, ranks, weights in RUNS[:3] if quick else RUNS:
        cases = [asdict(Case(model, ranks, recompute, weights)) for recompute in ("off", "on")]
        for row in on_ranks(ranks, f"--cases={json.dumps(cases)}"):
            rows.append(row)
            sizes = f"{row['planned_mib']:13.1f}{row['measured_mib']:14.1f}{row['error']:+9.1%}"
            print(f"{model:15}{ranks:6}{weights:>9}{row['recompute']:>11}{sizes}   {row['planned_at']}", flush=True)
    return {"plan_max_error": max(abs(row["error"]) for row in rows), "plan_rows": rows}


# ---- the exchange of samples -------------------------------------------------------------------------------------


def decoded(rank: int, length: int, pack: Callable[[str, list], Any]) -> list[Sample]:
    """Return a rank's samples, as `pack` holds numbers."""
    rng, samples = Random(rank), []
    for i in range(rank, SAMPLES, RANKS):
        ids, values = [rng.randrange(32000) for _ in range(length)], [-rng.random() for _ in range(length)]
        packed = pack("i", ids), pack("f", values)
        samples.append(Sample(i // GROUP, i % GROUP, 0, *packed, "stop", (Span(0, length, 0),)))
    return samples


def exchange_tuples(world: World, length: int) -> list[Sample]:
    """Return all samples, on every rank."""
    own = decoded(world.rank, length, lambda _, values: tuple(values))
    return [sample for part in parallel.gather_objects(world, own) for sample in part]


def exchange_packed(world: World, length: int) -> list:
    """Return the headers of all samples, and this rank's share with its tokens, as `Round.collect` and `learn` do."""
    own = decoded(world.rank, length, array)
    told, mine = [parallel.header_of(sample, world.rank) for sample in own], {sample.id: sample for sample in own}
    samples = [mine.get(s.id, s) for part in parallel.gather_objects(world, told) for s in part]
    buffer = SampleBuffer(SAMPLES)
    for sample in samples:
        prompt = Prompt(sample.prompt_index, (1,), "", "", "match")
        buffer.put(sample.id.visit, examples_of(prompt, [sample], [0.0], mask_truncated=False))
    [shares] = buffer.deal(world.size)
    return [*samples, *parallel.bring_tokens(world, shares[world.rank], chain(*shares))]


def peak_rise(work: Callable[..., object], *args: object) -> int:
    """Return the bytes by which this process's resident memory rises at most while `work` runs. Linux."""

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what is free already would hide a part
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = peak()
    kept = work(*args)  # until the peak is read
    rise = peak() - before
    del kept
    return rise


def exchange_rises(world: World) -> dict[str, float]:
    """Return by how many MiB the memory of the worst rank rises, by form."""
    # Packed first: memory that this leaves free can only make the other form look smaller.
    found = {}
    for name, exchange in {"packed": exchange_packed, "tuples": exchange_tuples}.items():
        exchange(world, 1)  # connects the ranks
        rise = peak_rise(exchange, world, LENGTH)
        found[f"exchange_{name}_mib"] = round(max(parallel.gather_objects(world, rise)) / MIB, 2)
    return found


def exchange_peak(quick: bool) -> dict[str, float]:
    """Return the peak memory of both forms of the exchange, and their ratio. The quick run is the whole run."""
    found = on_ranks(RANKS, "--exchange")
    packed, tuples = found["exchange_packed_mib"], found["exchange_tuples_mib"]
    print(f"exchange of {SAMPLES * LENGTH} tokens on {RANKS} ranks: {packed} MiB, as tuples {tuples} MiB")
    return found | {"exchange_peak_ratio": round(packed / tuples, 4)}


PARTS = {"plan": measure_plan, "exchange": exchange_peak}  # each prints its table and returns its metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model only: under 2 minutes on 2 cores")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--exchange", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cases:
        cases = [Case(**case) for case in json.loads(arguments.cases)]
        play(lambda world: [row_of(case, world) for case in cases], arguments.out)
        return 0
    if arguments.exchange:
        play(exchange_rises, arguments.out)
        return 0
    metrics: dict[str, Any] = {"name": "memory"}
    for name in arguments.parts:
        metrics |= PARTS[name](arguments.quick)
    print(json.dumps(metrics))
    return 0


if __name__ == "__main__":
    sys.exit(main())
