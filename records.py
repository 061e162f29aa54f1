"""The records of a step and of an evaluation, pure: from groups, updates and counts to JSON objects."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from core import Group, SampleId, turns_of
from engine.sequence import EngineStats
from envs.episodes import EpisodeStats
from loss import ADVANTAGES, LossConfig
from metrics import RankTrack, Record, quantiles
from policies.drafts import DraftStats
from policies.planner import Choice
from policies.split import Work
from rewards.gradings import PoolStats
from rewards.judge import JudgeStats


@dataclass(frozen=True)
class RankReport:
    """What one rank counted in a step."""

    engine: EngineStats
    tensor_parallel: int  # ranks of its replica
    num_pages: int
    seconds: dict[str, float]  # by stage
    track: RankTrack
    memory: dict[str, float]
    pool: PoolStats
    judge: JudgeStats
    episodes: EpisodeStats
    drafts: DraftStats


def of_replicas(reports: Sequence[RankReport]) -> Sequence[RankReport]:
    """Return the report of the first rank of each replica."""
    return reports[:: reports[0].tensor_parallel]


def preemptions(reports: Sequence[RankReport]) -> int:
    return sum(r.engine.preemptions for r in reports)


def generate_seconds(reports: Sequence[RankReport]) -> float:
    """Return the seconds of the rollout before the wait for graders, on the slowest rank."""
    return max(r.seconds.get("rollout", 0.0) - r.seconds.get("reward", 0.0) for r in reports)


# ---- a step ------------------------------------------------------------------------------------------------------


def step_record(
    step: int,
    seconds: float,
    groups: Sequence[Group],
    played: dict[str, dict],
    updates: Sequence[dict],
    reports: Sequence[RankReport],
) -> Record:
    """Return the JSON record of a step of so many seconds.

    `played`: the sections "round" and "planner", empty when the groups were replayed; `updates`: the result of each
    `trainer.update`; `reports`: one of each rank.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [sample.num_sampled for sample in samples]
    stages = {name for r in reports for name in r.seconds}
    slowest = {name: max(r.seconds.get(name, 0.0) for r in reports) for name in sorted(stages)}
    window_wait = sum(r.seconds.get("window_wait", 0.0) for r in reports) / len(reports)
    return {
        "step": step,
        "epoch": groups[-1].epoch,
        "seconds": {"step": seconds, **slowest, "generate": generate_seconds(reports)},
        "samples": len(samples),
        "tokens": sum(lengths),
        "tokens_per_second": sum(lengths) / seconds,
        "rollout_tokens_per_second": sum(lengths) / max(slowest.get("rollout", seconds), 1e-9),
        "reward": sum(r.value for r in rewards) / len(rewards),
        "reward_by_task": reward_by_task(groups),
        **reward_by_source(groups),
        **reward_parts(groups),
        "rewards": grading_record([r.pool for r in reports], seconds),
        **failed_rewards(groups),
        "mixed_groups": sum(len({reward.value for reward in group.rewards}) > 1 for group in groups) / len(groups),
        "truncated": sum(s.is_truncated for s in samples) / len(samples),
        "length": quantiles(lengths),
        **episodes_record(groups, reports),
        **({**played, "round": {**played["round"], "window_wait": window_wait}} if played else {}),
        "train": train_record(updates),
        "engine": engine_record(reports),
        **drafts_record(of_replicas(reports)),
        "judge": judge_record([r.judge for r in reports]),
        "memory": {name: sum(r.memory.get(name, 0.0) for r in reports) for name in reports[0].memory},
    }


def train_record(updates: Sequence[dict]) -> Record:
    """Return the means over the updates of a step."""
    return {
        **{k: sum(u[k] for u in updates) / len(updates) for k in updates[0] if k != "skipped"},
        # Later updates of a step are off-policy on purpose; only the first compares rollout and trainer.
        **{k: updates[0][k] for k in ("logprob_diff_mean", "logprob_diff_max")},
        "updates": len(updates),
        "skipped": "; ".join(u["skipped"] for u in updates if u["skipped"]),
    }


def engine_record(reports: Sequence[RankReport]) -> dict[str, int]:
    """Return what all replicas did together."""
    tokens = "decoded_tokens", "prefilled_tokens", "shared_tokens", "resumed_tokens", "recomputed_tokens"
    return {
        **{name: sum(getattr(r.engine, name) for r in reports) for name in (*tokens, "preemptions", "regroup_bytes")},
        "decode_steps": max(r.engine.decode_steps for r in reports),
        **{name: max(getattr(r.engine, name) for r in reports) for name in ("peak_pages", "peak_parked_pages")},
        "pages": reports[-1].num_pages,  # the last rank decodes in every run
    }


