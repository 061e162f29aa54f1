"""The endless rollout: interrupted sequences go on exactly; a run is a function of its seed, however it is spread."""

import copy
import json
import os
import signal
import time
from dataclasses import fields, replace
from functools import partial
from itertools import count
from multiprocessing import ProcessError
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ALONE, ROOT, FusedEngine, steps_of, thorough, train_runs
from test_rollout import drain, full_logits, generate, make_engine, make_sequences
from torch.multiprocessing.spawn import ProcessException

import train
from checkpoint import list_checkpoints, load_state
from config import ConfigError, load_config
from core import Sample, Span, with_span
from engine.sequence import Sequence
from job import Job
from loss import LOSSES, PROXIMAL
from metrics import Clock
from model import Model
from overlap.pools import Pools
from parallel import World
from policies.split import SplitTimes
from process.run_folder import write_settings
from rollout import Engine
from rounds import Round
from sampling import SamplingConfig, score
from scheduler import POLICIES, Synchronous
from settings import Config

kinds = pytest.mark.parametrize("kind", [Engine, FusedEngine])
CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_model: Model) -> Model:
    return tiny_model


@pytest.fixture
def newer(model: Model) -> Model:
    """The same model after an update that moves every probability."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return other


# ---- sequences go on ---------------------------------------------------------------------------------------------


def test_spans_grow_and_a_new_version_begins_a_new_one() -> None:
    spans = with_span((), 3, 0)
    assert spans == (Span(0, 3, 0),) and with_span(spans, 3, 1) == spans
    assert with_span(spans, 5, 0) == (Span(0, 5, 0),)
    assert with_span(spans, 5, 2) == (Span(0, 3, 0), Span(3, 5, 2))


def logprobs_under(model: Model, sequence: Sequence, tokens) -> torch.Tensor:
    logits = full_logits(model, [*sequence.prompt_ids, *tokens])[len(sequence.prompt_ids) - 1 : -1]
    return score(logits, torch.tensor(tokens), SamplingConfig())[0]


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_an_interrupted_sequence_goes_on_as_in_a_fresh_engine_with_the_new_weights(
    model: Model, newer: Model, steps: int, kind: type[Engine]
) -> None:
    engine, sequences = make_engine(model, kind=kind), make_sequences(5)
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(steps):
        engine.step()
    engine.land()
    moved = engine.export(engine.batcher.live_tokens())
    given = {s.id: len(s.token_ids) for s in moved}
    engine.load_weights(newer, 1)
    fresh = make_engine(newer, kind=kind)
    fresh.load_weights(newer, 1)
    for sequence in moved:
        fresh.add(copy.deepcopy(sequence))
        engine.add(sequence)
    samples, expected = drain(engine), drain(fresh)
    assert samples == expected and len(samples) == 5
    for s in sequences:
        sample, old = samples[s.id], given[s.id]
        assert sample.spans == with_span(with_span((), old, 0), len(sample.token_ids), 1)
        drawn = torch.tensor(sample.logprobs)
        parts = logprobs_under(model, s, sample.token_ids)[:old], logprobs_under(newer, s, sample.token_ids)[old:]
        torch.testing.assert_close(drawn, torch.cat(parts), rtol=0, atol=1e-5)
        assert not old or (drawn[:old] - logprobs_under(newer, s, sample.token_ids)[:old]).abs().max() > 1e-3


@kinds
def test_kept_kv_is_that_of_older_weights_and_nobody_takes_it_over(
    model: Model, newer: Model, kind: type[Engine]
) -> None:
    engine, [first] = make_engine(model, kind=kind), make_sequences(1)
    late = Sequence(0, 1, 0, first.prompt_ids, 7, first.max_new_tokens)
    engine.add(first)
    for _ in range(4):
        engine.step()
    for weight, new in zip(model.parameters(), newer.parameters(), strict=True):
        weight.data.copy_(new)
    engine.change_weights(1)
    [given] = [span.end for span in first.spans]
    engine.add(late)
    samples = drain(engine)
    assert engine.stats.prefilled_tokens == 2 * len(first.prompt_ids) and engine.stats.shared_tokens == 0
    assert samples[first.id].spans == (Span(0, given, 0), Span(given, len(samples[first.id].token_ids), 1))
    fresh = make_engine(newer, kind=kind)
    fresh.load_weights(newer, 1)
    again = Sequence(0, 1, 0, first.prompt_ids, 7, first.max_new_tokens)
    fresh.add(again)
    alone = drain(fresh)[late.id]
    assert alone.token_ids == samples[late.id].token_ids
    assert list(alone.logprobs) == pytest.approx(samples[late.id].logprobs, abs=1e-5), "from its own prefill"
    new = logprobs_under(newer, first, samples[first.id].token_ids)[given:]
    assert (torch.tensor(samples[first.id].logprobs)[given:] - new).abs().max() > 1e-4, "KV was computed again"


@pytest.mark.slow
@kinds
def test_contexts_in_prefill_are_computed_with_the_new_weights_only(
    model: Model, newer: Model, kind: type[Engine]
) -> None:
    engine, sequences = make_engine(model, kind=kind, step_tokens=16), make_sequences(4)
    for sequence in sequences:
        engine.add(sequence)
    engine.step()
    [begun] = [prefill.leader.id for prefill in engine.batcher.prefills.values() if prefill.cached]
    for weight, new in zip(model.parameters(), newer.parameters(), strict=True):
        weight.data.copy_(new)
    engine.change_weights(1)
    fresh = make_engine(newer, kind=kind, step_tokens=16)
    fresh.load_weights(newer, 1)
    for sequence in make_sequences(4):
        fresh.add(sequence)
    mine, theirs = drain(engine)[begun], drain(fresh)[begun]
    assert mine.token_ids == theirs.token_ids and list(mine.logprobs) == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("step_tokens", [16, 1000])
def test_after_a_prefill_alone_all_count_the_same_steps(model: Model, step_tokens: int, kind: type[Engine]) -> None:
    engine, sequences = make_engine(model, kind=kind, step_tokens=step_tokens), make_sequences(6)
    sequences[3] = replace(sequences[3], prompt_ids=sequences[0].prompt_ids)  # which a running row has computed
    old = [engine.add(sequence) for sequence in sequences[:3]] and sequences[:3]
    engine.prefill()
    for _ in range(4):
        engine.step()
    engine.land()
    for sequence in sequences[3:]:
        engine.add(sequence)
    before = engine.batcher.live_tokens()
    assert engine.prefill() == [] and not engine.batcher.prefills and not engine.batcher.waiting
    after = engine.batcher.live_tokens()
    assert all(after[s.id] == before[s.id] == before[old[0].id] > 1 for s in old), "decoding rows stand still"
    assert all(after[s.id] == 1 for s in sequences[3:])
    expected = generate(make_engine(model, kind=kind), [replace(s, is_taken=False) for s in sequences])
    assert {id: s.token_ids for id, s in drain(engine).items()} == {id: s.token_ids for id, s in expected.items()}


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(settings, mixed_prompts: Path):
    """A run of short and long responses, mixed in each group, so that batches and updates fall between their ends."""
    return partial(
        settings,
        run__steps=6,
        run__eval_every=0,
        run__dump_rollouts="true",
        data__eval_prompts=0,
        data__train=mixed_prompts,
        data__task=f"{ROOT}/tests/graders.py:share_of_digits",
        scheduler__policy="synchronous",
        scheduler__num_responses=2,
        scheduler__window_iterations=4,
        rollout__stop=json.dumps([*"ABCDEFGH"]),
        rollout__max_prompt_tokens=32,
        rollout__max_response_tokens=96,
        rollout__step_tokens=64,
        rollout__kv_gib=0.05,
        trainer__lr=3e-3,
        overlap__depth=1,
        overlap__bound=3,
    )


def trained(folder: Path) -> list[list[dict]]:
    """Return the rows that each step was trained on."""
    paths = [folder / "rollouts" / f"step_{r['step']:06d}.jsonl" for r in steps_of(folder)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def tokens_of(folder: Path) -> list[list]:
    return [[(s["token_ids"], s["spans"]) for row in step for s in row["samples"]] for step in trained(folder)]


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(r["train"]["loss"], r["train"]["grad_norm"]) for r in steps_of(folder)]


def ages(folder: Path) -> set[int]:
    return {int(age) for r in steps_of(folder) for age in r["round"]["ages"]}


def check_each_once(folder: Path, settings_steps: int = 6, num_prompts: int = 4) -> None:
    visits = [(row["epoch"], row["prompt"]["index"]) for step in trained(folder) for row in step]
    assert len(visits) == len(set(visits)) == num_prompts * settings_steps


@pytest.mark.thorough
def test_a_run_is_a_function_of_its_seed_on_any_number_of_ranks(settings, run_ranks, tmp_path: Path) -> None:
    assert train.main(settings("one")) == 0
    run_ranks(4, train_runs, settings("four"), settings("tp", rollout__tensor_parallel=2))
    one = tmp_path / "one"
    check_each_once(one)
    spans = [len(s["spans"]) for step in trained(one) for row in step for s in row["samples"]]
    assert max(spans) > 2 and ages(one) >= {0, 1, 2} and max(ages(one)) <= 3, "too quiet to show anything"
    for name in ("four", "tp"):
        assert tokens_of(tmp_path / name) == tokens_of(one)
        for mine, theirs in zip(losses(tmp_path / name), losses(one), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def train_and_be_killed(world: World, settings: list[str]) -> None:
    """Train, and be killed in the first window of the rollout after step 3, when there is a checkpoint."""
    decode, windows = Round.decode, count()
    [folder] = [Path(setting.removeprefix("--run.dir=")) for setting in settings if setting.startswith("--run.dir=")]

    def decode_or_die(self: Round, *args, **options):
        if self.engine.version == 3 and next(windows) == 0:
            while not list_checkpoints(folder):  # a thread writes it
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(self, *args, **options)

    Round.decode = decode_or_die  # type: ignore[method-assign]
    train_runs(world, settings)


@pytest.mark.parametrize("flight", [thorough("recompute"), "keep"])
def test_a_killed_run_resumes_bit_for_bit(settings, run_ranks, tmp_path: Path, flight: str) -> None:
    make = partial(settings, run__checkpoint_every=2, overlap__flight=flight, run__eval_every=3, data__eval_prompts=4)
    run_ranks(2, train_runs, make("straight"))
    with pytest.raises((ProcessError, ProcessException)):
        run_ranks(2, train_and_be_killed, make("killed"))
    assert [folder.name for folder in list_checkpoints(tmp_path / "killed")] == ["step_000002"]
    run_ranks(2, partial(train_runs, resume=True), make("killed"))
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert tokens_of(tmp_path / "killed") == tokens_of(tmp_path / "straight")
    check_each_once(tmp_path / "killed")


def test_a_run_goes_on_with_another_number_of_ranks(settings, run_ranks, tmp_path: Path) -> None:
    """What was buffered and under way on two ranks is on one then."""
    assert train.main(settings("straight")) == 0
    run_ranks(2, stop_after_three, settings("moved", run__checkpoint_every=3))
    train_runs(ALONE, settings("moved", run__checkpoint_every=3), resume=True)
    assert tokens_of(tmp_path / "moved") == tokens_of(tmp_path / "straight")
    for mine, theirs in zip(losses(tmp_path / "moved"), losses(tmp_path / "straight"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def stop_after_three(world: World, settings: list[str]) -> None:
    stops = iter([False] * 3 + [True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.StopSignal, "agreed", lambda *_: next(stops))
        train_runs(world, settings)


CHOICES = {
    "late groups dropped": dict(overlap__late="drop", overlap__bound=1),
    "several updates a step": dict(trainer__updates_per_step=2, loss__name="decoupled"),
    "sharded": dict(trainer__shard=2, rollout__weights="sharded", rollout__tensor_parallel=2),
}
MORE_CHOICES = {
    "late groups kept": dict(overlap__late="keep", overlap__bound=1),
    "nothing under way at updates": dict(overlap__flight="finish"),
    "surplus responses and prompts": dict(
        scheduler__policy="tail_batching", scheduler__eta_prompts=1.5, scheduler__eta_responses=1.5
    ),
    "kv kept": dict(overlap__flight="keep"),
    "measured time": dict(overlap__clock="time"),
    "half a batch ahead": dict(overlap__depth=0.5, overlap__bound=0),
    "sharded, kv kept": dict(trainer__shard=2, rollout__weights="sharded", overlap__flight="keep"),
}


def test_every_choice_trains_each_prompt_once(settings, run_ranks, tmp_path: Path) -> None:
    make = partial(settings, run__steps=4)
    run_ranks(2, train_runs, *(make(name, **choice) for name, choice in CHOICES.items()))
    for name in CHOICES:
        check_each_once(tmp_path / name, 4)
    records = [r["round"] for r in steps_of(tmp_path / "late groups dropped")]
    assert max(ages(tmp_path / "late groups dropped")) == 1
    assert any(r["dropped"] and r["wasted_tokens"] for r in records)
    assert all(("mean" in r["dropped_length"]) == bool(r["dropped"]) for r in records), "none: no length"
    like = tokens_of(tmp_path / "several updates a step")
    assert len(like[0]) == 8
    # The weights' layout changes nothing, and nor does their owner.
    assert train.main(make("whole")) == 0
    assert tokens_of(tmp_path / "sharded") == tokens_of(tmp_path / "whole")


@pytest.mark.thorough
def test_every_other_choice_trains_each_prompt_once(settings, run_ranks, tmp_path: Path) -> None:
    run_ranks(2, train_runs, *(settings(name, run__steps=4, **choice) for name, choice in MORE_CHOICES.items()))
    for name in MORE_CHOICES:
        check_each_once(tmp_path / name, 4)
    records = {name: [r["round"] for r in steps_of(tmp_path / name)] for name in MORE_CHOICES}
    late = records["late groups kept"]
    assert max(ages(tmp_path / "late groups kept")) > 1 and any(r["late"] for r in late)
    assert all(("mean" in r["late_length"]) == bool(r["late"]) for r in late), "none: no length"
    whole = [s["spans"] for step in trained(tmp_path / "nothing under way at updates") for row in step
             for s in row["samples"]]  # fmt: skip
    assert all(len(spans) == 1 for spans in whole)
    assert any(r["wasted_tokens"] for r in records["surplus responses and prompts"])


@pytest.mark.thorough
def test_kept_kv_moves_the_trajectory_and_computes_nothing_again(settings, run_ranks, tmp_path: Path) -> None:
    run_ranks(1, train_runs, settings("kept", overlap__flight="keep"), settings("again"))
    kept, again = (steps_of(tmp_path / name) for name in ("kept", "again"))
    prefilled = [sum(r["engine"]["prefilled_tokens"] for r in records) for records in (kept, again)]
    assert prefilled[0] < prefilled[1] and tokens_of(tmp_path / "kept") != tokens_of(tmp_path / "again")


@pytest.mark.slow
def test_a_released_job_goes_on(settings, tmp_path: Path, monkeypatch) -> None:
    make = partial(settings, run__steps=4)
    train_runs(ALONE, make("straight"))
    take_step = train.take_step

    def between(job):
        record = take_step(job)
        job.release()
        job.take_back()
        return record

    monkeypatch.setattr(train, "take_step", between)
    train_runs(ALONE, make("shared"))
    assert tokens_of(tmp_path / "shared") == tokens_of(tmp_path / "straight")
    assert losses(tmp_path / "shared") == losses(tmp_path / "straight")


# ---- ranks apart -------------------------------------------------------------------------------------------------

APART = dict(overlap__train_ranks=1, scheduler__num_prompts=6, run__steps=4)
COUNTED = APART | dict(overlap__update_iterations=8)


@pytest.mark.thorough
def test_pools_of_any_size_train_the_same(settings, run_ranks, tmp_path: Path) -> None:
    make = partial(settings, **COUNTED)
    run_ranks(2, train_runs, make("1 and 1"))
    two = dict(overlap__train_ranks=2)
    runs = {"1 and 3": {}, "2 and 2": two | dict(trainer__shard=2), "by two": two | dict(rollout__tensor_parallel=2)}
    run_ranks(4, train_runs, *(make(name, **choice) for name, choice in runs.items()))
    one = tmp_path / "1 and 1"
    assert ages(one) >= {0, 1} and max(ages(one)) <= 3
    for name in runs:
        shares = [r["split"]["best_share"] for r in steps_of(tmp_path / name)]
        assert len(shares) == 4 and all(0 < share < 1 for share in shares)
        assert tokens_of(tmp_path / name) == tokens_of(one)
        assert {r["sync"]["sync_bytes"] for r in steps_of(tmp_path / name)} == {steps_of(one)[0]["sync"]["model_bytes"]}
        for mine, theirs in zip(losses(tmp_path / name), losses(one), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
    versions = [span["version"] for step in trained(one) for row in step for s in row["samples"] for span in s["spans"]]
    assert set(versions) == {0, 1, 2, 3}, "new weights reach the ranks that decode"


@pytest.mark.parametrize("sync", ["at_once", "with_batch"])
@pytest.mark.thorough
def test_pools_resume_bit_for_bit(settings, run_ranks, tmp_path: Path, sync: str) -> None:
    often = dict(run__checkpoint_every=2, run__eval_every=3, data__eval_prompts=4, run__steps=5)
    pools = COUNTED if sync == "at_once" else APART
    races = dict(scheduler__policy="tail_batching", scheduler__eta_prompts=1, scheduler__eta_responses=1.5)
    often |= races if sync == "with_batch" else {}
    make = partial(settings, **pools | often | dict(overlap__sync=sync, overlap__depth=2))
    run_ranks(2, train_runs, make("straight"))
    with pytest.raises((ProcessError, ProcessException)):
        run_ranks(2, train_and_be_killed, make("killed"))
    run_ranks(2, partial(train_runs, resume=True), make("killed"))
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert tokens_of(tmp_path / "killed") == tokens_of(tmp_path / "straight")
    check_each_once(tmp_path / "killed", 5, 6)
    wasted = [[r["round"]["wasted_tokens"] for r in steps_of(tmp_path / name)] for name in ("killed", "straight")]
    assert wasted[0] == wasted[1] and (sum(wasted[0]) > 0) == (sync == "with_batch")
    differences = [r["train"]["logprob_diff_max"] for r in steps_of(tmp_path / "straight")]
    assert (None in differences[1:]) == (sync == "with_batch"), "no token is of the newest weights: no difference"
    scores = [[r["eval"]["avg@4"] for r in steps_of(tmp_path / name) if "eval" in r] for name in ("killed", "straight")]
    assert scores[0] == scores[1] and len(scores[0]) == 2
    newest = [
        max(span["version"] for row in step for s in row["samples"] for span in s["spans"])
        for step in trained(tmp_path / "straight")
    ]
    lag = 1 if sync == "with_batch" else 0  # the next batch is complete before the others have new weights
    assert newest == [max(step - lag, 0) for step in range(5)]
    assert max(ages(tmp_path / "straight")) <= 3


def train_decoding_slowly(world: World, *runs: list[str], **more) -> None:
    """Train with steps of the engine that take six times as long, however fast the machine is."""
    step = Engine.step

    def slow_step(engine: Engine) -> list[Sample]:
        start = time.perf_counter()
        samples = step(engine)
        time.sleep(5 * (time.perf_counter() - start))
        return samples

    Engine.step = slow_step
    train_runs(world, *runs, **more)


def train_and_be_signalled_as_ranks_move(world: World, settings: list[str]) -> None:
    save = Job.save

    def save_signalled(job: Job, waits: bool) -> None:
        save(job, waits)
        if job.split.moves and world.is_main:
            os.kill(os.getpid(), signal.SIGTERM)

    Job.save = save_signalled
    train_decoding_slowly(world, settings)


@pytest.mark.thorough
def test_a_signal_while_ranks_change_sides_ends_the_run(settings, run_ranks, tmp_path: Path) -> None:
    auto = settings("auto", **APART | dict(run__steps=5, rollout__stop="[]", overlap__train_ranks="auto"))
    run_ranks(3, train_and_be_signalled_as_ranks_move, auto)
    assert steps_of(tmp_path / "auto")[-1]["step"] == 3
    assert list_checkpoints(tmp_path / "auto")[-1].name == "step_000003"


@pytest.mark.thorough
def test_ranks_change_sides_by_measured_times(settings, run_ranks, tmp_path: Path) -> None:
    """Decoding takes much longer than training here, so two of three ranks should decode; at first one does."""
    make = partial(settings, **APART | dict(run__steps=5, rollout__stop="[]"))
    run_ranks(3, train_decoding_slowly, make("auto", overlap__train_ranks="auto"))
    run_ranks(3, train_runs, make("fixed"))
    auto, fixed = tmp_path / "auto", tmp_path / "fixed"
    advice = [r["split"].get("advice", "") for r in steps_of(auto)]
    assert advice[2].startswith("2 of 3 ranks train, from now on 1: beta* = ")
    assert advice[-1].startswith("1 of 3 ranks train")
    third = steps_of(auto)[2]["split"]
    times = SplitTimes(**{field.name: third[field.name] for field in fields(SplitTimes)})
    assert times.best([1, 2]) == 1 == load_state(list_checkpoints(auto)[-1])["split"]["train_ranks"]
    assert len([*(list_checkpoints(auto)[-1] / "optimizer").glob("*")]) == len(
        [*(list_checkpoints(fixed)[-1] / "optimizer").glob("*")]
    )
    assert [r["step"] for r in steps_of(auto)] == [1, 2, 3, 4, 5] and tokens_of(auto) == tokens_of(fixed)
    for mine, theirs in zip(losses(auto), losses(fixed), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    run_ranks(3, partial(train_decoding_slowly, resume=True), make("auto", overlap__train_ranks="auto", run__steps=6))
    assert steps_of(auto)[-1]["step"] == 6 and steps_of(auto)[-1]["split"]["advice"].startswith("1 of 3 ranks train")


@pytest.mark.thorough
def test_pools_on_measured_time_train_each_prompt_once(settings, run_ranks, tmp_path: Path) -> None:
    kept = dict(overlap__flight="keep", overlap__late="drop", overlap__bound=1)
    runs = {"time": {}, "kept": kept, "frozen": dict(loss__kl_coef=0.01, overlap__flight="finish")}
    run_ranks(2, train_runs, *(settings(name, **APART, overlap__clock="time", **more) for name, more in runs.items()))
    for name in runs:
        check_each_once(tmp_path / name, 4, 6)
        assert all(np.isfinite(losses(tmp_path / name)).ravel())


@pytest.mark.thorough
def test_the_shipped_config_with_few_pages(tiny_folder: Path, run_ranks, tmp_path: Path) -> None:
    """Sequences that lose their pages, between updates and at them, go on; each prompt is trained once."""

    def arguments(name: str, **overrides) -> list[str]:
        small = dict(
            run__dir=tmp_path / name,
            run__steps=4,
            run__device="cpu",
            run__dump_rollouts="true",
            model__path=tiny_folder,
            data__eval_prompts=2,
            scheduler__num_prompts=4,
            scheduler__num_responses=4,
            rollout__stop=json.dumps([*"ABCDEFGH"]),
            rollout__max_response_tokens=96,
            rollout__max_running=6,
            rollout__page_size=8,
            rollout__kv_gib=0.00005,  # 26 pages; the longest sequence has 20
            reward__num_workers=1,
        )
        return [f"--{key.replace('__', '.')}={value}" for key, value in (small | overrides).items()]

    file = str(ROOT / "configs" / "rollflash.toml")
    assert train.main(["--config", file, *arguments("one")]) == 0
    pools = dict(overlap__train_ranks=1, overlap__update_iterations=8)
    run_ranks(2, partial(train_runs, file=file), arguments("two"), arguments("pools", **pools))
    for name in ("one", "two", "pools"):
        check_each_once(tmp_path / name, 4)
        steps = steps_of(tmp_path / name)
        assert sum(r["engine"]["preemptions"] for r in steps) > 0
        assert all(0 <= r["train"]["logprob_diff_max"] < 1e-4 for r in steps)
        assert max(len(s["spans"]) for step in trained(tmp_path / name) for row in step for s in row["samples"]) > 1


def test_a_pool_is_waited_for_as_long_as_it_shows_signs_of_life(monkeypatch) -> None:
    now, store = [0.0], dist.HashStore()
    monkeypatch.setattr("overlap.pools.time.monotonic", lambda: now[0])
    world = World(0, 2, CPU, timeout_seconds=10.0)
    trainer, decoder = (
        Pools(replace(world, rank=rank), replace(world, size=1), 1, store, Clock()) for rank in range(2)
    )
    for pool in (trainer, decoder):
        pool.clock.on_move = pool.show_life
    has_come, moves = trainer.watch("batch 3"), trainer.clock.moves
    for now[0] in (9.0, 18.0, 27.0):
        Clock(parent=decoder.clock).move()  # an evaluation's
        assert not has_come()
    assert trainer.clock.moves == moves + 3  # its own watchdog sees it
    decoder_sees = decoder.watch("update 3")
    assert not decoder_sees()
    now[0] = 37.5  # the trainer has only waited meanwhile: no sign of life
    for watching, whom in ((has_come, "decode"), (decoder_sees, "train")):
        with pytest.raises(
            TimeoutError, match=f"no sign of life of the ranks that {whom} for run.timeout_seconds = 10"
        ):
            watching()
    decoder.signal("batch 3")
    assert has_come()


ONE_TRAINS, TWO_TRAIN, AUTO = (dict(overlap__train_ranks=n) for n in (1, 2, "auto"))
OFF = dict(overlap__depth=0, overlap__bound=0)
NO_PLACE = ["has no place in an endless rollout (overlap.depth = 1)", "leave it out"]
WITHOUT = ["has no effect with overlap.depth = 0", "take overlap.depth = 1, or leave it out"]
UNCORRECTED = ["trains samples of older weights", "take loss.name = decoupled, or loss.old_logprobs = rollout"]
OTHERS = dict(bound=3, late="drop", flight="keep", clock="time", sync="with_batch", update_iterations=8)
ROUNDS = dict(overlap__depth=0, overlap__bound=0, overlap__train_ranks=1)
NO_PLACE_APART = ["has no place in a run of ranks apart (overlap.train_ranks = 1)", "leave it out"]
# How many ranks, the settings, and parts of the line that refuses them.
REFUSED: list[tuple[int, dict, list[str]]] = [
    (2, dict(stream__policy="fixed"), ["stream.policy = fixed", *NO_PLACE]),
    (2, ONE_TRAINS | dict(stream__policy="paper"), ["stream.policy = paper", *NO_PLACE]),
    (2, dict(planner__rule="paper"), ["planner.rule = paper", *NO_PLACE]),
    (2, ONE_TRAINS | dict(planner__rule="predict"), ["planner.rule = predict", *NO_PLACE]),
    (2, dict(scheduler__dynamic_sampling="true"), ["scheduler.dynamic_sampling = true", *NO_PLACE]),
    (2, dict(scheduler__policy="tail_batching", scheduler__audit=1), ["scheduler.audit = 1", *NO_PLACE]),
    (2, dict(run__replay=ROOT), ["run.replay = ", *NO_PLACE]),
    (2, dict(scheduler__migrate="true"), ["migrate = true has no place in", "clock = steps", "number of ranks"]),
    *((2, OFF | {f"overlap__{key}": value}, [f"overlap.{key} = {value} ", *WITHOUT]) for key, value in OTHERS.items()),
    (2, dict(overlap__update_iterations=8), ["overlap.update_iterations = 8 has no effect", "train_ranks = 0"]),
    (
        2,
        ONE_TRAINS | dict(overlap__update_iterations=8, overlap__clock="time"),
        ["overlap.update_iterations = 8 has", "= time"],
    ),
    (2, dict(overlap__sync="with_batch"), ["overlap.sync = with_batch needs overlap.train_ranks > 0"]),
    (
        2,
        ONE_TRAINS | dict(overlap__sync="with_batch", overlap__depth=0.5),
        ["with_batch needs overlap.depth >= 1", "0.5"],
    ),
    (1, dict(overlap__depth=2, overlap__bound=1), ["overlap.bound = 1", "2 batches ahead", "take overlap.bound = 2"]),
    (1, dict(scheduler__policy="tail_batching", scheduler__eta_prompts=4), ["eta_prompts = 4", "overlap.bound = 4"]),
    (1, ONE_TRAINS, ["overlap.train_ranks = 1 leaves none of 1 ranks to decode", "take fewer"]),
    (4, AUTO | dict(rollout__weights="sharded", trainer__shard=2), ["train_ranks = auto", "whole weights"]),
    (2, AUTO | OFF, ["overlap.train_ranks = auto", "they take turns", "give a number of ranks"]),
    (4, AUTO | OFF | dict(trainer__shard=2), ["overlap.train_ranks = auto", "they take turns"]),
    (2, ROUNDS | dict(stream__policy="fixed"), ["stream.policy = fixed", *NO_PLACE_APART]),
    (2, ROUNDS | dict(planner__rule="paper"), ["planner.rule = paper", *NO_PLACE_APART]),
    (2, ROUNDS | dict(run__replay=ROOT), ["run.replay = ", *NO_PLACE_APART]),
    (2, ROUNDS | dict(overlap__late="drop"), ["overlap.late = drop", *WITHOUT]),
    (4, ROUNDS, ["scheduler.num_prompts = 4 is not a multiple of the 3 replicas (3 ranks", "take 3 prompts"]),
    (2, AUTO | dict(overlap__update_iterations=8, overlap__clock="time"), ["overlap.update_iterations = 8 has no"]),
    (4, dict(overlap__train_ranks=3, trainer__shard=2), ["trainer.shard = 2 does not divide", "train, 3", "[1, 3]"]),
    (8, dict(overlap__train_ranks=4, trainer__shard=2), ["trainer.shard = 2 with overlap.train_ranks = 4", "or 4"]),
    (
        4,
        ONE_TRAINS | dict(rollout__tensor_parallel=2),
        ["rollout.tensor_parallel = 2", "overlap.train_ranks = 1", "3 decode"],
    ),
    (
        4,
        TWO_TRAIN | dict(rollout__tensor_parallel=4),
        ["rollout.tensor_parallel = 4", "overlap.train_ranks = 2", "2 decode"],
    ),
    (
        4,
        TWO_TRAIN | dict(trainer__shard=2, rollout__weights="sharded"),
        ["rollout.weights = sharded", "weights = whole"],
    ),
    (2, dict(trainer__updates_per_step=5), ["trainer.updates_per_step = 5", "scheduler.num_prompts = 4"]),
    (2, dict(loss__name="gspo", loss__old_logprobs="trainer"), ["loss.name = gspo with", *UNCORRECTED]),
    (2, ONE_TRAINS | dict(loss__name="topr", loss__old_logprobs="trainer"), ["loss.name = topr with", *UNCORRECTED]),
]


@pytest.mark.parametrize(("ranks", "overrides", "parts"), REFUSED)
def test_combinations_without_a_place_are_refused_in_one_line(
    settings, alone, capsys, ranks: int, overrides: dict, parts: list[str]
) -> None:
    assert train.main([*settings("refused", **overrides), "--check", f"--ranks={ranks}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(part in line for part in parts), line


def test_a_policy_that_nobody_would_ask_is_refused(settings, alone, monkeypatch, capsys) -> None:
    class Own(Synchronous):
        def plan(self, take, steps_left):
            raise AssertionError("asked")

    monkeypatch.setitem(POLICIES, "own", Own)
    assert train.main([*settings("refused", scheduler__policy="own"), "--check"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: scheduler.policy = own has rounds of its own") and "overlap.depth = 1" in line


def test_a_loss_of_ones_own_may_correct_for_older_samples(settings, alone, monkeypatch, capsys) -> None:
    monkeypatch.setitem(LOSSES, "own", LOSSES["decoupled"])
    given = [*settings("own", loss__name="own", overlap__depth=1), "--check"]
    assert train.main([*given, "--loss.old_logprobs=trainer"]) == 2
    assert "trains samples of older weights" in capsys.readouterr().err
    for module in ("loss", "settings"):
        monkeypatch.setattr(f"{module}.PROXIMAL", PROXIMAL | {"own"})
    assert train.main(given) == train.main([*given, "--loss.old_logprobs=trainer"]) == 0
    assert train.main([*given, "--loss.old_logprobs=rollout"]) == 2
    assert "loss.name = own with loss.old_logprobs = rollout weighs all samples alike" in capsys.readouterr().err


def test_a_run_cannot_be_cut_below_what_is_under_way(settings, run_ranks, tmp_path: Path, capsys) -> None:
    make = partial(settings, run__checkpoint_every=3)
    stop_after_three(ALONE, make("cut"))
    write_settings(load_config(Config, None, make("cut")), tmp_path / "cut")
    assert train.main([*make("cut", run__steps=3), "--resume"]) == 2
    assert "take run.steps = " in (said := capsys.readouterr()).out + said.err
    run_ranks(2, stop_and_be_refused, make("apart", **APART), make("apart", **APART | dict(run__steps=3)))


def stop_and_be_refused(world: World, settings: list[str], shorter: list[str]) -> None:
    """Ranks that only train are told too: each rank ends by itself."""
    stop_after_three(world, settings)
    with pytest.raises(ConfigError, match=r"run.steps = 3 leaves prompts untrained .* take run.steps = "):
        train_runs(world, shorter, resume=True)
