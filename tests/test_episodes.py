"""Rounds of several turns: environments answer, what they give is not trained, and a run is a function of its seed."""

import json
from dataclasses import replace
from functools import partial
from multiprocessing import ProcessError
from pathlib import Path
from random import Random

import pytest
from conftest import ALONE, ROOT, FusedEngine, steps_of, thorough, train_runs
from test_updates import losses, tokens_of, train_and_be_killed, trained
from torch.multiprocessing.spawn import ProcessException
from worlds import chat

import train
from config import ConfigError
from core import Prompt, Sample, Span, Visit, turns_of
from engine.sequence import Sequence as EngineSequence
from environments import EnvConfig, Episode, reply_tokens
from envs.episodes import Episodes
from overlap.phases import GroupConfig
from parallel import World
from process.workers import WorkerError
from reward import RewardConfig
from rollout import Engine, sequence_for
from settings import Config, check_environments
from warm_start import byte_tokenizer

pytestmark = pytest.mark.slow  # processes and whole runs

CHAT = f"{ROOT}/tests/worlds.py:chat"
SLOW = CHAT.replace("chat", "slow_chat")
LIMIT = 64


@pytest.fixture
def settings(settings, tmp_path: Path):
    rows = [{"prompt": f"row {i}", "answer": ""} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return partial(
        settings,
        run__steps=4,
        run__eval_every=0,
        run__dump_rollouts="true",
        data__eval_prompts=0,
        data__train=tmp_path / "prompts.jsonl",
        data__env=CHAT,
        env__max_turn_tokens=24,
        env__clock="steps",
        scheduler__policy="synchronous",
        scheduler__window_iterations=4,
        rollout__stop=json.dumps([*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]),
        rollout__max_response_tokens=LIMIT,
        rollout__step_tokens=64,
        rollout__kv_gib=0.05,
        trainer__lr=3e-3,
    )


def check_transcripts(folder: Path) -> set[str]:
    """Replay each sample: what was given is the environment's, and so is the reward. Return the reasons for its end."""
    tokenizer, reasons = byte_tokenizer(), set()
    for row in (row for step in trained(folder) for row in step):
        seed = Random(f"0 {(row['epoch'], row['prompt']['index'])}").getrandbits(32)
        for sample, reward in zip(row["samples"], row["rewards"], strict=True):
            ids, reason = sample["token_ids"], sample["finish_reason"]
            turns = turns_of([Span(*span.values()) for span in sample["spans"]])
            texts = [tokenizer.decode(ids[t.start : t.stop], skip_special_tokens=True) for t in turns]
            episode = Episode(chat, {}, seed, 128)
            is_cut = reason == "cut" or (reason == "length" and len(ids) == LIMIT)  # else a reply had no room
            for text in texts[: len(texts) - is_cut]:
                episode.act(text)
            assert reward["parts"].get("env", reward["value"]) == pytest.approx(episode.reward)
            ends = [0, *(turn.stop for turn in turns)]
            given = [tokenizer.decode(ids[end : turn.start]) for end, turn in zip(ends, turns)]
            assert given == episode.texts[: len(given)] and len(ids) <= LIMIT
            assert all(sample["logprobs"][i] == 0 for end, t in zip(ends, turns) for i in range(end, t.start))
            reasons.add(reason)
    return reasons


def test_replies_are_given_and_exactly_the_rest_is_trained(settings, tmp_path: Path) -> None:
    make = partial(settings, loss__credit="turn")
    assert train.main(make("one")) == 0
    assert check_transcripts(tmp_path / "one") == {"stop", "cut", "length"}
    for record, step in zip(steps_of(tmp_path / "one"), trained(tmp_path / "one"), strict=True):
        for row in step:
            turns = [len(turns_of([Span(*span.values()) for span in s["spans"]])) for s in row["samples"]]
            assert [len(advantages) for advantages in row["advantages"]] == turns
        sampled = sum(s["end"] - s["start"] for row in step for sample in row["samples"] for s in sample["spans"])
        assert record["train"]["trained_tokens"] == sampled and record["train"]["logprob_diff_max"] < 1e-4
        assert 3 <= record["episodes"]["turns"]["max"] <= 6
    assert train.main(make("again", run__replay=tmp_path / "one" / "rollouts")) == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "one")