def drafts_record(replicas: Sequence[RankReport]) -> Record:
    """Return what was drafted, and kept of it, by source; empty in a step without drafts.

    "row_tokens": that a row drew in a step with drafts; "won_seconds" is an estimate, the sum over replicas.
    """
    stats = [r.drafts for r in replicas]
    steps, ahead = sum(s.steps for s in stats), sum(s.ahead_tokens for s in stats)
    if not steps and not ahead:
        return {}
    drafted, accepted = (sum((Counter(getattr(s, name)) for s in stats), Counter()) for name in ("drafted", "accepted"))
    return {
        "drafts": {
            "drafted": sum(r.engine.drafted_tokens for r in replicas),
            "accepted": sum(r.engine.accepted_tokens for r in replicas),
            "by_source": {name: {"drafted": drafted[name], "accepted": accepted[name]} for name in sorted(drafted)},
            "steps": steps,
            "row_tokens": sum(s.kept for s in stats) / max(sum(s.rows for s in stats), 1),
            "won_seconds": sum(s.won_seconds for s in stats),
            "brought_tokens": sum(s.brought_tokens for s in stats),
            "ahead_tokens": ahead,
        }
    }


def turns_record(groups: Sequence[Group]) -> Record:
    """Return the turns of samples that an environment answered; empty when there are none."""
    turns = [len(turns_of(sample.spans)) for group in groups if group.prompt.env for sample in group.samples]
    return {"turns": quantiles(turns)} if turns else {}


def episodes_record(groups: Sequence[Group], reports: Sequence[RankReport]) -> Record:
    """Return the turns of a step's samples, and how environments answered meanwhile; empty without environments."""
    turns, replicas = turns_record(groups), of_replicas(reports)
    seconds = [x for r in replicas for x in r.episodes.reply_seconds]
    failed = sum(r.episodes.failed for r in replicas)
    return {"episodes": {**turns, "reply_seconds": quantiles(seconds), "failed": failed}} if turns else {}


def lag_record(groups: Sequence[Group], version: int) -> Record:
    """Return how old samples are, in updates, when the weights of `version` are trained on them.

    A sample's lag counts from its first token, a token's from its own draw, which newer weights may have made. "length"
    has the mean length of the samples of each lag, so that a bias of old samples towards long ones is seen.
    """
    by_sample, by_token, length = Counter[int](), Counter[int](), Counter[int]()
    for sample in (sample for group in groups for sample in group.samples):
        lag = version - sample.spans[0].version
        by_sample[lag] += 1
        length[lag] += sample.num_sampled
        for span in sample.spans:
            by_token[version - span.version] += len(span)
    return {
        "max": max(by_sample),
        "mean": sum(lag * count for lag, count in by_sample.items()) / by_sample.total(),
        "token_mean": sum(lag * count for lag, count in by_token.items()) / by_token.total(),
        "samples": {str(lag): by_sample[lag] for lag in sorted(by_sample)},
        "tokens": {str(lag): by_token[lag] for lag in sorted(by_token)},
        "length": {str(lag): length[lag] / by_sample[lag] for lag in sorted(by_sample)},
    }


def work_of(groups: Sequence[Group], wasted_tokens: int, reports: Sequence[RankReport]) -> Work:
    """Return what the ranks of an endless rollout did in a step that trained these groups."""
    lengths = [sample.num_sampled for group in groups for sample in group.samples]
    decoding = [sum(r.seconds.get(stage, 0.0) for stage in ("prefill", "decode", "verify")) for r in reports]
    return Work(
        batches=1,
        samples=len(lengths),
        tokens=sum(lengths) + wasted_tokens,
        longest=max(lengths),
        decoded=sum(r.engine.decoded_tokens for r in reports),
        decode_seconds=sum(decoding),
        train_seconds=sum(r.seconds.get("train", 0.0) for r in reports),
        engine_steps=max(r.engine.decode_steps for r in reports),
        engine_seconds=max(decoding),
    )


def audit_report(
    accepted: Sequence[SampleId], responses: Mapping[SampleId, tuple[int, float]], loss: LossConfig
) -> Record:
    """Compare what a race keeps with what it leaves out, all having run to their end.

    `responses`: (tokens, reward) of every launched response. Advantages are those within all launched responses of a
    prompt. Sets: `accepted` is trained; `censored_responses`, of the same prompts, are lost and bias the groups towards
    short responses; the responses of `censored_prompts` are only put off to another round.
    """
    ids = sorted(responses)
    prompts = sorted({id.visit for id in ids})
    rewards = torch.tensor([responses[id][1] for id in ids], dtype=torch.float64).view(len(prompts), -1)  # [P, R]
    advantages = dict(zip(ids, ADVANTAGES[loss.advantage](rewards).flatten().tolist(), strict=True))
    kept, kept_prompts = set(accepted), {id.visit for id in accepted}
    sets = {
        "accepted": [id for id in ids if id in kept],
        "censored_responses": [id for id in ids if id not in kept and id.visit in kept_prompts],
        "censored_prompts": [id for id in ids if id.visit not in kept_prompts],
    }
    return {
        name: {
            "responses": len(part),
            "length": quantiles([responses[id][0] for id in part]),
            "reward": quantiles([responses[id][1] for id in part]),
            "advantage": quantiles([advantages[id] for id in part]),
        }
        for name, part in sets.items()
    }


