"""Records: what ranks counted becomes one JSON object, and nothing else changes."""

import copy
from dataclasses import replace

import pytest

from core import Group, Prompt, Reward, Sample, Span
from engine.sequence import EngineStats
from envs.episodes import EpisodeStats
from policies.drafts import DraftStats
from policies.split import Work
from records import (
    RankReport,
    evaluation_record,
    generate_seconds,
    grading_record,
    lag_record,
    preemptions,
    step_record,
    work_of,
)
from rewards.gradings import PoolStats
from rewards.judge import JudgeStats

UPDATE = {"loss": 0.5, "logprob_diff_mean": 0.1, "logprob_diff_max": 0.2, "skipped": ""}


def group(index: int, task: str, *rewards: float) -> Group:
    """Return a group with responses of 1, 2, .. tokens; the last is cut off."""
    lengths = range(1, len(rewards) + 1)
    reasons = ["stop"] * (len(rewards) - 1) + ["length"]
    samples = tuple(
        Sample(index, r, 0, (7,) * n, (-1.0,) * n, reason, (Span(0, n, 0),))
        for r, (n, reason) in enumerate(zip(lengths, reasons, strict=True))
    )
    return Group(
        Prompt(index, (1,), "", "", task), 0, samples, tuple(Reward(v, parts={"half": v / 2}) for v in rewards)
    )


def report(rank: int, rollout: float) -> RankReport:
    """Return the report of one of four ranks, two to a replica, whose slower one decoded `rollout` seconds."""
    seconds = {"rollout": rollout, "reward": 1.0, **({"window_wait": 2.0} if rank < 2 else {})}
    engine = EngineStats(regroup_bytes=5)
    if rank % 2 == 0:
        engine = replace(engine, decode_steps=10 + rank, decoded_tokens=100, preemptions=3, peak_pages=rank)
        engine = replace(engine, drafted_tokens=8 + rank, accepted_tokens=6)
    stats = DraftStats({"old": 8, "own": rank}, {"old": 6}, 1 + rank, 10, 25, 0.5, 100, 7) if rank < 3 else DraftStats()
    return RankReport(
        engine, 2, 64, seconds, ([], []), {"host_mib": 10.0}, PoolStats(graded=1), JudgeStats(), EpisodeStats(), stats
    )


def test_a_step_adds_up_replicas_and_takes_the_slowest_rank() -> None:
    groups, reports = [group(0, "a", 1.0, 0.0), group(1, "b", 0.5, 0.5)], [report(i, 4.0 + i) for i in range(4)]
    updates = [UPDATE, UPDATE | {"loss": 1.5, "logprob_diff_max": 9.0, "skipped": "no sample to learn from"}]
    played = {"round": {"kind": "short", "queue": 2}, "planner": {"kind": "short", "size": 2}}
    given = groups, played, updates, reports
    before = copy.deepcopy(given)
    record = step_record(3, 2.0, *given)
    assert given == before and step_record(3, 2.0, *given) == record
    assert record["tokens"] == 6 and record["tokens_per_second"] == 3.0 and record["truncated"] == 0.5
    assert record["reward"] == 0.5 and record["reward_by_task"] == {"a": 0.5, "b": 0.5}
    assert record["reward_parts"] == {"half": 0.25} and record["mixed_groups"] == 0.5
    assert record["seconds"]["rollout"] == 7.0 and record["seconds"]["generate"] == generate_seconds(reports) == 6.0
    assert record["round"] == {"kind": "short", "queue": 2, "window_wait": 1.0} and record["planner"]["size"] == 2
    assert record["engine"]["decoded_tokens"] == 200 and record["engine"]["preemptions"] == preemptions(reports) == 6
    assert record["engine"]["regroup_bytes"] == 20 and record["engine"]["decode_steps"] == 12
    assert record["train"]["loss"] == 1.0 and record["train"]["logprob_diff_max"] == 0.2
    assert record["train"]["updates"] == 2 and record["train"]["skipped"] == "no sample to learn from"
    assert record["rewards"]["graded"] == 4 and record["memory"]["host_mib"] == 40.0 and record["judge"] == {}
    assert not {"round", "planner"} & step_record(3, 2.0, groups, {}, updates, reports).keys(), "replayed"


def test_the_lag_of_a_sample_counts_from_its_first_token_and_that_of_a_token_from_its_draw() -> None:
    whole = group(0, "a", 1.0, 0.0)  # a token and two, of version 0
    interrupted = Sample(1, 0, 0, (7,) * 9, (-1.0,) * 9, "stop", (Span(0, 2, 1), Span(4, 9, 3)))  # 2, 3 were given
    record = lag_record([whole, replace(whole, samples=(interrupted,))], 3)
    assert record["samples"] == {"2": 1, "3": 2} and record["tokens"] == {"0": 5, "2": 2, "3": 3}
    assert record["length"] == {"2": 7.0, "3": 1.5} and record["max"] == 3
    assert record["mean"] == pytest.approx(8 / 3) and record["token_mean"] == pytest.approx(1.3)
    fresh = lag_record([whole], 0)
    assert fresh["samples"] == {"0": 2} and fresh["max"] == fresh["mean"] == fresh["token_mean"] == 0


