"""Seconds of one judging forward: layers resident, streamed in a pipeline, and streamed without overlap.

    python benchmarks/judge.py [--quick] [--device=cuda]

One judge with random weights, of which none or half of the layers are resident. `pipeline` is what a run does: a layer
arrives while another computes. `serial` copies each layer in line with the computation. Contenders take turns in one
run; each figure is the best of its turns. On a CPU the copies go from memory to memory, in a thread.

`speedup_layer_pipeline` is serial over pipeline with no resident layer, for the forward whose computation takes most
nearly as long as its copies: there a pipeline gains most, 2 x where the two do not share a resource.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

THREADS = "2"
os.environ["OMP_NUM_THREADS"] = THREADS  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

from judge import JudgeConfig, JudgeModel  # noqa: E402
from parallel import World  # noqa: E402
from warm_start import WarmStartConfig, make_model  # noqa: E402

TEXT = 16  # tokens of one text


class SerialCopies:
    """Copies in line with the computation: in the caller's thread, in the caller's stream."""

    def mark(self) -> None: ...

    def start(self, target: Tensor, source: Tensor, after: None) -> bool:
        target.copy_(source, non_blocking=True)
        return True

    def wait(self, copied: bool) -> None: ...

    def finish(self) -> None: ...


def forward(model: JudgeModel, copies: Any, resident: int, texts: list[list[int]], turns: int) -> list[float]:
    """Return the seconds of `turns` forwards, after one that warms up."""
    model.layers.release()
    model.layers.copies = copies
    model.layers.place(resident)
    times = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        model(texts).tolist()
        times.append(time.perf_counter() - start)
    return times[1:]


def copy_seconds(model: JudgeModel) -> float:
    """Return the seconds of copying every layer to the device, and nothing else."""
    target, times = torch.empty_like(model.layers.host[0], device=model.device), []
    for _ in range(4):
        start = time.perf_counter()
        for block in model.layers.host:
            target.copy_(block, non_blocking=True)
        target[:1].tolist()  # waits
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller judge, fewer turns: under a minute on 2 cores")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    flags = parser.parse_args()
    torch.set_num_threads(int(THREADS))
    torch.set_flush_denormal(True)
    on_gpu = flags.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    width, depth, rounds = (2048, 16, 5) if on_gpu else (768, 8, 3) if flags.quick else (1024, 12, 6)
    sizes = (1024, 2048, 4096, 8192, 16384) if on_gpu else (16, 32, 64, 128, 256)
    shape = WarmStartConfig(steps=0, hidden_size=width, num_layers=depth, num_heads=16, num_kv_heads=4)
    metrics: dict[str, Any] = {"name": "judge", "device": torch.cuda.get_device_name() if on_gpu else "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, "hailstone", Path(folder) / "judge", World(0, 1, torch.device("cpu")))
        config = JudgeConfig(path=str(Path(folder) / "judge"), accept="y", reject="n", batch_tokens=max(sizes))
        model = JudgeModel(config, device, torch.bfloat16 if on_gpu else torch.float32)
    pipeline, serial = model.layers.copies, SerialCopies()
    copying, computing = copy_seconds(model), {}
    size = model.layers.layer_bytes / 2**20
    tqdm.write(f"{depth} layers of {size:.0f} MiB on {metrics['device']}; copying all takes {1000 * copying:.1f} ms")
    for tokens in tqdm(sizes, disable=None):
        texts = [[40 + i % 50] * TEXT for i in range(tokens // TEXT)]
        contenders = {
            "resident": (pipeline, depth),
            "pipeline": (pipeline, 0),
            "serial": (serial, 0),
            "pipeline_half": (pipeline, depth // 2),
            "serial_half": (serial, depth // 2),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, (copies, resident) in contenders.items():
                seconds[name] += forward(model, copies, resident, texts, 2)
        best = {name: min(times) for name, times in seconds.items()}
        tqdm.write(f"{tokens:6} tokens, ms: " + "  ".join(f"{k} {1000 * v:.1f}" for k, v in best.items()))
        computing[tokens] = best["resident"]
        metrics[f"speedup_{tokens}"] = round(best["serial"] / best["pipeline"], 2)
        metrics[f"speedup_half_{tokens}"] = round(best["serial_half"] / best["pipeline_half"], 2)
        metrics[f"slowdown_{tokens}"] = round(best["pipeline"] / best["resident"], 2)
    pipeline.close()
    balanced = min(sizes, key=lambda tokens: abs(math.log(computing[tokens] / copying)))
    metrics |= {"balanced_tokens": balanced, "speedup_layer_pipeline": metrics[f"speedup_{balanced}"]}
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
