"""Memory: what a rank plans to hold (policies/memory_plan.py) against what it holds.

    python benchmarks/memory.py [--quick] [--parts plan]

Part `plan`: model, trainer and engine of a run with random weights take two steps of full micro-batches on 1 or 2 CPU
ranks, with training state whole or sharded, with and without recomputation. Measured is the largest sum of bytes that
live tensors hold at any time, on the rank with most. A dispatch mode sees every tensor that an operation makes, in the
backward pass too; resident memory would add what the C library keeps. It does not see memory inside an operation, nor
packed copies of weights, which are off.
`plan_max_error` is the largest |planned - measured| / measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
from core import Example, SampleId, Span
from engine.memory import RolloutConfig
from engine.sequence import Sequence
from model import Model, ModelShape, parse_shape
from parallel import World
from policies.memory_plan import Plan
from rollout import Engine
from settings import Config, memory_plan
from trainer import Trainer, TrainerConfig

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
    "tiny": (259, 256, 1024, 4, 4, 2),
    "0.5B": (151936, 896, 4864, 24, 14, 2),
    "0.5B, 8 layers": (151936, 896, 4864, 8, 14, 2),
}
RUNS = (("tiny", 1), ("tiny", 2), ("0.5B", 1), ("0.5B, 8 layers", 2))  # and ranks
TOKENS = {259: (2048, 512), 151936: (256, 128)}  # by vocabulary: of a micro-batch, of a chunk of logits
RESPONSE, ROWS = 256, 4  # tokens of a response that is trained; sequences that decode together
MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make while it is active, and keeps the most: `peak`."""

    def __init__(self) -> None:
        super().__init__()
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
            is_real = isinstance(tensor, Tensor) and not isinstance(tensor, DTensor | FakeTensor)
            if is_real and tensor.device.type != "meta" and tensor.layout is torch.strided:
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

    @property
    def shape(self) -> ModelShape:
        return parse_shape(QWEN | dict(zip(SIZES, MODELS[self.model], strict=True)), self.model)

    @property
    def config(self) -> Config:
        tokens, chunk = TOKENS[self.shape.vocab_size]
        trainer = TrainerConfig(
            tokens_per_microbatch=tokens, tokens_per_logits=chunk, shard=self.shard, recompute=self.recompute
        )
        rollout = RolloutConfig(
            max_prompt_tokens=8, max_response_tokens=RESPONSE, max_running=ROWS, step_tokens=64, prepack=False
        )
        return replace(Config(), trainer=trainer, rollout=rollout)


def measure(case: Case, world: World) -> tuple[Plan, dict[str, int]]:
    """Return the plan of a rank, and the largest bytes of each part of its steps."""
    config, shape, peaks = case.config, case.shape, dict[str, int]()
    plan = memory_plan(config, shape, world.size, world.node_size, world.device)
    live = LiveBytes()

    def part(name: str, work: Callable[..., object], *args: Any) -> None:
        live.peak = live.now
        work(*args)
        peaks[name] = max(peaks.get(name, 0), live.peak)

    with live:
        model = Model(shape)
        told = config.trainer, config.loss, config.sampling, world, RESPONSE, 10
        trainer = Trainer(model, *told)
        engine = Engine(model, config.rollout, config.sampling, ())
        for step in range(2):
            part("rollout", generate, engine)
            part("gradients", trainer.accumulate, examples(config.trainer.tokens_per_microbatch, 2))
            part("update", trainer.update)
            part("rollout", engine.load_weights, model, step + 1)
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


def on_ranks(cases: Iterable[Case], ranks: int) -> list[dict[str, Any]]:
    """Measure cases in processes of their own; return their rows."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        told = [f"--cases={json.dumps([asdict(case) for case in cases])}", f"--out={result}"]
        # MALLOC_: freed memory goes back to the system (engine/cpu.py), for two ranks need most of a small machine's.
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "131072"}
        subprocess.run([*launch, __file__, *told], env=env, check=True)
        return json.loads(result.read_text(encoding="utf-8"))


def play(cases: Iterable[Case], out: Path) -> None:
    """On each rank: measure, and let the first write the rows."""
    world = parallel.start("cpu", 600.0)
    rows = [row_of(case, world) for case in cases]
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
    print(f"{'model':15}{'ranks':>6}{'recompute':>11}{'planned MiB':>13}{'measured MiB':>14}{'error':>9}")
    for model, ranks in RUNS[:2] if quick else RUNS:
        for row in on_ranks([Case(model, ranks, recompute) for recompute in ("off", "on")], ranks):
            rows.append(row)
            sizes = f"{row['planned_mib']:13.1f}{row['measured_mib']:14.1f}{row['error']:+9.1%}"
            print(f"{model:15}{ranks:6}{row['recompute']:>11}{sizes}   {row['planned_at']}", flush=True)
    return {"plan_max_error": max(abs(row["error"]) for row in rows), "plan_rows": rows}


PARTS = {"plan": measure_plan}  # each prints its table and returns its metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model only: under 2 minutes on 2 cores")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cases:
        play([Case(**case) for case in json.loads(arguments.cases)], arguments.out)
        return 0
    metrics: dict[str, Any] = {"name": "memory"}
    for name in arguments.parts:
        metrics |= PARTS[name](arguments.quick)
    print(json.dumps(metrics))
    return 0


if __name__ == "__main__":
    sys.exit(main())
