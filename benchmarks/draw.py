"""Draws by a race of two levels, as the engine draws, by a race of all tokens, and by the inverse of the CDF.

    python benchmarks/draw.py [--quick]

Cost, on one thread: microseconds of softmax and draw by torch's operations, and of the engine's own draw, which is
compiled where a compiler is. By how much a decode step of the models of benchmarks/engine.py is longer with a race than
with the inverse of the CDF, both by torch's operations; and what part of the step the engine's own draw takes in all,
which is the most that it can add (`longer_max` is the largest). The draws take turns. Agreement: how often older or
disturbed weights draw another token with the same key, position and context. No draw can do so less often than the
distributions differ (total variation, TV). Weights and contexts are those of a run of the default task; for other
vocabularies logits are made up, and noise disturbs them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

import checkpoint  # noqa: E402
from attention import PackedAttention  # noqa: E402
from benchmarks import engine as bench  # noqa: E402
from engine.kernels import race, race_torch, uniforms  # noqa: E402
from engine.sequence import Sequence  # noqa: E402
from rollout import Engine  # noqa: E402
from sampling import SamplingConfig  # noqa: E402

VOCABS, ROWS = (258, 32_000, 152_000), (1, 8, 32)
STEPS = (("tiny", 1), ("tiny", 32), ("tiny", 128), ("half", 1), ("half", 32))  # models, and rows that decode
LAGS, LAST = (1, 2, 4, 8), 12  # updates; the newest weights have so many
NOISE = 0.05  # standard deviation
BLOCK = 128  # tokens summed together when a CDF is searched


def by_inverse(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The token at which the CDF reaches a uniform number; in a large vocabulary first its block of tokens."""
    logprobs, (rows, vocab) = logits.log_softmax(-1), logits.shape
    probs, u = logprobs.exp(), uniforms(keys, positions, 1)
    if vocab <= 64 * BLOCK:
        cdf = probs.cumsum(-1, dtype=torch.float64)
        tokens = torch.searchsorted(cdf, u * cdf[:, -1:])
    else:
        blocks = F.pad(probs, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
        cdf = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
        block = torch.searchsorted(cdf, u * cdf[:, -1:])
        inside = blocks[torch.arange(rows), block[:, 0]].cumsum(-1, dtype=torch.float64)
        rest = u * cdf[:, -1:] - F.pad(cdf, (1, 0)).gather(1, block)
        tokens = block * BLOCK + torch.searchsorted(inside, rest).clamp_(max=BLOCK - 1)
    tokens.clamp_(max=vocab - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def by_race_of_all(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    logprobs = logits.log_softmax(-1)
    times = -uniforms(keys, positions, logits.shape[1]).log()
    tokens = (logprobs.exp() / times).argmax(-1, keepdim=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


Draw = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
DRAWS: dict[str, Draw] = {"inverse": by_inverse, "all": by_race_of_all, "race": race_torch}
OWN: dict[str, Draw] = {"own": race}  # the engine's


def made_up(rows: int, vocab: int) -> Tensor:
    """Normal logits that fall with a token's number, as those of byte-pair encodings do."""
    return 2.0 * torch.randn(rows, vocab) - (torch.arange(vocab) + 1).log()


def random_keys(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-(2**62), 2**62, (rows,)), torch.arange(rows)


# ---- cost ----------------------------------------------------------------------------------------------------------


def cost(vocab: int, rows: int, turns: int) -> dict[str, int]:
    """Return the median microseconds of each draw, softmax included."""
    logits, (keys, positions) = made_up(rows, vocab), random_keys(rows)
    seconds: dict[str, list[float]] = {name: [] for name in DRAWS | OWN}
    for _ in range(turns):
        for name, draw in (DRAWS | OWN).items():
            start = time.perf_counter()
            draw(logits, keys, positions, 1.0)
            seconds[name].append(time.perf_counter() - start)
    return {name: round(1e6 * statistics.median(times)) for name, times in seconds.items()}


def step_cost(model: str, rows: int, steps: int) -> tuple[float, float, float]:
    """Return the median milliseconds of a decode step with the engine's own draw, what part of them a race takes more
    than an inverse, both by torch's operations, and what part the own draw takes in all."""
    engine = Engine(
        bench.build(model)[0].requires_grad_(False), replace(bench.ROLLOUT, max_running=rows), SamplingConfig(), ()
    )
    for i, ids in enumerate(bench.prompts(rows)):
        engine.add(Sequence(i, 0, 0, tuple(ids), i, steps + 8, ignore_eos=True))
    engine.step()
    names = ("inverse", "race", "own")
    whole, seconds = list[float](), {name: list[float]() for name in names}
    for i in range(steps):
        name = names[i % 3]

        def draw(logits: Tensor, keys: Tensor, positions: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor]:
            start = time.perf_counter()
            drawn = (DRAWS | OWN)[name](logits, keys, positions, 1.0)  # noqa: B023
            seconds[name].append(time.perf_counter() - start)  # noqa: B023
            return drawn

        with patch("engine.rows.sample", draw):
            start = time.perf_counter()
            engine.step()
            if name == "own":
                whole.append(time.perf_counter() - start)
    step = statistics.median(whole)
    inverse, by_race, own = (statistics.median(seconds[name]) for name in names)
    return 1e3 * step, (by_race - inverse) / step, own / step


# ---- agreement -----------------------------------------------------------------------------------------------------


def differing(pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return how often the draws from two logits of the same contexts differ, and the mean TV. Pairs of [n, V]"""
    found: dict[str, list[float]] = {}
    for old, new in pairs:
        keys, positions = random_keys(len(old))
        distance = (old.softmax(-1) - new.softmax(-1)).abs().sum(-1).mean() / 2
        found.setdefault("tv", []).append(distance.item())
        for name, draw in DRAWS.items():
            one, other = (draw(logits, keys, positions, 1.0)[0] for logits in (old, new))
            found.setdefault(name, []).append((one != other).float().mean().item())
    return {name: statistics.fmean(values) for name, values in found.items()}


def run_default_task(folder: Path, steps: int, *more: str) -> None:
    """Train, with a checkpoint after each update and all responses on disk."""
    settings = dict(dir=folder / "run", steps=steps, eval_every=0, checkpoint_every=1, keep_checkpoints=steps)
    flags = [f"--run.{key}={value}" for key, value in settings.items()] + ["--run.dump_rollouts=true", *more]
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "tiny.toml"), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"train.py ended with code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def logits_of(run: Path, updates: int, last: int, count: int) -> Tensor:
    """Return the logits of earlier weights for the tokens of the last round's first `count` groups. [n, V]"""
    model = checkpoint.load_model(run / "checkpoints" / f"step_{updates:06d}", torch.device("cpu"), torch.float32)
    found = []
    for line in (run / "rollouts" / f"step_{last:06d}.jsonl").read_text().splitlines()[:count]:
        group = json.loads(line)
        prompt = group["prompt"]["token_ids"]
        texts = [prompt + sample["token_ids"][:-1] for sample in group["samples"]]
        lengths = [len(text) for text in texts]
        places = torch.cat([torch.arange(length) for length in lengths])
        hidden = model(torch.tensor(sum(texts, [])), places, PackedAttention(lengths, torch.device("cpu")))
        found.append(model.logits(hidden)[places >= len(prompt) - 1])
    return torch.cat(found)


def agreement_by_lag(quick: bool) -> list[dict[str, float]]:
    """Return how often draws differ between the weights of the last round and older ones."""
    last, lags, repeats = (3, (1,), 1) if quick else (LAST + 1, LAGS, 10)
    with tempfile.TemporaryDirectory() as folder:
        few = ("--warm_start.steps=20", "--scheduler.num_prompts=4", "--rollout.max_response_tokens=64")
        run_default_task(Path(folder), last, *(few if quick else ()))
        of = {lag: logits_of(Path(folder) / "run", last - 1 - lag, last, 16) for lag in (0, *lags)}
    return [{"lag": lag} | differing((of[lag], of[0]) for _ in range(repeats)) for lag in lags]


def agreement_by_vocabulary(quick: bool) -> list[dict[str, float]]:
    """Return how often draws differ where noise disturbs made-up logits."""
    rows = []
    for vocab in VOCABS[:1] if quick else VOCABS:
        repeats = 1 if quick else max(10, 1_500_000 // vocab)
        pairs = ((x, x + NOISE * torch.randn(x.shape)) for x in (made_up(64, vocab) for _ in range(repeats)))
        rows.append({"vocab": vocab} | differing(pairs))
    return rows


def print_table(rows: list[dict[str, float]]) -> None:
    print("".join(f"{name:>10}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>10}" if isinstance(value, int) else f"{value:>10.2%}" for value in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small vocabulary, barely trained model: seconds")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    with torch.no_grad():
        sizes = [(vocab, rows) for vocab in VOCABS[: 1 if quick else None] for rows in ROWS]
        costs = [
            {"vocab": vocab, "rows": rows} | cost(vocab, rows, 5 if quick else max(31, 1_000_000 // (vocab * rows)))
            for vocab, rows in tqdm(sizes, "cost", disable=not sys.stderr.isatty())
        ]
        print_table(costs)
        slower = list[dict[str, object]]()
        for model, rows in STEPS[: 1 if quick else None]:
            milliseconds, part, share = step_cost(model, rows, 30 if quick or model == "half" else 450)
            print(f"{model}, {rows} rows: a step of {milliseconds:.2f} ms is {part:+.2%} longer; own draw {share:.2%}")
            slower.append({"model": model, "rows": rows, "milliseconds": milliseconds, "longer": part, "share": share})
        print_table(lags := agreement_by_lag(quick))
        print_table(vocabularies := agreement_by_vocabulary(quick))
    worst = max(float(str(row["share"])) for row in slower)
    print(json.dumps({"name": "draw", "costs": costs, "steps": slower, "longer_max": worst, "noise": NOISE,
                      "lags": lags, "vocabularies": vocabularies, "agreement_lag1": 1 - lags[0]["race"],
                      "agreement_lag1_inverse": 1 - lags[0]["inverse"]}))  # fmt: skip


if __name__ == "__main__":
    main()