def grading_record(pools: Iterable[PoolStats], seconds: float) -> Record:
    """Return what the graders of all ranks did in a step of so many seconds."""
    total = PoolStats()
    for stats in pools:
        total.add(stats)
    graded = max(total.graded, 1)
    return {
        "graded": total.graded,
        "per_second": total.graded / seconds,
        "seconds_mean": total.seconds / graded,
        "latency_mean": total.latency / graded,
        "latency_max": total.latency_max,
        "queue_max": total.queue_max,
        "workers_replaced": total.replaced,
        "causes": dict(total.causes.most_common(10)),
        "cases": asdict(total.cases) | {"passes_cut_off": total.cases.passes_cut_off},
    }


def judge_record(judges: Sequence[JudgeStats]) -> dict[str, float]:
    """Return what the judges of all ranks did; empty when they judged nothing."""
    texts, mass = sum(s.texts for s in judges), sum(s.verdict_mass for s in judges)
    if not texts:
        return {}
    batches = sum(s.batches for s in judges)
    return {
        "texts": texts,
        "tokens": sum(s.tokens for s in judges),
        "batches": batches,
        "seconds": max(s.seconds for s in judges),
        "mean_wait_seconds": sum(s.wait_seconds for s in judges) / texts,
        "peak_queue": max(s.peak_queue for s in judges),
        "streamed_gib": sum(s.streamed_bytes for s in judges) / 2**30,
        "mean_resident_layers": sum(s.resident_layers for s in judges) / batches,
        **({"verdict_mass": mass / texts} if mass else {}),  # a reward model gives no verdict
    }


def planner_record(kind: str, choice: Choice) -> Record:
    """Return the tensor-parallel size of a round of this kind, with the reason."""
    return {"kind": kind, **asdict(choice), "predicted": {str(n): t for n, t in choice.predicted.items()}}


# ---- an evaluation -----------------------------------------------------------------------------------------------


def evaluation_record(groups: Sequence[Group], seconds: float) -> Record:
    """Return the scores of all groups and, where there are several, of each data source and each grader."""
    return {
        **scores(groups),
        **reward_parts(groups),
        **failed_rewards(groups),
        "seconds": seconds,
        **turns_record(groups),
        **_each("by_source", groups, lambda group: group.prompt.source),
        **_each("by_task", groups, lambda group: group.prompt.task),
    }


def failed_rewards(groups: Sequence[Group]) -> Record:
    """Return how many gradings failed, which count 0, and where and why the first did."""
    errors = [f"{group.prompt.where}: {reward.error}" for group in groups for reward in group.rewards if reward.error]
    return {"reward_errors": len(errors), "first_reward_error": errors[0] if errors else ""}


def scores(groups: Sequence[Group]) -> Record:
    """Return avg@k and pass@k: a prompt passes when its best reward is at least 1."""
    rewards = torch.tensor([[reward.value for reward in group.rewards] for group in groups])  # [P, k]
    per_prompt, k = rewards.mean(1), rewards.shape[1]
    return {
        f"avg@{k}": per_prompt.mean().item(),
        f"pass@{k}": (rewards.amax(1) >= 1).double().mean().item(),
        "standard_error": (per_prompt.std() / len(groups) ** 0.5).item() if len(groups) > 1 else 0.0,
        "num_prompts": len(groups),
        "truncated": sum(s.is_truncated for g in groups for s in g.samples) / rewards.numel(),
        "length": quantiles([s.num_sampled for g in groups for s in g.samples]),
    }


def _each(key: str, groups: Sequence[Group], name_of: Callable[[Group], str]) -> Record:
    """Return the scores of the groups of each name under `key`; empty where all have one name."""
    parts = defaultdict[str, list[Group]](list)
    for group in groups:
        parts[name_of(group)].append(group)
    return {key: {name: scores(part) for name, part in sorted(parts.items())}} if len(parts) > 1 else {}


# ---- rewards -----------------------------------------------------------------------------------------------------


def reward_by_task(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean reward of each grader."""
    return _means((group.prompt.task, reward.value) for group in groups for reward in group.rewards)


def reward_by_source(groups: Sequence[Group]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the mean reward and the number of prompts of each source, where there are several."""
    rewards = _means((group.prompt.source, reward.value) for group in groups for reward in group.rewards)
    prompts = Counter(group.prompt.source for group in groups)
    by_source = {name: {"reward": mean, "prompts": prompts[name]} for name, mean in rewards.items()}
    return {"reward_by_source": by_source} if len(prompts) > 1 else {}


def reward_parts(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return the mean of each part of the rewards, where they have parts."""
    parts = _means(part for group in groups for reward in group.rewards for part in reward.parts.items())
    return {"reward_parts": parts} if parts else {}


def _means(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in named:
        values[name].append(value)
    return {name: sum(v) / len(v) for name, v in sorted(values.items())}