def test_ranks_change_no_token(settings, run_ranks, tmp_path: Path) -> None:
    train_runs(ALONE, settings("one"))
    slow = settings("two", data__env=SLOW, env__num_workers=1)
    run_ranks(2, train_runs, slow, settings("tp", rollout__tensor_parallel=2))
    check_alike(tmp_path, {"two": "one", "tp": "one"})


def check_alike(folder: Path, pairs: dict[str, str]) -> None:
    for name, like in pairs.items():
        assert tokens_of(folder / name) == tokens_of(folder / like)
        for mine, theirs in zip(losses(folder / name), losses(folder / like), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
        assert max(record["train"]["logprob_diff_max"] for record in steps_of(folder / name)) < 1e-4


@pytest.mark.thorough
def test_ranks_change_no_token_where_updates_interrupt_episodes(settings, run_ranks, tmp_path: Path) -> None:
    late = dict(overlap__depth=1, overlap__bound=3)
    train_runs(ALONE, settings("late", **late))
    run_ranks(2, train_runs, settings("late two", **late))
    check_alike(tmp_path, {"late two": "late"})
    check_transcripts(tmp_path / "late two")
    versions = [len({s["version"] for s in x["spans"]}) for step in trained(tmp_path / "late") for row in step
                for x in row["samples"]]  # fmt: skip
    assert max(versions) > 1, "an update interrupts episodes"


def test_a_grader_may_take_the_rewards_of_turns(settings, tmp_path: Path) -> None:
    mine = settings("mine", data__task=f"{ROOT}/tests/graders.py:of_turns", run__steps=1)
    assert train.main([*mine, "--check"]) == train.main(mine) == 0
    assert steps_of(tmp_path / "mine")[-1]["reward_errors"] == 0


def train_fused(world: World, *runs: list[str], **more) -> None:
    """Train as on a GPU, which returns what has ended one step late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("job.Engine", FusedEngine)
        train_runs(world, *runs, **more)


@pytest.mark.thorough
def test_ranks_change_no_token_where_samples_are_returned_a_step_late(settings, run_ranks, tmp_path: Path) -> None:
    surplus = dict(scheduler__eta_responses=1.5, scheduler__eta_prompts=1.5, scheduler__policy="tail_batching")
    make = partial(settings, overlap__depth=1, overlap__bound=3, run__steps=6, **surplus)
    train_fused(ALONE, make("one"))
    run_ranks(2, train_fused, make("two"))
    run_ranks(4, train_fused, make("four"))
    assert train.main(make("cpu")) == 0
    for name in ("two", "four", "cpu"):
        assert tokens_of(tmp_path / name) == tokens_of(tmp_path / "one")


@pytest.mark.thorough
def test_neither_speed_nor_place_of_environments_changes_a_token(settings, run_ranks, tmp_path: Path) -> None:
    """Replies come in any order, from worker processes or from none; on four ranks too."""
    make = partial(settings, run__steps=3, overlap__depth=1, overlap__bound=3)
    for name, env in {"fast": CHAT, "slow": SLOW, "here": "guess", "workers": CHAT.replace("chat", "guess")}.items():
        assert train.main(make(name, data__env=env)) == 0
    run_ranks(4, train_runs, make("four", data__env=SLOW))
    for name, like in (("slow", "fast"), ("four", "fast"), ("workers", "here")):
        assert tokens_of(tmp_path / name) == tokens_of(tmp_path / like)
    assert losses(tmp_path / "slow") == losses(tmp_path / "fast")


def test_episodes_go_on_from_a_checkpoint_and_lose_surplus_ones(settings, run_ranks, tmp_path: Path) -> None:
    surplus = dict(scheduler__eta_responses=1.5, scheduler__eta_prompts=1.5, scheduler__policy="tail_batching")
    make = partial(settings, run__steps=4, run__checkpoint_every=2, overlap__depth=1, overlap__bound=3, **surplus)
    run_ranks(2, train_runs, make("straight"))
    with pytest.raises((ProcessError, ProcessException)):
        run_ranks(2, train_and_be_killed, make("killed"))
    run_ranks(2, partial(train_runs, resume=True), make("killed"))
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    check_transcripts(tmp_path / "killed")
    spans = [s["spans"] for step in trained(tmp_path / "killed") for row in step for s in row["samples"]]
    assert max(len({span["version"] for span in of_sample}) for of_sample in spans) > 1, "an update interrupts episodes"


@pytest.mark.slow
@pytest.mark.thorough
def test_episodes_that_end_between_batches_may_belong_to_groups_that_are_given_up(settings, tmp_path: Path) -> None:
    often = dict(
        run__steps=14,
        run__checkpoint_every=1,
        env__clock="time",
        rollout__stop=json.dumps([chr(i) for i in range(33, 127)]),
    )
    late = dict(overlap__depth=1, overlap__bound=1, overlap__late="drop", scheduler__window_iterations=2)
    long = dict(
        data__env=CHAT.replace("chat", "many_turns"), rollout__max_response_tokens=120, scheduler__num_prompts=3
    )
    assert train.main(settings("dropped", **often, **late, **long, scheduler__num_responses=3)) == 0
    assert sum(r["round"]["dropped"] for r in steps_of(tmp_path / "dropped")) > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_neither_a_barrier_nor_latency_changes_a_token(settings, monkeypatch, tmp_path: Path) -> None:
    begun_beside, add = [], Engine.add

    def add_and_note(engine: Engine, sequence: EngineSequence) -> None:
        if sequence.token_ids:  # a turn but the first
            begun_beside.append(len(engine.batcher.running))
        add(engine, sequence)

    monkeypatch.setattr(Engine, "add", add_and_note)
    assert train.main(settings("free", run__steps=2)) == 0
    assert any(begun_beside)
    begun_beside.clear()
    assert train.main(settings("barrier", run__steps=2, env__barrier="true")) == 0
    assert begun_beside and not any(begun_beside), "a turn begins where none goes on"
    failing = dict(env__slow="0.1x5", env__stop=0.05, env__step_seconds=0.5, env__max_failures=1000)
    assert train.main(settings("late", run__steps=2, env__latency="normal(0.002,0.002)", **failing)) == 0
    assert sum(r["episodes"]["failed"] for r in steps_of(tmp_path / "late")) > 0
    assert tokens_of(tmp_path / "free") == tokens_of(tmp_path / "barrier") == tokens_of(tmp_path / "late")


@pytest.mark.parametrize(
    "own",
    [
        thorough(dict(env__clock="time")),
        dict(env__clock="time", overlap__depth=1),
        thorough(dict(rollout__tensor_parallel=2)),  # where it fails on one of the ranks only
    ],
)
def test_slow_and_failing_environments_hold_up_nobody_and_train_nothing_else(
    settings, run_ranks, tmp_path: Path, own: dict
) -> None:
    (tmp_path / "tries").mkdir()
    rows = [{"prompt": f"row {i}", "answer": "", "folder": str(tmp_path / "tries")} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own |= dict(data__env=CHAT.replace("chat", "needs_patience"), env__max_failures=1000, run__steps=2)
    run_ranks(2, train_runs, settings("patient", run__eval_every=2, data__eval_prompts=2, **own))
    check_transcripts(tmp_path / "patient")
    records = steps_of(tmp_path / "patient")
    assert sum(r["episodes"]["failed"] for r in records) > 0
    assert all(r["episodes"]["turns"]["max"] >= 1 for r in records)
    # None where a batch ahead has no token of the newest weights.
    assert all((r["train"]["logprob_diff_max"] or 0) < 1e-4 for r in records)
    assert any(r["episodes"]["reply_seconds"]["max"] > 0 for r in records), "a batch ahead may have come in one step"


SURPLUS = dict(scheduler__policy="tail_batching", scheduler__eta_prompts=1.5, scheduler__eta_responses=1.5)
UNRELIABLE = dict(data__env=CHAT.replace("chat", "unreliable"), env__clock="time", data__eval_prompts=0)
GRADER = f"{ROOT}/tests/graders.py:share_of_digits"
ways = pytest.mark.parametrize("way", [SURPLUS, dict(overlap__depth=1, overlap__bound=3)], ids=["race", "endless"])


@pytest.mark.parametrize(
    "way", [pytest.param(SURPLUS, id="race"), thorough(dict(overlap__depth=1, overlap__bound=3), id="endless")]
)
def test_failed_episodes_win_no_race_and_graders_see_whole_ones_only(settings, tmp_path: Path, way: dict) -> None:
    graded = dict(data__task=GRADER, reward__also="env=0.5", env__max_failures=1000)
    assert train.main(settings("graded", **UNRELIABLE, **way, **graded)) == 0
    check_transcripts(tmp_path / "graded")
    for reward in (reward for step in trained(tmp_path / "graded") for row in step for reward in row["rewards"]):
        assert reward["value"] == pytest.approx(reward["parts"][GRADER] + 0.5 * reward["parts"]["env"])
    records = steps_of(tmp_path / "graded")
    assert sum(r["episodes"]["failed"] for r in records) > 0 and not any(r["reward_errors"] for r in records)


@pytest.mark.thorough
@ways
def test_a_prompt_whose_environment_always_fails_is_not_trained_and_ends_the_run(
    settings, tmp_path: Path, capsys, way: dict
) -> None:
    rows = [{"prompt": f"row {i}", "answer": "", "share": i == 5} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train.main(settings("doomed", **UNRELIABLE | way, run__steps=24)) == 1
    said = capsys.readouterr()
    assert "in 3 episodes in a row, the last time: turn 1: ConnectionError: nobody answers" in said.err
    assert "after the prompt 'row 5'" in said.err and "Traceback" not in said.err
    prompts = [row["prompt"]["text"] for step in trained(tmp_path / "doomed") for row in step]
    assert "row 5" not in prompts
    assert train.main([*settings("doomed", **UNRELIABLE | way, run__steps=24, env__max_failures=4), "--resume"]) == 1
    assert "in 4 episodes in a row" in capsys.readouterr().err, "the advice of the message may be followed"


@pytest.mark.parametrize("clock, text", [("steps", "a50b06c"), ("time", "a")])
def test_a_failed_episode_is_played_again(tmp_path: Path, clock: str, text: str) -> None:
    """From its turns where the run is a function of its seed, else from the beginning."""
    for i in range(3):  # as often as a turn is tried
        (tmp_path / str(i)).touch()
    env, tokenizer = CHAT.replace("chat", "stumbles"), byte_tokenizer()
    prompt = Prompt(3, (5, 6), "", "", "env", {"folder": str(tmp_path)}, "row 3", env=env)
    visit = Visit(0, prompt)
    sequence = sequence_for(visit, 1, 0, LIMIT)
    with Episodes(EnvConfig(clock=clock, num_workers=1), RewardConfig(), [prompt], tokenizer, seed=0) as episodes:
        episodes.begin(visit, sequence)
        for guess in ("50", "06"):
            [answer] = episodes.poll(waits=True)
            assert isinstance(answer, EngineSequence) and not episodes.stats.failed
            ids = [*answer.token_ids, *tokenizer.encode(guess)]
            spans = (*answer.spans, Span(len(answer.token_ids), len(ids), 0))
            episodes.end_turn(visit, sequence, Sample(3, 1, 0, ids, [-1.0] * len(ids), "stop", spans))
        [answer] = episodes.poll(waits=True)
        assert isinstance(answer, EngineSequence) and tokenizer.decode(answer.token_ids) == text
        assert episodes.stats.failed == 1 and not episodes.awaited


def test_an_episode_that_moved_goes_on_where_it_was() -> None:
    tokenizer, prompt = byte_tokenizer(), Prompt(3, (5, 6), "", "", "env", {}, "row 3", env="guess")
    prompt = replace(prompt, extra={"answer": "12"})
    visit = Visit(0, prompt)

    def play(moves: bool) -> tuple[Sample, dict]:
        episodes = Episodes(EnvConfig(clock="steps"), RewardConfig(), [prompt], tokenizer, seed=0)
        sequence = sequence_for(visit, 1, 0, LIMIT)
        episodes.begin(visit, sequence)
        [answer] = episodes.poll(waits=True)
        for guess in ("50", "06", "12"):
            if moves:
                episodes = Episodes(EnvConfig(), RewardConfig(), [prompt], tokenizer, seed=0)
            assert isinstance(answer, EngineSequence)
            ids = [*answer.token_ids, *tokenizer.encode(guess)]
            spans = (*answer.spans, Span(len(answer.token_ids), len(ids), 0))
            turn = Sample(3, 1, 0, ids, [*answer.logprobs, -1.0, -1.0], "stop", spans)
            episodes.end_turn(visit, sequence, turn)
            [answer] = episodes.poll(waits=True)
        assert not episodes.open and not episodes.awaited and not isinstance(answer, EngineSequence)
        assert len(episodes.take_stats().reply_seconds) == (1 if moves else 4)
        return answer

    assert play(moves=True) == play(moves=False)
    sample, fields = play(moves=False)
    assert tokenizer.decode(sample.token_ids) == "50>06<12" and fields == {"turn_rewards": [0.0, 0.0, 1.0]}


@pytest.mark.parametrize("clock", ["steps", "time"])
def test_an_episode_that_moved_begins_anew_if_its_replay_goes_another_way(clock: str) -> None:
    """The model has read other texts: it must not go on behind them in another state of the environment."""
    env, tokenizer = CHAT.replace("chat", "guesses"), byte_tokenizer()
    prompt = Prompt(3, (5, 6), "", "", "env", {}, "row 3", env=env)
    visit, config = Visit(0, prompt), EnvConfig(clock=clock, num_workers=1)
    sequence = sequence_for(visit, 1, 0, 99)
    texts = []
    with Episodes(config, RewardConfig(), [prompt], tokenizer, seed=0) as episodes:
        episodes.begin(visit, sequence)
        [begun] = episodes.poll(waits=True)
        assert isinstance(begun, EngineSequence)
        texts.append(begun.token_ids)
    ids = [*begun.token_ids, *tokenizer.encode("50")]
    spans = (*begun.spans, Span(len(begun.token_ids), len(ids), 0))
    with Episodes(config, RewardConfig(), [prompt], tokenizer, seed=0) as other:
        other.end_turn(visit, sequence, Sample(3, 1, 0, ids, [-1.0] * len(ids), "stop", spans))
        [anew] = other.poll(waits=True)
        assert isinstance(anew, EngineSequence) and other.stats.failed == 1 and not other.awaited
        texts.append(anew.token_ids)
    assert all(texts) and texts[0] != texts[1] and anew.spans == ()


def test_a_text_that_cannot_be_read_fails_its_episode_only() -> None:
    """And is counted, as an error of the environment is: too many in a row end the run."""
    prompt = Prompt(3, (5, 6), "", "", "env", {}, "row 3", env=CHAT.replace("chat", "is_silent"))
    visit, tokenizer = Visit(0, prompt), byte_tokenizer()
    sequence = sequence_for(visit, 1, 0, LIMIT)
    turn = Sample(3, 1, 0, tokenizer.encode("50"), [-1.0, -1.0], "stop", (Span(0, 2, 0),))
    with Episodes(EnvConfig(max_failures=2), RewardConfig(), [prompt], tokenizer, seed=0) as episodes:
        episodes.begin(visit, sequence)
        assert episodes.poll(waits=True) == [sequence]
        episodes.end_turn(visit, sequence, turn)
        assert episodes.poll(waits=True) == [sequence] and episodes.stats.failed == 1  # it begins again
        episodes.end_turn(visit, sequence, turn)
        with pytest.raises(WorkerError, match="in 2 episodes in a row, .* gives no text after a turn"):
            episodes.poll(waits=True)


def test_a_turn_that_was_cut_may_be_stopped_before_it_counts() -> None:
    prompt = Prompt(3, (5, 6), "", "", "env", {"answer": "12"}, "row 3", env="guess")
    episodes = Episodes(EnvConfig(), RewardConfig(), [prompt], byte_tokenizer(), seed=0)
    sequence = sequence_for(Visit(0, prompt), 1, 0, LIMIT)
    episodes.begin(Visit(0, prompt), sequence)
    assert episodes.poll(waits=True) == [sequence]
    episodes.end_turn(Visit(0, prompt), sequence, Sample(3, 1, 0, [5], [-1.0], "cut", (Span(0, 1, 0),)))
    [awaited] = episodes.withdraw([sequence.id])
    assert awaited.turn and not episodes.poll(waits=False) and not episodes.open


@pytest.mark.parametrize(("limit", "fits"), [(3, False), (4, True), (5, True)])
def test_a_reply_fits_if_it_leaves_room_for_a_token(limit: int, fits: bool) -> None:
    """A turn of two tokens, a reply of one: what does not fit is not appended, and the episode ends."""
    tokenizer, prompt = byte_tokenizer(), Prompt(3, (5, 6), "", "", "env", {"answer": "12"}, "row 3", env="guess")
    episodes = Episodes(EnvConfig(clock="steps"), RewardConfig(), [prompt], tokenizer, seed=0)
    sequence, visit = sequence_for(Visit(0, prompt), 1, 0, limit), Visit(0, prompt)
    episodes.begin(visit, sequence)
    [begun] = episodes.poll(waits=True)
    ids = tokenizer.encode("50")
    episodes.end_turn(visit, sequence, turn := Sample(3, 1, 0, ids, [-1.0, -1.0], "stop", (Span(0, 2, 0),)))
    [answer] = episodes.poll(waits=True)
    assert begun == sequence and not episodes.awaited
    if fits:
        assert isinstance(answer, EngineSequence) and [*answer.token_ids] == [*ids, *tokenizer.encode(">")]
    else:
        assert answer == (replace(turn, finish_reason="length"), {"turn_rewards": [0.0]}) and not episodes.open


def test_a_single_turn_is_the_task_without_an_environment(settings, tmp_path: Path) -> None:
    """Bit by bit: the same tokens, rewards and losses."""
    graded = dict(data__task=f"{ROOT}/tests/graders.py:share_of_digits", run__steps=2)
    many = CHAT.replace("chat", "many_turns")
    assert train.main(settings("turn", **graded, data__env=many, env__max_turns=1, env__max_turn_tokens=0)) == 0
    steps = [a for a in settings("plain", **graded, data__env="") if not a.startswith("--env.")]
    assert train.main(steps) == 0
    assert tokens_of(tmp_path / "turn") == tokens_of(tmp_path / "plain")
    assert losses(tmp_path / "turn") == losses(tmp_path / "plain")
    reasons = {s["finish_reason"] for step in trained(tmp_path / "turn") for row in step for s in row["samples"]}
    assert reasons == {"turns"}


def test_sampled_tokens_are_kept_as_they_were_sampled() -> None:
    """A tokenizer that would write a turn in other tokens; a reply that spells a special token has no power."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["12"])
    ids = [tokenizer.encode(c)[0] for c in "12"]
    assert tokenizer.encode(tokenizer.decode(ids)) != ids
    prompt = Prompt(3, (5, 6), "", "", "env", {"answer": "99"}, "row 3", env="guess")
    episodes, sequence = (
        Episodes(EnvConfig(), RewardConfig(), [prompt], tokenizer, 0),
        sequence_for(Visit(0, prompt), 1, 0, 99),
    )
    episodes.end_turn(Visit(0, prompt), sequence, Sample(3, 1, 0, ids, [-1.0, -2.0], "stop", (Span(0, 2, 0),)))
    [answer] = episodes.poll(waits=True)
    assert isinstance(answer, EngineSequence) and [*answer.token_ids[:2]] == ids
    end = tokenizer.eos_token
    assert tokenizer.eos_token_id not in reply_tokens(f"a{end}b", tokenizer, 99)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (dict(data__env=f"{ROOT}/tests/worlds.py:breaks"), ["environments failed in 3 episodes", "no such door"]),
        (dict(data__env=f"{ROOT}/tests/worlds.py:is_silent"), ["gives no text after a turn, so the turn would go on"]),
        (dict(data__env="chess"), ["data.env: environment 'chess' is not built in", "guess"]),
        (dict(data__env=f"{ROOT}/tests/worlds.py:nothing"), ["has no such function"]),
        (dict(data__env=""), ["[env] has no effect"]),
        (dict(rollout__tensor_parallel=1, planner__rule="paper", env__clock="time"), ["env.clock = time has no place"]),
        (dict(env__step_seconds=300), ["tried 3 times, for 900 s", "run.timeout_seconds = 600", "raise"]),
        (dict(env__latency="normal(10)"), ["env.latency = normal(10): give normal(10,5)"]),
        (dict(env__barrier="true", overlap__depth=1), ["env.barrier is for comparison only"]),
        (dict(stream__policy="fixed"), ["stream.policy = fixed has no place beside environments"]),
        (dict(data__task="env", data__env=""), ["env"]),
    ],
)
def test_what_cannot_be_played_is_said_in_a_line(settings, capsys, overrides: dict, parts: list[str]) -> None:
    assert train.main(settings("refused", **overrides)) in (1, 2)
    said = capsys.readouterr()
    assert all(part in (said.out + said.err) for part in parts) and "Traceback" not in said.err