def test_turns_and_replies_are_counted_where_environments_answer() -> None:
    alone = group(0, "a", 1.0, 0.0)
    reports = [replace(report(i, 4.0), episodes=EpisodeStats(i, [1.0 + i])) for i in range(4)]
    assert "episodes" not in step_record(3, 2.0, [alone], {}, [UPDATE], reports)
    spans = (Span(0, 2, 1), Span(2, 4, 2), Span(5, 9, 2)), (Span(0, 9, 2),)  # two turns, the first of two versions; one
    samples = tuple(replace(s, token_ids=(7,) * 9, spans=x) for s, x in zip(alone.samples, spans, strict=True))
    played = replace(alone, prompt=replace(alone.prompt, env="guess"), samples=samples)
    record = step_record(3, 2.0, [alone, played], {}, [UPDATE], reports)["episodes"]
    assert record["turns"]["max"] == 2 and record["turns"]["mean"] == 1.5
    assert record["failed"] == 0 + 2 and record["reply_seconds"]["mean"] == 2.0, "once for each replica"
    assert evaluation_record([played], 1.0)["turns"] == record["turns"]


def test_a_prompt_passes_by_its_best_response() -> None:
    record = evaluation_record([group(0, "a", 1.0, 0.0), group(1, "a", 0.5, 0.5), group(2, "a", 1.0, 1.0)], 4.0)
    assert record["avg@2"] == pytest.approx(2 / 3) and record["pass@2"] == pytest.approx(2 / 3)
    assert record["num_prompts"] == 3 and record["truncated"] == 0.5 and record["length"]["max"] == 2.0
    assert record["standard_error"] == pytest.approx(0.2886751 / 3**0.5)


def test_an_evaluation_tells_of_rewards_that_failed() -> None:
    good, bad = group(0, "a", 1.0, 0.0), group(1, "a", 0.0, 0.0)
    bad = replace(bad, prompt=replace(bad.prompt, where="x.jsonl:2"), rewards=(Reward(0.0, error="no grade"),) * 2)
    record = evaluation_record([good, bad], 1.0)
    assert record["reward_errors"] == 2 and record["first_reward_error"] == "x.jsonl:2: no grade"
    assert evaluation_record([good], 1.0)["reward_errors"] == 0


def test_each_source_and_each_grader_has_its_scores_where_there_are_several() -> None:
    groups = [group(0, "a", 1.0, 0.0), group(1, "b", 0.5, 0.5), group(2, "a", 1.0, 1.0)]
    assert "by_task" not in evaluation_record(groups[::2], 1.0) and "by_source" not in evaluation_record(groups, 1.0)
    mixed = [replace(g, prompt=replace(g.prompt, source=s)) for g, s in zip(groups, "xyy", strict=True)]
    record = evaluation_record(mixed, 1.0)
    assert {name: part["avg@2"] for name, part in record["by_task"].items()} == {"a": 0.75, "b": 0.5}
    assert {name: part["pass@2"] for name, part in record["by_source"].items()} == {"x": 1.0, "y": 0.5}
    assert [part["num_prompts"] for part in record["by_source"].values()] == [1, 2]
    step = step_record(3, 2.0, mixed, {}, [UPDATE], [report(0, 1.0)])
    assert step["reward_by_source"] == {"x": {"reward": 0.5, "prompts": 1}, "y": {"reward": 0.75, "prompts": 2}}
    assert "reward_by_source" not in step_record(3, 2.0, groups, {}, [UPDATE], [report(0, 1.0)])


def test_what_graders_did_is_added_up_over_ranks():
    ranks = [PoolStats(2, 1.0, 4.0, 3.0, 5, 1), PoolStats(6, 3.0, 4.0, 1.0, 7, 0)]
    ranks[0].causes.update({"x": 2})
    ranks[1].causes.update({"x": 1, "y": 1})
    ranks[0].cases.responses, ranks[0].cases.audited, ranks[0].cases.audited_passed = 95, 1, 1
    ranks[1].cases.responses, ranks[1].cases.audited, ranks[1].cases.timeouts = 105, 3, 3
    record = grading_record(ranks, 4.0)
    assert record["graded"] == 8 and record["per_second"] == 2.0 and record["seconds_mean"] == 0.5
    assert record["latency_mean"] == 1.0 and record["latency_max"] == 3.0 and record["queue_max"] == 7
    assert record["workers_replaced"] == 1 and record["causes"] == {"x": 3, "y": 1}
    assert record["cases"]["timeouts"] == 3
    assert record["cases"]["passes_cut_off"] == 49, "a quarter of the audited passed late; 196 were not audited"
    assert grading_record([PoolStats()], 1.0)["seconds_mean"] == 0


def test_the_work_of_a_step_is_that_of_all_ranks() -> None:
    """Ranks 0 and 1 train; 2 and 3, a replica, decode for 5 and 6 seconds."""
    seconds = [
        {"train": 3.0},
        {"train": 4.0},
        {"prefill": 1.0, "decode": 4.0},
        {"prefill": 1.0, "decode": 2.0, "verify": 3.0},
    ]
    reports = [replace(report(0, 0.0), engine=EngineStats(), seconds=each) for each in seconds]
    reports[2] = replace(reports[2], engine=EngineStats(decode_steps=20, decoded_tokens=70))
    made = group(0, "a", 1.0, 0.0)
    assert work_of([made], 14, reports) == Work(1, 2, 17, 2.0, 70, 11.0, 7.0, 20, 6.0)
    first, *others = made.samples
    replied = replace(first, token_ids=(*first.token_ids, *range(50)), logprobs=(*first.logprobs, *[0.0] * 50))
    replied = replace(replied, spans=first.spans)
    assert work_of([replace(made, samples=(replied, *others))], 14, reports).tokens == 17, "replies are not drawn"
