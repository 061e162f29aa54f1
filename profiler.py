"""Measure the rollout for the parallelism planner: `python profiler.py --ranks=4 --config FILE.toml ...`

Takes the settings and the number of ranks of the run. Writes `planner.profile`, or rollout_profile.json in the model
folder: seconds of prefill and decode by tensor-parallel size, sequences and context. (RollPacker, section 4.2)
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

from process.threads import before_torch

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback until a handler is set
    before_torch()

import torch
from tqdm import tqdm

import checkpoint
import parallel
from config import ConfigError, load_config
from core import SampleId
from engine.pages import has_room, pages_needed
from engine.sequence import Sequence
from metrics import Clock
from model import empty_model
from parallel import TPGroups, World, make_tp_groups
from policies.flow import OverlapConfig
from policies.step_times import Profile, SizeProfile
from process import command, ending, launcher
from rollout import Engine
from settings import (
    MODELS,
    Config,
    model_dtype,
    model_source,
    profile_conditions,
    profile_path,
    rollout_sizes,
    sizes_with_room,
    with_kv_memory,
    with_layout,
)
from warm_start import ensure_model
from weights import sharding

MAX_TOKENS = 2**18  # context tokens of a point: more would take minutes to prefill, and times grow linearly
OWN = (
    "loss.name",
    "loss.advantage",
    "scheduler.policy",
)  # may be of a file that is not loaded; no time depends on them
BLOCKS = 5  # of decode steps; the median counts


def make_profile(config: Config, folder: Path, world: World, contexts: List[int] = ()) -> Profile:
    """Measure every size that a run of these settings and the model in `folder` could take. Collective.

    `contexts`: as for `measure`.
    """
    (shape, weights), dtype = checkpoint.check_model(folder), model_dtype(config, world.device.type)
    config = replace(config, overlap=OverlapConfig())  # all ranks decode
    config = with_layout(config, shape, world.size, world.node_size, world.device)
    config = parallel.broadcast_object(world, config)
    if config.rollout.layout == "sharded":
        group, _ = sharding.shard_groups(world, config.trainer.shard)
        model = sharding.shard_model(empty_model(shape, dtype), group)
        checkpoint.fill(model, weights)
    else:
        model = checkpoint.load_model(folder, world.device, dtype)
    model.requires_grad_(False)
    tp_groups = make_tp_groups(world, rollout_sizes(config, shape, world.size, world.node_size, elastic=True))
    config = with_kv_memory(config, shape, world)  # after the groups: NCCL takes memory for each
    sizes = sizes_with_room(config, shape, world.device, tp_groups)
    engine = Engine(model, config.rollout, config.sampling, (), parallel=tp_groups[sizes[0]], sizes=sizes)
    made_on = profile_conditions(config, model.shape, world.size, world.device)
    return Profile(made_on, measure(engine, tp_groups, world, contexts))


def measure(
    engine: Engine,
    tp_groups: TPGroups,
    world: World,
    contexts: List[int] = (),
    of_ranks: Callable[[List[float]], float] = max,
) -> dict[int, SizeProfile]:
    """Return the times of an idle engine in groups of each of its sizes, at 1, 4, 16 .. sequences. Collective.

    `contexts`: tokens of each sequence, by default a longest sequence, a quarter and a sixteenth of it. All replicas
    work side by side, as in a rollout. `of_ranks` makes one number of all ranks' seconds; by default the slowest.
    """
    batches = sorted({min(4**i, engine.config.max_running) for i in range(8)})
    longest = engine.config.max_prompt_tokens + engine.config.max_response_tokens
    sizes = {}
    for size, num_pages in sorted(engine.num_pages.items()):
        engine.regroup(tp_groups[size])
        points = [Point(engine, b, c) for b in batches for c in contexts or (longest // 16, longest // 4, longest)]
        points = [point for point in points if point.fits]
        if not any(point.batch == 1 for point in points):
            raise ConfigError(
                f"rollout.kv_gib: {num_pages} pages of tensor-parallel size {size} are too few to measure"
            )
        if engine.runner.graphs:
            points[-1].measure(world)  # captures all graphs and loads kernels
        decode, prefill = [], {}
        for point in tqdm(points, desc=f"tensor parallel {size}", disable=None if world.is_main else True):
            seconds = parallel.gather_objects(world, point.measure(world))
            prefill[point.nominal] = point.context, of_ranks([s for s, _ in seconds])
            decode.append((point.batch, point.context, of_ranks([s for _, s in seconds])))
        sizes[size] = SizeProfile(num_pages, tuple(decode), tuple(sorted(prefill.values())))
    return sizes


class Point:
    """A number of sequences and their context in tokens, less the tokens that the measurement itself decodes."""

    def __init__(self, engine: Engine, batch: int, context: int):
        c, self.engine, self.batch, self.nominal = engine.config, engine, batch, context
        self.steps = min(max(c.max_response_tokens // (2 * BLOCKS), 1), 8)  # of decoding in a block
        chunk = max(c.step_tokens - batch, 1)
        # The first sequences decode while the last are prefilled, and none may end before the blocks do.
        self.new_tokens = BLOCKS * self.steps + 3 + batch * context // chunk
        longest = c.max_prompt_tokens + c.max_response_tokens
        self.context = max(min(context, longest - self.new_tokens), 1)

    @property
    def fits(self) -> bool:
        tokens, pages = self.context + self.new_tokens, self.engine.pages
        holds = has_room(self.batch * pages_needed(tokens, pages.page_size), pages.size, pages.size, self.batch - 1)
        return holds and self.new_tokens <= self.engine.config.max_response_tokens and self.batch * tokens <= MAX_TOKENS

    def measure(self, world: World) -> tuple[float, float]:
        """Return (prefill seconds of a token, seconds of a decode step) on this rank."""
        engine, rng, longest = self.engine, Random(0), self.engine.config.max_prompt_tokens
        for i in range(self.batch):
            ids = [rng.randrange(engine.model.shape.vocab_size) for _ in range(self.context)]
            prompt, given = tuple(ids[:longest]), ids[longest:]  # tokens over a longest prompt count as generated
            engine.add(Sequence(i, 0, 0, prompt, i, len(given) + self.new_tokens, True, (), given, [0.0] * len(given)))
        parallel.barrier(world)
        start = time.perf_counter()
        while len(engine.batcher.running) < self.batch:
            assert not engine.is_idle, "the first have ended before the last began"
            engine.step()
        prefill = (_now(world) - start) / (self.batch * self.context)
        blocks = []
        for _ in range(BLOCKS):
            start = time.perf_counter()
            for _ in range(self.steps):
                engine.step()
            blocks.append((_now(world) - start) / self.steps)
        engine.abort([SampleId(0, i, 0) for i in range(self.batch)])
        return prefill, median(blocks)


def _now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", help="processes on this machine, as for the run")
    parser.add_argument(
        "--config", help="TOML file of the run; --section.key=value as for train.py, whose --help has all"
    )
    asked, argv = launcher.parse(argv)
    flags, overrides = parser.parse_known_args(argv)
    try:
        config = load_config(Config, flags.config, overrides, OWN)
        if launcher.is_wanted(asked):
            return launcher.launch(__file__, asked, argv)
        folder, place = model_source(config), profile_path(config).parent
        if config.model.path and not folder.exists():
            raise ConfigError(f"{folder}: no such model; give model.path")
        if (folder.exists() or place != folder) and not os.access(place, os.W_OK):
            raise ConfigError(f"{profile_path(config)}: cannot write there; give planner.profile another place")
    except ConfigError as error:
        return ending.refuse(error)

    def work(world: World) -> None:
        if not config.model.path:
            ensure_model(config.warm_start, config.data.train, MODELS, world)
        profile = make_profile(config, folder, world)
        if world.is_main:
            profile.save(profile_path(config))
            print(f"times of tensor-parallel sizes {[*profile.sizes]} written to {profile_path(config)}")

    return ending.exit_code(work, config.run.device, config.run.timeout_seconds, Clock())


if __name__ == "__main__":
    command.run(main)
