"""Fits one model's response lengths: `python figures/fit.py 14B/16k`. Prints what belongs into its TOML.

Targets are Figure 11's entries with eta on one side, and what Figure 2 says of lengths: a 75th percentile of 755 to
1,100 tokens and a median that is 1/32 to 1/25 of 16k. Five numbers describe the lengths, one the engine: seconds per
layer and decode step, which the baseline's bar fixes. They are searched by random steps that shrink. The search uses
a closed form of a round's time; the simulator then says how far off that is for each entry, the targets are
corrected, and the search goes on. `8B` is Qwen3-8B/32k, fitted to the eight numbers of Figure 4.

Set by hand, with these numbers of the paper in view, so that their agreement proves little. For all models:
`sequence_seconds` and `rollout_seconds` (costs.py), by the bars with eta on both sides; `sandboxes` (simulate.py),
by Table 1's share of rewards and Table 2's 7B; the default of `kv_memory`, raised because 32B/32k preempted at the
baseline. One a model: `padded`, by Table 1 and the short rounds of Figure 9. Not used for any number: RLHFuse and the
long rounds of Figure 9, Figures 10, 12 and 14, Table 4, and 14B and 32B in Table 2 beyond their training time.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

import fig04
import numpy as np
from fig11 import PAPER, rollout_seconds
from paper import GPUS, MODELS, TENSOR_PARALLEL

from config import ConfigError
from costs import Costs
from simulate import ModelFile, load_hardware, load_model
from workload import LengthModel

BOUNDS = {
    "layer_seconds": (50e-6, 300e-6),
    "median": (200.0, 900.0),
    "prompt_spread": (0.05, 1.5),
    "response_spread": (0.05, 1.5),
    "runaway": (1e-4, 0.08),
    "runaway_gather": (0.01, 0.95),
}
TARGETS = [etas for etas in PAPER if min(etas) == 1]
ROUNDS, P0, R0 = 60, 128, 8


class ClosedForm:
    """A round's time if all replicas were alike. The same random numbers at every call."""

    def __init__(self, model: str):
        self.hardware, self.tp = load_hardware("h800"), TENSOR_PARALLEL[model]
        self.replicas = GPUS[model] // self.tp
        rng, prompts, responses = np.random.default_rng(0), int(1.5 * P0), int(1.5 * R0)
        self.center = rng.standard_normal((ROUNDS, prompts, 1))
        self.spread = rng.standard_normal((2, ROUNDS, prompts, responses))
        self.nature, self.chance = rng.random((ROUNDS, prompts, 1)), rng.random((2, ROUNDS, prompts, responses))

    def draw(self, m: LengthModel) -> np.ndarray:
        """Return lengths [visit, round, prompt, response]."""
        strength = 1 / m.runaway_gather - 1
        quantiles = np.sort(np.random.default_rng(1).beta(m.runaway * strength, (1 - m.runaway) * strength, 20_000))
        runaway = quantiles[(self.nature * len(quantiles)).astype(int)]
        lengths = m.median * np.exp(m.prompt_spread * self.center + m.response_spread * self.spread)
        return np.where(self.chance < runaway, m.limit, np.clip(lengths, 1, m.limit))

    def seconds(self, lengths: np.ndarray, etas: tuple[float, float], file: ModelFile) -> float:
        """Return the mean over a period: short rounds, and the long one that trains what they left over."""
        num_prompts, num_responses = math.ceil(etas[0] * P0), math.ceil(etas[1] * R0)
        first, again = lengths[0, :, :num_prompts, :num_responses], lengths[1, :, :num_prompts, :R0]
        wins = np.sort(first, -1)[..., R0 - 1]  # [round, prompt]: when it has its responses
        cut = np.sort(wins, -1)[:, P0 - 1]
        ends = np.minimum(first, np.minimum(wins, cut[:, None])[..., None])
        short = self._time(ends, file).mean()
        if num_prompts == P0:
            return short
        order = np.argsort(wins, -1)[:, P0:]  # the losers of each round
        losers = np.take_along_axis(again, order[..., None], 1).reshape(-1, R0)
        long = losers[: len(losers) // P0 * P0].reshape(-1, P0, R0)
        rounds = P0 / (num_prompts - P0)
        return (rounds * short + self._time(long, file).mean()) / (rounds + 1)

    def _time(self, ends: np.ndarray, file: ModelFile) -> np.ndarray:
        """[round, prompt, response] -> seconds [round]"""
        prompt, c = file.lengths.prompt_tokens, Costs(self.hardware, file.shape, file.efficiency, self.tp)
        one, two, deep = c.decode(1, 0), c.decode(2, 0), c.decode(1, 1)
        longest, total = ends.max((1, 2)), ends.sum((1, 2))
        read = (ends**2 / 2 + prompt * ends).sum((1, 2)) * (deep - one)
        shared = total * (two - one) + read + ends.shape[1] * c.prefill(prompt)
        return file.efficiency.rollout_seconds + longest * (2 * one - two) + shared / self.replicas


def outside(value: float, low: float, high: float) -> float:
    """Return how far outside a range a positive value is, in logarithms."""
    return max(math.log(low / value), math.log(value / high), 0.0)


def value_of(file: ModelFile, key: str) -> float:
    return getattr(file.efficiency, key) if hasattr(file.efficiency, key) else getattr(file.lengths, key)


def changed(file: ModelFile, values: dict[str, float]) -> ModelFile:
    engine = {key: value for key, value in values.items() if hasattr(file.efficiency, key)}
    lengths = {key: value for key, value in values.items() if key not in engine}
    return replace(file, lengths=replace(file.lengths, **lengths), efficiency=replace(file.efficiency, **engine))


def loss(form: ClosedForm, file: ModelFile, targets: dict[tuple[float, float], float]) -> float:
    """Return the mean squared logarithmic error over the targets; Figure 2's two count like one bar each."""
    lengths = form.draw(file.lengths)
    errors = [math.log(form.seconds(lengths, etas, file) / target) for etas, target in targets.items()]
    seen = lengths[0, :, :P0, :R0]
    errors += [outside(np.quantile(seen, 0.75), 755, 1100), outside(np.median(seen), 512, 655)]
    return sum(e * e for e in errors) / len(errors)


def search(loss: Callable[[ModelFile], float], best: ModelFile, bounds: dict, tries: int, seed: int) -> ModelFile:
    """Change some numbers by random factors, ever smaller ones; keep what lowers the loss."""
    rng, least = np.random.default_rng(seed), loss(best)
    for i in range(tries):
        width = 0.7 * 0.03 ** (i / tries)
        values = {
            key: float(np.clip(value_of(best, key) * math.exp(width * rng.standard_normal()), low, high))
            for key, (low, high) in bounds.items()
            if rng.random() < 0.5
        }
        file = changed(best, values)
        if (error := loss(file)) < least:
            least, best = error, file
    print(f"search: error {math.sqrt(least):.3f}", {k: f"{value_of(best, k):.4g}" for k in bounds}, flush=True)
    return best


def fit_8b(tries: int) -> None:
    """Qwen3-8B/32k, by the simulator itself to the eight numbers of Figure 4."""

    def loss(file: ModelFile) -> float:
        try:
            found = fig04.rounds(file)
        except ConfigError:
            return math.inf  # a response does not fit the memory
        errors = [math.log(max(x, 1) / y) for key, pair in fig04.PAPER.items() for x, y in zip(found[key], pair)]
        return sum(e * e for e in errors) / len(errors)

    bounds = BOUNDS | {"median": (1000.0, 20_000.0), "kv_memory": (0.3, 0.9)}
    search(loss, load_model("qwen3-8b"), bounds, tries, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*MODELS, "8B"])
    parser.add_argument("--tries", type=int, default=600)
    parser.add_argument("--passes", type=int, default=4, help="corrections by the simulator")
    args = parser.parse_args()
    if args.model == "8B":
        return fit_8b(args.tries)
    best, place = load_model(MODELS[args.model]), list(MODELS).index(args.model)
    form = ClosedForm(args.model)
    paper = targets = {etas: PAPER[etas][place] for etas in TARGETS}
    for i in range(args.passes):
        best = search(lambda file: loss(form, file, targets), best, BOUNDS, args.tries, i)  # noqa: B023
        lengths = form.draw(best.lengths)
        simulated = {e: rollout_seconds(args.model, e, 90, best) for e in TARGETS}
        # Half of the way: the simulator's answer has noise too.
        off = {e: paper[e] * form.seconds(lengths, e, best) / simulated[e] for e in TARGETS}
        targets = {e: math.sqrt(targets[e] * off[e]) for e in TARGETS}
        error = math.sqrt(sum(math.log(simulated[e] / paper[e]) ** 2 for e in TARGETS) / len(TARGETS))
        print(f"simulated: error {error:.3f}", {e: f"{paper[e]} -> {simulated[e]:.0f}" for e in TARGETS}, flush=True)


if __name__ == "__main__":
    main()