def test_a_tail_moves_only_episodes_whose_replies_are_there() -> None:
    prompt = Prompt(0, (5,), "", "", "env", {"answer": "12"}, "", env="guess")
    make = partial(Config, group=GroupConfig(server="s", tail_share=0.8))
    with pytest.raises(ConfigError, match="begin again where they move; take env.clock = steps"):
        check_environments(make(), [prompt], byte_tokenizer(), plays=False)
    check_environments(make(env=EnvConfig(clock="steps")), [prompt], byte_tokenizer(), plays=False)


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ("chat", 0, "replayed                  100 of 100, to the same texts and rewards"),
        ("is_silent", 2, "100 x gives no text after a turn, so the turn would go on"),
        ("fills", 2, "100 x begins with a text that leaves no room in rollout.max_response_tokens"),
        ("guesses", 0, "warning: "),
    ],
)
def test_a_check_plays_the_environment(settings, capsys, env: str, code: int, said: str) -> None:
    """As the run would read its texts. One that always fails is refused."""
    assert train.main([*settings("checked", data__env=f"{ROOT}/tests/worlds.py:{env}"), "--check"]) == code
    out, err = capsys.readouterr()
    assert said in out and ("fails in every episode; correct it" in err) == (code == 2)
    if env == "chat":
        rows = {line[2:26].strip(): line[26:].split() for line in out.splitlines()}
        assert (
            rows["turns"][1::2] == ["3", "6"] and rows["turns"][-1] == "128" and rows["tokens of a text"][-1] == "512"
        )
        assert rows["tokens of all texts"][-1] == str(LIMIT)
