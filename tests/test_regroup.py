"""Engines that change their tensor-parallel size between rounds: same tokens, same memory, same training."""

import ctypes
import json
import os
import shutil
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import steps_of, thorough, train_runs
from test_rollout import FusedEngine
from test_streamed import make_tail, trained
from test_tensor_parallel import CONFIG, FAMILIES, SHAPE, random_model

import profiler
import train
from config import ConfigError
from engine import native
from engine.cpu import Packed
from engine.graphs import DecodeGraphs
from engine.memory import num_pages_for, weight_bytes
from engine.pages import LAYOUTS
from engine.sequence import Sequence
from engine.shard import num_own_elements
from model import Model, parse_shape
from parallel import TensorParallel, World, check_group_size, gather_objects, group_sizes, make_tp_groups
from policies import planner
from policies.planner import Choice, EngineLimits, Launch, simulate_replica
from policies.step_times import PROFILE_NAME, FittedTimes
from rollout import Engine, RolloutConfig, cache_of
from sampling import SamplingConfig, sample_key
from weights.sharding import shard_groups, shard_model

ORDER = (2, 4, 1, 4, 2)


def refuse(*args, **kwargs):
    raise AssertionError("a group was made after the start")


def generate(engine: Engine) -> dict[tuple, tuple[int, ...]]:
    for i in range(6):
        engine.add(Sequence(i // 2, i % 2, 0, tuple(range(i // 2, 9)), sample_key(0, i), 5 + 2 * i))
    samples: dict[tuple, tuple[int, ...]] = {}
    while not engine.is_idle:
        samples |= {s.id: tuple(s.token_ids) for s in engine.step()}
    return samples


def same_tokens_at_every_size(
    world: World, family: str, kind: type[Engine], packed: bool, layout: str, shard: int
) -> None:
    """`shard`: the ranks over which the model lies from which the engine takes its weights."""
    tp_groups, model = make_tp_groups(world, [1, 2, 4]), random_model(family)
    Packed.SMALL = 0
    config = replace(CONFIG, prepack=packed, weights=layout)
    source = shard_model(model, shard_groups(world, shard)[0]) if shard > 1 else model
    dist.new_group = refuse
    sampling = SamplingConfig()  # greedy tokens: tests/test_tensor_parallel.py
    engine = kind(source, config, sampling, [7], parallel=tp_groups[1], sizes=(1, 2, 4))
    address, seen = engine.runner.memory.whole.data_ptr(), set()
    for step, size in enumerate(ORDER):
        with torch.no_grad():  # the weights change between rounds, as in training
            for parameter in {*model.parameters(), *source.parameters()}:
                parameter.mul_(1.05)
        engine.load_weights(source, step)
        if step == 3:
            engine.release()
            engine.take_back()
        engine.regroup(tp_groups[size])
        memory, kv, own = engine.runner.memory, engine.runner.memory.kv, engine.own_elements[size]
        assert kv.data_ptr() == memory.whole.data_ptr() + own * kv.itemsize and kv.shape[2] == engine.num_pages[size]
        assert memory.whole.data_ptr() == address or step >= 3
        assert kv.shape[3] == max(model.shape.num_kv_heads // size, 1)
        samples = generate(engine)
        assert samples == generate(Engine(model, CONFIG, sampling, [7]))
        seen |= set(samples.values())
    # A tied model of random weights likes to repeat a token.
    assert len(seen) > 10 or family == "tied", "the weights must have changed the tokens"


@pytest.mark.parametrize(
    "family, kind, packed, layout, shard",
    [
        thorough("qwen3", Engine, True, "whole", 1),
        thorough("qwen2", FusedEngine, False, "whole", 1),
        ("qwen2", Engine, True, "sharded", 4),
        ("llama", FusedEngine, False, "sharded", 2),
        thorough("tied", Engine, False, "sharded", 1),
    ],
)
def test_every_size_draws_the_tokens_of_one_rank(run_ranks, family, kind, packed, layout, shard) -> None:
    run_ranks(4, same_tokens_at_every_size, family, kind, packed, layout, shard)


def test_sharded_weights_leave_their_memory_to_pages(tiny_model) -> None:
    """A rank's part and its pages take as much as whole weights and their pages."""
    shape, dtype, cpu = tiny_model.shape, torch.float32, torch.device("cpu")
    weights = weight_bytes(shape, dtype)
    config = replace(CONFIG, max_running=10**4, kv_gib=weights / 2**30)
    page = cache_of(config, shape, dtype).page_bytes
    for size in (1, 2, 4):
        whole, sharded = (num_pages_for(replace(config, weights=name), shape, dtype, cpu, size) for name in LAYOUTS)
        assert whole == weights // page(size) and sharded == weights * (2 - 1 / size) // page(size)
        # Norms, and copies of KV heads, are on every rank.
        assert weights / size <= num_own_elements(shape, size) * dtype.itemsize <= 1.2 * weights / size
        engine = Engine(tiny_model, replace(config, weights="sharded"), SamplingConfig(), [7], sizes=(1, size))
        assert engine.runner.memory.length * dtype.itemsize <= 2.1 * weights


def what_is_copied(world: World) -> None:
    tp_groups = make_tp_groups(world, [1, 2, 4])
    for family, kv_heads in (("qwen2", 2), ("qwen3", 4)):
        model = random_model(family)
        plain = replace(CONFIG, prepack=False)
        engine = Engine(model, plain, SamplingConfig(), [7], parallel=tp_groups[1], sizes=(1, 2, 4))
        split = replace(model.layers[0].split, rank=world.rank, size=4)
        rows = [layer.weights().shard(split).qkv for layer in model.layers]
        biases = 0 if family == "qwen3" else sum(r.shape[0] * r.element_size() for r in rows)
        copies = 0 if kv_heads == 4 else sum(r.nbytes for r in rows) + biases
        for size, moved in ((2, 0), (4, copies), (1, 0), (4, copies)):
            before = engine.stats.regroup_bytes
            engine.regroup(tp_groups[size])
            assert engine.stats.regroup_bytes - before == moved, (family, size)
        engine.regroup(tp_groups[4])
        assert engine.stats.regroup_bytes - before == copies, "the size stayed"


def test_views_cost_nothing_and_copies_are_counted(run_ranks) -> None:
    run_ranks(4, what_is_copied)


def test_new_weights_are_packed_once_whether_the_size_changes_or_not(tiny_model, monkeypatch) -> None:
    packs, pack = [], Packed.pack
    monkeypatch.setattr(Packed, "SMALL", 0)
    monkeypatch.setattr(Packed, "pack", lambda self, weight: packs.append(weight) or pack(self, weight))
    engine = Engine(tiny_model, CONFIG, SamplingConfig(), [7])
    once = len(packs)
    assert once == 4 * tiny_model.shape.num_layers + 1
    for step, parallel in enumerate((engine.parallel, copy(engine.parallel)), 1):
        packs.clear()
        engine.load_weights(tiny_model, step)
        engine.regroup(parallel)
        generate(engine)
        assert len(packs) == once
    packs.clear()
    engine.load_weights(tiny_model, 3)
    generate(engine)
    assert len(packs) == once, "without a regroup the first step does it"


# ---- memory ------------------------------------------------------------------------------------------------------


def resident(peak: bool) -> int:
    """Bytes of this process in memory, now or at most since `forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_is_bounded(world: World) -> None:
    pytest.MonkeyPatch().setattr(native, "has_tiles", lambda: False)  # weights that tiles multiply have no packed copy
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    c = SHAPE | FAMILIES["llama"] | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    model = Model(parse_shape(c, "llama"))
    layer_bytes = sum(p.nbytes for p in model.layers[0].parameters())
    tp_groups = make_tp_groups(world, [1, 2])
    config = RolloutConfig(max_prompt_tokens=8, max_response_tokens=8, max_running=2, page_size=4, kv_gib=0.01)
    engine = Engine(model, config, SamplingConfig(), [7], parallel=tp_groups[1], sizes=(2,))
    assert isinstance(engine.runner.weights.layers[0].qkv, Packed)
    for size in (2, 1, 2, 1):
        before = resident(peak=False)
        forget_peak()
        engine.regroup(tp_groups[size])
        peak, after = resident(peak=True), resident(peak=False)
        assert peak <= max(before, after) + layer_bytes + 2**22, [x / 2**20 for x in (before, peak, after)]
        assert abs(after - before) > 3 * layer_bytes, "half of the packed weights came or went"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc")
def test_a_regroup_needs_no_more_than_one_layer_besides(run_ranks) -> None:
    run_ranks(2, peak_is_bounded)


# ---- training ----------------------------------------------------------------------------------------------------


def every_step_another(p, kind: str, launch: Launch, is_first: bool) -> Choice:
    return Choice(p.sizes[(p.sizes.index(p.tracks[kind].size) + 1) % len(p.sizes)], "the next")


def train_fixed_and_switching(world: World, *runs: list[str]) -> None:
    planner.RULES["paper"] = every_step_another
    train_runs(world, *runs)


def every_look_another(p, kind: str, live: list[list[int]]) -> Choice:
    assert len(live) == p.limits.num_ranks // p.size and p.is_due(sum(map(len, live)))
    p.size = p.sizes[(p.sizes.index(p.size) + 1) % len(p.sizes)]
    return Choice(p.size, "the next")


def train_with_a_tail(world: World, *runs: list[str]) -> None:
    """Train each run; where sizes change within rounds, they change at every look."""
    planner.ParallelismPlanner.choose_again = every_look_another
    make_tail()
    train_runs(world, *runs)


@pytest.fixture
def settings(settings, tmp_path: Path):
    rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    grader = "tests/graders.py:share_of_digits"
    return partial(settings, run__steps=5, data__train=tmp_path / "data.jsonl", data__task=grader)


SYNCHRONOUS = {"scheduler__policy": "synchronous"}  # the rule keeps short and long rounds apart


@pytest.mark.thorough
def test_switching_at_every_step_leaves_the_training_as_it_was(run_ranks, settings, tmp_path) -> None:
    switching = settings("switching", planner__rule="paper", rollout__prepack="false", **SYNCHRONOUS)
    run_ranks(4, train_fixed_and_switching, switching, settings("fixed", **SYNCHRONOUS))
    switched, fixed = steps_of(tmp_path / "switching"), steps_of(tmp_path / "fixed")
    assert [r["planner"]["size"] for r in switched] == [2, 4, 1, 2, 4]
    assert [r["planner"]["size"] for r in fixed] == [1] * 5
    assert [r["engine"]["regroup_bytes"] > 0 for r in switched] == [False, True, False, False, True]  # 2 KV heads
    assert all(r["seconds"]["regroup"] >= 0 and r["planner"]["reason"] == "the next" for r in switched)
    for mine, theirs in zip(switched, fixed, strict=True):
        assert (mine["reward"], mine["tokens"]) == (theirs["reward"], theirs["tokens"])
        assert mine["engine"]["decoded_tokens"] == theirs["engine"]["decoded_tokens"]
        for name in ("loss", "grad_norm", "entropy"):
            assert mine["train"][name] == pytest.approx(theirs["train"][name], abs=1e-5), name
        assert mine["train"]["logprob_diff_max"] < 1e-4


@pytest.mark.parametrize(
    "ranks, layout",
    [(2, {"trainer__shard": 2, "rollout__weights": "sharded"}), thorough(4, {})],
)
def test_sizes_that_change_within_rounds_leave_the_training_as_it_was(
    run_ranks, settings, tmp_path, ranks, layout
) -> None:
    tail = {"scheduler__window_iterations": 1, "rollout__max_response_tokens": 160, "run__steps": 3, **SYNCHRONOUS}
    tail |= {"data__task": "match", "run__dump_rollouts": "true"}
    # The rule of the paper starts at size 1, here without a profile; `predict` would ask for one.
    within = settings("within", planner__rule="paper", planner__within_round="true", **tail, **layout)
    run_ranks(ranks, train_with_a_tail, within, settings("fixed", **tail))
    assert trained(tmp_path / "within") == trained(tmp_path / "fixed")
    for mine, theirs in zip(steps_of(tmp_path / "within"), steps_of(tmp_path / "fixed"), strict=True):
        sizes = [change["size"] for change in mine["round"]["resized"]]
        assert len(sizes) >= ranks, "one replica of all ranks changes its size too"
        assert sizes == [[1, 2, 4][i % (1 + ranks // 2)] for i in range(1, len(sizes) + 1)]
        assert mine["seconds"]["resize"] > 0 and theirs["round"]["resized"] == []
        assert (mine["reward"], mine["length"]) == (theirs["reward"], theirs["length"])
        computed_again = sum(
            change["responses"] for change in mine["round"]["resized"]
        )  # their next tokens, by prefill
        assert mine["engine"]["decoded_tokens"] + computed_again == theirs["engine"]["decoded_tokens"]
        for name in ("loss", "grad_norm", "entropy"):
            assert mine["train"][name] == pytest.approx(theirs["train"][name], abs=1e-5), name
        assert mine["train"]["logprob_diff_max"] < 1e-4


def train_by_graphs(world: World, run: list[str]) -> None:
    """Train with stand-ins for CUDA graphs. A capture runs a step's collectives: a replica's ranks capture together."""
    captured: list[int] = []
    regroup = Engine.regroup

    def capture(graphs: DecodeGraphs, step, rows: int) -> SimpleNamespace:
        assert (graphs.ended == 1).all(), "captured between rounds, when no row decodes"
        captured.append(graphs.layout)
        return SimpleNamespace(replay=lambda: replay(step, rows))

    def replay(step, rows: int) -> None:
        assert {1, 2, 4} == {*captured}, "all are captured at the start"
        step(rows)

    def regroup_alike(engine: Engine, group: TensorParallel) -> None:
        assert engine.runner.graphs
        known = gather_objects(group.world, sorted(engine.runner.graphs.graphs))
        assert known == known[:1] * group.size, "some ranks of a replica would capture, others replay"
        regroup(engine, group)

    DecodeGraphs.captures, DecodeGraphs._capture = property(lambda _: True, lambda *_: None), capture
    Engine._is_fused, Engine.regroup = staticmethod(lambda device: True), regroup_alike
    planner.RULES["paper"] = every_step_another
    make_tail()
    train_runs(world, run)
    assert len(captured) == 3 * 4, "after a scale-down they are as they were"


@pytest.mark.thorough
def test_ranks_that_left_a_round_and_those_that_stayed_capture_graphs_together(run_ranks, settings, tmp_path) -> None:
    tail = dict(scheduler__window_iterations=2, rollout__max_response_tokens=160, rollout__max_running=8)
    both = dict(stream__policy="fixed", stream__fixed_share=0.2, planner__rule="paper", data__task="match")
    layout = dict(trainer__shard=2, rollout__weights="sharded", run__steps=2)
    run_ranks(4, train_by_graphs, settings("run", **tail, **both, **layout, **SYNCHRONOUS))
    left, together = steps_of(tmp_path / "run")
    assert left["round"]["stream"]["samples"] and (left["planner"]["size"], together["planner"]["size"]) == (2, 4)


def test_a_profile_is_made_and_used_and_one_of_other_ranks_refused(
    settings, run_mains, run_ranks, tiny_folder, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    given = dict(model__path=folder, planner__rule="predict", rollout__page_size=8, rollout__max_running=16)
    args = settings("run", run__steps=2, data__eval_prompts=0, **given)
    assert train.main(["--check", "--ranks=2", *args]) == 2
    assert "cannot read the rollout profile" in capsys.readouterr().err
    assert all(ended.code == 0 for ended in run_mains(2, profiler.main, args))
    profile = json.loads((folder / PROFILE_NAME).read_text())
    assert set(profile["sizes"]) == {"1", "2"} and profile["made_on"]["ranks"] == 2
    for size in profile["sizes"].values():
        assert {n for n, _, _ in size["decode"]} == {1, 4, 16} and size["pages"] > 0
        assert min(seconds for *_, seconds in size["decode"] + size["prefill"]) > 0
    run_ranks(2, train_runs, args)
    for record in steps_of(tmp_path / "run"):
        assert set(record["planner"]["predicted"]) == {"1", "2"} and record["planner"]["size"] in (1, 2)
    assert train.main(["--check", *settings("other", **given)]) == 2
    assert "'ranks': 2" in capsys.readouterr().err


# ---- refusals, and the simulator against the engine --------------------------------------------------------------


def test_groups_stay_inside_a_machine() -> None:
    assert group_sizes(16, 8) == [1, 2, 4, 8] and group_sizes(6, 6) == [1, 2] and group_sizes(12, 6) == [1, 2]
    assert group_sizes(8, 0) == [1] and group_sizes(1, 1) == [1]
    with pytest.raises(ConfigError, match=r"= 4 does not divide 12 ranks with 6 on each machine; possible.*\[1, 2\]"):
        check_group_size(4, 12, 6)
    with pytest.raises(ConfigError, match=r"unknown machines \(LOCAL_WORLD_SIZE is not set.*possible here: \[1\]"):
        check_group_size(2, 4, 0)


def test_an_engine_regroups_only_to_what_it_was_made_for(tiny_model) -> None:
    engine = Engine(tiny_model, CONFIG, SamplingConfig(), [7])
    other = copy(engine.parallel)
    other.size = 2
    with pytest.raises(AssertionError, match=r"made for the sizes \[1\]"):
        engine.regroup(other)


@pytest.mark.slow
def test_the_simulator_counts_the_preemptions_of_the_engine(tiny_model) -> None:
    lengths = [int(x) for x in torch.randint(5, 90, (40,), generator=torch.Generator().manual_seed(0))]
    page_bytes = cache_of(CONFIG, tiny_model.shape, torch.float32).page_bytes(1)
    for num_pages in (45, 80, 200, 2000):
        config = RolloutConfig(
            max_prompt_tokens=20,
            max_response_tokens=90,
            max_running=32,
            page_size=4,
            kv_gib=(num_pages + 0.5) * page_bytes / 2**30,
        )
        engine = Engine(tiny_model, config, SamplingConfig(), [])
        for i, n in enumerate(lengths):
            engine.add(Sequence(i, 0, 0, tuple(range(2 + i % 3, 12 + i % 3)) + (i + 2,), i, n, ignore_eos=True))
        while not engine.is_idle:
            engine.step()
        times = FittedTimes(num_pages * 4, [(1, 8, 1.0), (32, 2048, 1.0)], [(8, 1e-9), (64, 1e-9)])
        limits = EngineLimits(1, {1: num_pages}, 4, 32, 90)
        steps, preemptions = simulate_replica(times, num_pages, limits, Launch(40, 11.0, 1), [(0, n) for n in lengths])
        assert preemptions == engine.stats.preemptions, num_pages
        assert steps == pytest.approx(engine.stats.decode_steps, rel=1e-6), num_pages
    assert engine.stats.preemptions == 0


def test_points_that_the_pages_cannot_hold_are_left_out(tiny_model) -> None:
    engine = Engine(tiny_model, replace(CONFIG, max_response_tokens=40, max_running=64), SamplingConfig(), [])
    world = World(0, 1, torch.device("cpu"), node_size=1)
    [profile] = profiler.measure(engine, make_tp_groups(world, [1]), world).values()
    assert profile.pages == engine.pages.size and engine.is_idle and engine.stats.preemptions == 0
    longest = 20 + 40
    assert {c for _, c, _ in profile.decode} >= {longest // 16, longest // 4}
    assert all(batch * context <= profile.pages * 4 for batch, context, _ in profile.decode)


def test_all_sequences_of_a_point_begin_before_the_first_ends(tiny_model) -> None:
    """With chunks of one token beside so many decoding rows."""
    limits = replace(CONFIG, max_response_tokens=240, max_running=16, step_tokens=16, kv_gib=0.05)
    engine = Engine(tiny_model, limits, SamplingConfig(), [])
    points = [profiler.Point(engine, 16, context) for context in (4, 12, 48)]
    assert [point.fits for point in points] == [True, True, False]
    world = World(0, 1, torch.device("cpu"), node_size=1)
    assert all(seconds > 0 for point in points[:2] for seconds in point.measure(world))


@pytest.mark.parametrize("kind", [Engine, FusedEngine])
def test_a_point_is_measured_once_and_graphs_are_captured_ahead_of_all(tiny_model, monkeypatch, kind) -> None:
    measured: list[profiler.Point] = []
    monkeypatch.setattr(profiler.Point, "measure", lambda point, world: measured.append(point) or (1.0, 1.0))
    engine = kind(tiny_model, replace(CONFIG, max_response_tokens=40, max_running=4), SamplingConfig(), [])
    world = World(0, 1, torch.device("cpu"), node_size=1)
    [profile] = profiler.measure(engine, make_tp_groups(world, [1]), world).values()
    ahead = measured[: len(measured) - len(profile.decode)]
    assert [(p.batch, p.context) for p in measured[len(ahead) :]] == [(b, c) for b, c, _ in profile.decode]
    assert ahead == ([measured[-1]] if kind is FusedEngine else [])
