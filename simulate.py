"""A discrete-event simulation of training runs, driven by the policies that really run.

    python simulate.py --cluster.gpus=128 --cluster.model=qwen2.5-14b --scheduler.num_prompts=512
    python simulate.py --replay=RUN                lengths of a run with --run.dump_rollouts=true
    python simulate.py --profile=PROFILE.json      decode and prefill times measured by profiler.py

The code of real runs decides: scheduler.py, rewards/timeouts.py, and placement, planner and overlap in policies/.
policies/replica.py models the engine to the page, simulation/costs.py the time; docs/simulator.md lists the other
models. The cost of a simulation grows with its responses, not with their tokens.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from pathlib import Path
from random import Random
from statistics import mean

from config import Auto, ConfigError, describe, keys_in, load_config, option
from core import Decision, Finished, Prompt, RoundPlan, RoundStats, SampleId, Visit, VisitId
from data import PromptCursor
from engine.pages import LAYOUTS, Cache, pages_needed
from policies.flow import Flow, FlowStats, OverlapConfig, check_overlap
from policies.placement import Placement, group_sizes
from policies.planner import EngineLimits, Launch, ParallelismPlanner, PlannerConfig, Report, refuse_within_round
from policies.replica import Replica, Response
from policies.scale_down import Progress, ScaleDown, StreamConfig, StreamPolicy, refuse_dynamic_sampling
from policies.split import SplitTimes, Work
from policies.step_times import FittedTimes, Profile, SizeProfile, read_profile
from process import command
from reward import RewardConfig
from rewards.timeouts import AdaptiveTimeouts, CasePlan
from scheduler import POLICIES, Race, RoundPolicy, SchedulerConfig, races, window
from simulation.costs import BYTES, Costs, Efficiency, Hardware, Measured, Shape
from simulation.drafts import DraftingReplica, DraftsConfig, check_drafts, drafts_record
from simulation.episodes import EpisodeReplica, Episodes, EpisodesConfig, check_episodes, episodes_record, skip_idle
from simulation.workload import Drawn, LengthModel, Lengths, Recorded

CONFIGS = Path(__file__).parent / "configs" / "simulate"


@dataclass(frozen=True)
class ModelFile:
    """configs/simulate/MODEL.toml: costs and response lengths of a model. One file for all figures."""

    shape: Shape = field(default_factory=Shape)
    efficiency: Efficiency = field(default_factory=Efficiency)
    lengths: LengthModel = field(default_factory=LengthModel)


@dataclass(frozen=True)
class ClusterConfig:
    hardware: str = option("h800", "GPU, a file in configs/simulate: h800, h100, h200, h20, a100")
    model: str = option("qwen2.5-7b", "model and its response lengths, a file in configs/simulate")
    gpus: int = option(16, "GPUs of the whole run", min=1, max=100_000)
    tensor_parallel: int = option(1, "GPUs that decode one replica together", min=1)
    weights: str = option(
        "whole",
        "rollout weights on each GPU of a replica: whole, or sharded over them; in both cases a GPU reads only its "
        "shard in a decode step",
        choices=LAYOUTS,
    )
    max_running: int = option(256, "most sequences that decode together on one replica", min=1)
    page_size: int = option(64, "tokens in one KV page", min=1)
    shared_prompts: bool = option(True, "responses share their prompt's pages, as on a GPU; false: as on a CPU")
    steps: int = option(20, "steps to simulate", min=1)
    seed: int = option(0, "seed of lengths, of the order of prompts and of graders", min=0)


@dataclass(frozen=True)
class GradingConfig:
    """Times of graders. (RollPacker, section 4.3)"""

    overlap: bool = option(True, "grade a response when it ends; false: all responses after the rollout")
    adaptive: bool = option(True, "time limits of code follow the times of correct runs; false: always T_max")
    sandboxes: int = option(22, "programs that run at the same time, over the whole cluster (fitted)", min=1)
    code_seconds: float = option(1.0, "median seconds of a response's tests", above=0)
    code_spread: float = option(0.7, "spread of code_seconds over prompts, in natural logarithms", min=0)
    hanging: float = option(0.05, "share of code prompts whose responses run into the limit", min=0, max=1)
    audit: float = option(RewardConfig.case_audit, "share of responses that get T_max", min=0, max=1)
    judges: int = option(32, "responses that judges read at the same time", min=1)
    judge_seconds: float = option(2.0, "seconds of one verdict", above=0)
    rule_seconds: float = option(0.01, "seconds of one comparison by rule", above=0)

    def timeouts(self) -> AdaptiveTimeouts:
        """Return the time limits of real runs, by the defaults of their settings."""
        c = RewardConfig()
        factor = c.case_factor if self.adaptive else 0.0
        return AdaptiveTimeouts(factor, c.case_min_seconds, c.case_max_seconds, self.audit, c.case_quantile)


@dataclass(frozen=True)
class SimulationConfig:
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    env: EpisodesConfig = field(default_factory=EpisodesConfig)
    drafts: DraftsConfig = field(default_factory=DraftsConfig)

    @property
    def decoding_gpus(self) -> int:
        return self.cluster.gpus - self.overlap.train_ranks


# ---- one rollout -------------------------------------------------------------------------------------------------


class SimulatedRound:
    """Plays one round as `rounds.Round` does: windows, events, the policy's decisions, moves."""

    def __init__(self, run: "Simulation", plan: RoundPlan, step: int):
        self.run, self.plan, self.step, self.tp = run, plan, step, run.choose(plan)
        self.replicas = self._make_replicas(self.tp)
        self.freed: list[Replica] = []  # to train
        self.past: list[tuple[Replica, int]] = []  # of other sizes, and their GPUs
        self.resized: list[dict[str, object]] = []
        self.resize_seconds: float | None = None
        self.stream = run.stream if run.stream and run.stream.begin(plan.kind) else None
        self.placement = Placement(len(self.replicas))
        self.iteration = self.windows = self.turns = self.migrated = 0
        self.clock = 0.0  # at the newest window's end
        self.prompts: dict[VisitId, Prompt] = {}
        self.ended: dict[SampleId, float] = {}  # seconds since the rollout began
        self.lengths: dict[SampleId, int] = {}
        self.sampled: dict[SampleId, int] = {}  # of every response that was launched, tokens without replies
        self.drawn: list[int] = []  # the length of every response that was launched
        self.aborted: dict[SampleId, int] = {}
        self.scale_down: ScaleDown | None = None
        self.freed_at = math.inf

    def _make_replicas(self, tp: int) -> list[Replica]:
        c = self.run.config.cluster
        costs = [self.run.costs_at(i, tp) for i in range(self.run.config.decoding_gpus // tp)]
        given = [(each, each.pages, c.page_size, c.max_running, c.shared_prompts) for each in costs]
        episodes, drafts = self.run.episodes, self.run.config.drafts
        if drafts.most and not races(self.run.config.scheduler, self.plan.kind):
            seeds = [f"drafts {c.seed} {self.step} {i}" for i in range(len(given))]
            return [DraftingReplica(drafts, Random(seed), *each) for seed, each in zip(seeds, given, strict=True)]
        return [EpisodeReplica(episodes, *each) if episodes else Replica(*each) for each in given]

    @property
    def seconds(self) -> float:
        return max(self.clock, *(replica.clock for replica in self.replicas))

    @property
    def preemptions(self) -> int:
        return sum(replica.preemptions for replica, _ in self.all_replicas)

    @property
    def all_replicas(self) -> list[tuple[Replica, int]]:
        """Every replica of the round, with its GPUs."""
        return self.past + [(replica, self.tp) for replica in self.replicas + self.freed]

    def play(self, policy: RoundPolicy | Race) -> None:
        """Decode until the policy says that the round is done. Rewards that it asks for take no time here."""
        self._launch(self.plan.prompts, self.plan.expected)
        decision = Decision()
        while not decision.done:
            looks = self.run.planner is not None and self.run.planner.is_due(self.placement.num_live)
            finished = self.decode(looks)
            decision = policy.observe(finished, {id: self.run.reward(id) for id in decision.grade})
            self.carry_out(decision, finished)
            if not decision.done:
                self._scale_down()
            if looks and not decision.done:
                self._resize()

    def carry_out(self, decision: Decision, finished: Sequence[Finished] = ()) -> None:
        """Do as the policy says after a window in which `finished` ended."""
        for replica, ids in self.placement.by_replica(decision.abort).items():
            self.aborted.update({s.id: s.done for s in self.replicas[replica].remove(ids)})
        self.placement.remove([*(event.id for event in finished), *decision.abort])
        self._launch(decision.launch)
        if self.run.config.scheduler.migrate:
            self._move(self.placement.handovers())
        self.turns += 1

    def _launch(self, prompts: Sequence[Visit], expected: Sequence[float] = ()) -> None:
        ids, count = [visit.id for visit in prompts], self.plan.num_responses
        self.prompts.update({visit.id: visit.prompt for visit in prompts})
        lengths = {id: self.run.workload.lengths(id, count, self.step) for id in ids}
        spread = self.run.config.scheduler.placement == "spread"
        for replica, share in enumerate(self.placement.launch(ids, count, expected, spread)):
            for id in share:
                given = id, len(self.prompts[id.visit].token_ids), lengths[id.visit][id.response]
                episodes = self.run.episodes
                response = episodes.episode(*given, self.step) if episodes else Response(*given)
                self.drawn.append(response.length)
                self.sampled[id] = response.sampled
                self._add(self.replicas[replica], response)

    def _add(self, replica: Replica, response: Response) -> None:
        """Give a replica a response. One that had none has not gone along with the windows (see `decode`)."""
        if replica.is_idle:
            replica.clock, replica.iteration = max(replica.clock, self.clock), self.iteration
        replica.add(response)

    def decode(self, looks: bool = False, until: float = math.inf) -> list[Finished]:
        """Go on to the end of the first window with an event, or of the next. They begin together on all replicas.

        `until`: a time at whose window to end if no event comes earlier, as far as the pace of now tells.
        """
        busy = [replica for replica, live in zip(self.replicas, self.placement.live, strict=True) if live]
        may_leave = self.stream is not None and not self.stream.is_done
        is_watched = self.scale_down is not None or (self.run.planner is not None and self.run.planner.due > 0)
        size = window(self.run.config.scheduler, self.plan.kind, len(self.replicas), may_leave, is_watched)
        windows = 1
        awaits = self.run.episodes is not None and skip_idle(self.replicas, until)
        if size < math.inf:
            first = min((replica.next_event() for replica in busy), default=math.inf)
            if first == math.inf and not awaits:
                return []  # dynamic sampling waits for its grades
            windows = 1 if looks or awaits else math.ceil((first - self.iteration) / size)
            if until < math.inf and windows > 1:
                pace = size * max(replica.step_seconds for replica in busy)
                windows = min(windows, max(math.ceil((until - self.seconds) / pace), 1))
            self.iteration += windows * int(size)
        before = [replica.plain for replica in busy]
        ended = [e for r in busy for e in r.run_until(self.iteration if size < math.inf else math.inf)]
        self.windows += windows
        if self.stream:
            self._observe_steps(busy, before)
        if size < math.inf:
            self.clock = self.seconds + windows * self.run.model.efficiency.window_seconds
            for replica in busy:
                replica.clock = self.clock
        self.ended.update({event.id: at for event, at in ended})
        self.lengths.update({event.id: event.num_tokens for event, _ in ended})
        return [event for event, _ in ended]

    def wait(self, until: float) -> None:
        """Decode nothing up to a time, or on from now if that is over."""
        for replica in self.replicas:
            replica.clock = max(self.seconds, until)

    def _observe_steps(self, replicas: Sequence[Replica], before: Sequence[tuple[int, int, float]]) -> None:
        """Give the stream policy the step time of the slowest replica, as overlap/streamed.py does."""
        windows = []
        for replica, old in zip(replicas, before, strict=True):
            steps, drawn, seconds = (now - then for now, then in zip(replica.plain, old, strict=True))
            if steps:
                windows.append((drawn / steps, replica.pages_used * replica.page_size, seconds / steps))
        if windows:
            self.run.times[self.tp].observe(*max(windows, key=lambda window: window[-1]))

    def _move(self, moves: Sequence[tuple[SampleId, int, int]]) -> None:
        replicas = self.replicas + self.freed
        leaving: dict[int, set[SampleId]] = {}
        for id, source, _ in moves:
            leaving.setdefault(source, set()).add(id)
        travelling = {s.id: s for source, ids in leaving.items() for s in replicas[source].remove(ids)}
        for id, _, target in moves:
            self._add(replicas[target], travelling[id])
        self.migrated += len(moves)

    def _resize(self) -> None:
        """Deal all responses again, over replicas of another size, if the planner says so."""
        assert self.run.planner
        choice = self.run.planner.choose_again(self.plan.kind, [r.live_tokens() for r in self.replicas])
        if not choice:
            return
        ids = {id for live in self.placement.live for id in live}
        responses = {s.id: s for replica in self.replicas for s in replica.remove(ids)}
        self.resize_seconds = self.run.resize_seconds(choice.size)
        seconds, self.past = self.seconds + self.resize_seconds, self.all_replicas
        self.tp, self.replicas = choice.size, self._make_replicas(choice.size)
        self.placement = Placement(len(self.replicas))
        shares = self.placement.deal({id: s.num_tokens for id, s in responses.items()})
        for replica, share in zip(self.replicas, shares, strict=True):
            replica.clock, replica.iteration = seconds, self.iteration
            for id in share:
                replica.add(responses[id])
        self.resized.append({"iteration": self.iteration, "responses": len(responses), **asdict(choice)})

    def _scale_down(self) -> None:
        total = self.plan.keep_prompts * self.plan.keep_responses
        if not self.stream or not self.stream.is_due(len(self.lengths), total):  # saves the look at every response
            return
        live = [tokens for replica in self.replicas for tokens in replica.live_tokens()]
        sizes, count = [len(p.token_ids) for p in self.prompts.values()], len(self.replicas)
        given = total, self.lengths.values(), live, sum(sizes) // len(sizes), count, self.run.token_seconds
        self.scale_down = self.stream.observe(Progress(*given))
        if self.scale_down:
            keep, self.freed_at = self.scale_down.replicas, self.seconds
            self.replicas, self.freed = self.replicas[:keep], self.replicas[keep:]
            self._move(self.placement.shrink(keep))


# ---- a whole run -------------------------------------------------------------------------------------------------


class Simulation:
    """A run: `step` until `config.cluster.steps` are done. Records look like those of steps.jsonl."""

    def __init__(
        self,
        config: SimulationConfig,
        model: ModelFile,
        hardware: Hardware,
        workload: Lengths | None = None,
        profile: Profile | None = None,
    ):
        """`workload` replaces the lengths by `model`; `profile`, measured times, replaces the roofline."""
        refuse_dynamic_sampling(config.stream, config.scheduler.dynamic_sampling)
        refuse_within_round(config.planner, config.stream.policy)
        o = config.overlap
        if isinstance(o.train_ranks, Auto):
            raise ConfigError("overlap.train_ranks = auto is for real runs; take a number, and then best_share of it")
        self.policy = POLICIES[config.scheduler.policy](config.scheduler, config.cluster.seed)
        check_overlap(o, self.policy, config.stream.policy, config.planner.rule)
        if o.train_ranks and not o.depth:
            raise ConfigError(
                f"overlap.train_ranks = {o.train_ranks} with overlap.depth = 0 is for real runs; take overlap.depth = 1"
            )
        others = {
            f"stream.policy = {config.stream.policy}": config.stream.policy != "off",
            f"planner.rule = {config.planner.rule}": config.planner.rule != "fixed",
            "scheduler.migrate = true": config.scheduler.migrate,
            f"env.barrier = true and overlap.depth = {o.depth:g}": config.env.barrier and o.depth > 0,
        }
        if o.depth and config.grading != GradingConfig():
            raise ConfigError("[grading] has no effect with overlap.depth: rewards take no time there; leave it out")
        check_episodes(config.env, others)
        check_drafts(
            config.drafts, others | {"env.turns": config.env.turns > 0, f"overlap.depth = {o.depth:g}": o.depth > 0}
        )
        self.config, self.model, self.hardware, self.profile = config, model, hardware, profile
        c = config.cluster
        self.workload = workload or Drawn(model.lengths, c.seed)
        self.episodes = Episodes(config.env, c.seed, self.workload.limit) if config.env.turns else None
        count = math.ceil(config.scheduler.num_prompts * self.policy.config.eta_prompts) * (c.steps + 1)
        prompts = self.workload.prompts(count)
        self.cursor = PromptCursor(prompts, c.seed)
        self.longest = max(len(prompt.token_ids) for prompt in prompts) + self.workload.limit
        self.costs_of = self._costs()
        self.costs = self.costs_of[c.tensor_parallel]  # of the newest round
        self.times = {n: FittedTimes(costs.capacity) for n, costs in self.costs_of.items()}
        self.stream = None
        if config.stream.policy != "off":
            self.stream = StreamPolicy(config.stream, self.times[c.tensor_parallel], self.workload.limit)
        self.planner = self._planner() if config.planner.rule != "fixed" else None
        self.timeouts = config.grading.timeouts()
        self.token_seconds = 0.0  # of all GPUs together, to train a token of the newest step
        self.records: list[dict] = []
        self.trained: list[list[SampleId]] = []
        self.events = 0

    def _costs(self) -> dict[int, Costs]:
        """Return the costs of each tensor-parallel size whose pages hold a longest response."""
        c, given = self.config.cluster, (self.hardware, self.model.shape, self.model.efficiency)
        gpus = self.config.decoding_gpus
        if gpus < 1:
            raise ConfigError(f"overlap.train_ranks = {c.gpus - gpus} leaves none of {c.gpus} GPUs to decode")
        if gpus % c.tensor_parallel:
            raise ConfigError(
                f"cluster.tensor_parallel = {c.tensor_parallel} does not divide the {gpus} GPUs that decode "
                "(cluster.gpus - overlap.train_ranks)"
            )
        found: dict[int, Costs]
        if self.profile:
            if (size := self.profile.made_on.get("page_size", c.page_size)) != c.page_size:
                raise ConfigError(
                    f"the profile counts pages of {size} tokens, cluster.page_size = {c.page_size}; take {size}"
                )
            sizes = {n: p for n, p in self.profile.sizes.items() if gpus % n == 0}
            found = {n: Measured(*given, n, measured, c.page_size) for n, measured in sizes.items()}
        else:
            node = min(self.hardware.node_gpus, gpus)
            possible = group_sizes(gpus, node)
            if c.tensor_parallel not in possible:
                raise ConfigError(
                    f"cluster.tensor_parallel = {c.tensor_parallel} is not one of {possible}, the sizes of groups "
                    f"inside a node of {node} GPUs"
                )
            own = {c.tensor_parallel} | {n for n in possible if n <= self.model.shape.kv_heads}
            found = {n: Costs(*given, n, self.num_pages(n, c.weights), c.page_size) for n in sorted(own)}
        if c.tensor_parallel not in found:
            raise ConfigError(f"cluster.tensor_parallel = {c.tensor_parallel}: the profile has only {[*found]}")
        needed = pages_needed(self.longest, c.page_size)
        fitting = {n: costs for n, costs in found.items() if costs.pages >= needed}
        if c.tensor_parallel not in fitting:
            raise ConfigError(self._misfit([*fitting], needed))
        return fitting

    def num_pages(self, size: int, layout: str) -> int:
        c, s = self.config.cluster, self.model.shape
        cache = Cache(s.layers, s.kv_heads, s.head_dim, BYTES, c.page_size, c.max_running, self.longest)
        memory = self.hardware.memory * self.model.efficiency.kv_memory
        return cache.num_pages(memory, size, s.parameters * BYTES, layout)

    def _misfit(self, fits: Sequence[int], needed: int) -> str:
        """Return why a replica of `cluster.tensor_parallel` cannot hold a response, and which sizes could."""
        c = self.config.cluster
        text = f"cluster.tensor_parallel = {c.tensor_parallel}: a response of {self.longest} tokens does not fit; "
        text += f"it fits into the sizes {fits}" if fits else "no size of this cluster holds it"
        if not self.profile:
            each = self.model.shape.parameters * BYTES
            room = self.hardware.memory * self.model.efficiency.kv_memory
            text += f". cluster.weights = {c.weights}: {each / 1e9:.3g} GB of weights, {room / 1e9:.3g} GB of a GPU "
            text += "for weights and pages"
            if c.weights == "whole" and self.num_pages(c.tensor_parallel, "sharded") >= needed:
                text += "; sharded weights would fit: cluster.weights = sharded"
        return text

    def _planner(self) -> ParallelismPlanner:
        """Build the planner of real runs. Without a measured profile it gets one from the roofline."""
        c, contexts = self.config.cluster, (256, 2048, 16_384)
        sizes = {
            n: SizeProfile(
                costs.pages,
                tuple((b, ctx, costs.decode(b, b * ctx)) for b in (1, 8, 64, 256) for ctx in contexts),
                tuple((ctx, costs.prefill(ctx) / ctx) for ctx in contexts),
            )
            for n, costs in self.costs_of.items()
        }
        profile = self.profile or (Profile({}, sizes) if self.config.planner.rule == "predict" else None)
        pages = {n: costs.pages for n, costs in self.costs_of.items()}
        limits = EngineLimits(c.gpus, pages, c.page_size, c.max_running, self.workload.limit, c.shared_prompts)
        return ParallelismPlanner(self.config.planner, limits, c.tensor_parallel, profile)

    def choose(self, plan: RoundPlan) -> int:
        """Return the tensor-parallel size that the planner wants for this round."""
        if self.planner:
            self.costs = self.costs_of[self.planner.choose(plan.kind, Launch.of(plan)).size]
        if self.stream:
            self.stream.times = self.times[self.costs.tp]
        return self.costs.tp

    def costs_at(self, replica: int, size: int) -> Costs:
        """Return the costs of one replica of a tensor-parallel size. Here all are equal; benchmarks override this."""
        return self.costs_of[size]

    def resize_seconds(self, size: int) -> float:
        """Return the seconds in which every GPU gets its weights of another size: none where it has them whole."""
        return self.costs_of[size].weight_sync() if self.config.cluster.weights == "sharded" else 0.0

    def reward(self, id: SampleId) -> float:
        return float(Random(f"reward {self.config.cluster.seed} {id}").random() < self.model.lengths.solved)

    def run(self) -> list[dict]:
        for step in range(self.config.cluster.steps):
            self.step(step)
        return self.records

    def step(self, step: int) -> None:
        """Play one step: rollout, grading, training, weight sync."""
        c, e = self.config, self.model.efficiency
        plan = self.policy.begin(self.cursor.take, c.cluster.steps - step)
        rollout = SimulatedRound(self, plan, step)
        rollout.play(self.policy)
        accepted = self.policy.accepted_ids()
        stats = self.policy.close(rollout.aborted)
        wanted = list(rollout.ended) if plan.audit else accepted
        graded = reward_times(rollout, wanted, c.grading, self.timeouts, c.cluster.seed)
        self.newest, self.graded = rollout, graded
        end = rollout.seconds
        lengths = {id: rollout.lengths[id] + len(rollout.prompts[id.visit].token_ids) for id in accepted}
        streamed, late = self._stream(rollout, lengths, graded)
        rest = [n for id, n in lengths.items() if id.visit not in streamed]
        self.token_seconds = self.costs.train(list(lengths.values()), c.cluster.gpus) / sum(lengths.values())
        if rollout.stream:
            rollout.stream.close([rollout.lengths[id] for id in accepted])
        if self.planner:
            everything = (*rollout.lengths.values(), *rollout.aborted.values())
            report = Report(rollout.preemptions, end, everything, rollout.resize_seconds)
            self.planner.observe(plan.kind, report)
        seconds = {
            "rollout": e.rollout_seconds + end,
            "reward": max(max(graded[id] for id in accepted) - end, 0.0),
            "train": self.costs.train(rest, c.cluster.gpus) + late + e.train_seconds,
            "sync": self.costs.weight_sync(),
        }
        self.trained.append(accepted)
        self.records.append(self._record(rollout, stats, seconds, len(streamed)))

    def _record(self, rollout: SimulatedRound, stats: RoundStats, seconds: dict[str, float], streamed: int) -> dict:
        replicas = rollout.all_replicas
        self.events += sum(r.events for r, _ in replicas) + rollout.turns * len(replicas)
        gpu_seconds = max(rollout.seconds, 1e-9) * self.config.cluster.gpus
        trained = self.trained[-1]
        return {
            "step": len(self.trained),
            "seconds": {"step": sum(seconds.values()), **seconds},
            "samples": len(trained),
            "tokens": sum(rollout.lengths[id] for id in trained),
            "round": asdict(stats)
            | {"windows": rollout.windows, "migrated": rollout.migrated, "resized": rollout.resized},
            "stream": {"prompts": streamed, **(asdict(rollout.scale_down) if rollout.scale_down else {})},
            "engine": {
                "preemptions": rollout.preemptions,
                "decoded_tokens": sum(r.decoded for r, _ in replicas),
                "busy": sum(r.busy * gpus for r, gpus in replicas) / gpu_seconds,
                "tensor_parallel": self.costs.tp,
            },
            **episodes_record(r for r, _ in replicas),
            **drafts_record(r for r, _ in replicas),
        }

    def _stream(
        self, rollout: SimulatedRound, lengths: Mapping[SampleId, int], graded: Mapping[SampleId, float]
    ) -> tuple[set[VisitId], float]:
        """Return the prompts that the freed ranks trained beside the rollout, and the seconds of the training left."""
        if not rollout.freed:
            return set(), 0.0
        assert self.stream, "only a stream policy frees ranks"
        gpus, end = len(rollout.freed) * self.costs.tp, rollout.seconds
        groups: dict[VisitId, list[SampleId]] = {}
        for id in lengths:
            groups.setdefault(id.visit, []).append(id)
        ready = {prompt: max(graded[id] for id in ids) for prompt, ids in groups.items()}
        clock, streamed, share = rollout.freed_at + self.stream.switch, set(), self.model.efficiency.streamable
        for prompt in sorted(ready, key=ready.__getitem__):
            begin = max(clock, ready[prompt])
            if begin >= end:
                break
            clock = begin + share * self.costs.train([lengths[id] for id in groups[prompt]], gpus)
            streamed.add(prompt)
        late = max(clock - end, 0.0) * gpus / self.config.cluster.gpus if streamed else 0.0
        rest = [lengths[id] for prompt in streamed for id in groups[prompt]]
        return streamed, late + (1 - share) * self.costs.train(rest, self.config.cluster.gpus)


class EndlessSimulation(Simulation):
    """A run whose rollout never ends (`overlap.depth` > 0): GPUs of their own train beside it, or all GPUs in turns.

    Rewards take no time: responses that are graded while others decode hold up nobody.
    """

    training = 0.0  # seconds in which the trainers trained

    @cached_property
    def stats(self) -> list[FlowStats]:
        return []

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.config.overlap, self.policy.config, self.cursor.take, self.config.cluster.steps)

    @cached_property
    def rollout(self) -> SimulatedRound:
        return SimulatedRound(self, self.flow.plan, 0)

    @property
    def in_turns(self) -> bool:
        return not self.config.overlap.train_ranks

    def step(self, step: int) -> None:
        """Wait for a batch, train it, take the new weights into the rollout."""
        rollout, flow, start = self.rollout, self.flow, self.rollout.seconds
        self._fill(step)
        ready, ids, stats = rollout.seconds, flow.accepted_ids(), flow.advance(rollout.aborted)
        rollout.aborted = {}
        lengths = [rollout.lengths[id] for id in ids]
        train = self._train_seconds([n + len(rollout.prompts[id.visit].token_ids) for id, n in zip(ids, lengths)])
        self._decode_on(step + 1, ready + train)
        rollout.wait(ready + train)
        trained = rollout.seconds
        self._take_weights()
        seconds = {"rollout" if self.in_turns else "wait": ready - start, "train": trained - ready}
        seconds["sync"] = rollout.seconds - trained
        self.events = sum(replica.events + rollout.turns for replica in rollout.replicas)
        self.trained.append(ids)
        self.stats.append(stats)
        told = asdict(stats)
        told |= {key: mean(found) if (found := told[key]) else None for key in ("late_length", "dropped_length")}
        self.records.append(
            {
                "step": len(self.trained),
                "seconds": {"step": sum(seconds.values()), **seconds},
                "samples": len(ids),
                "tokens": sum(lengths),
                "lag": mean(age for age, groups in stats.ages.items() for _ in range(groups)),
                "overlap": told,
            }
        )

    def _fill(self, step: int) -> None:
        """Launch prompts and decode until a batch is there, unless it is."""
        self.rollout.step = step  # responses to prompts that are launched again are drawn anew
        self.flow.fill(self.rollout.carry_out, self._decode)

    def _decode_on(self, step: int, ready: float) -> None:
        """Decode while other GPUs train, as `Endless.decode_on` does. `ready`: when the update is."""
        rollout, config = self.rollout, self.config.overlap
        by_steps, end = config.clock == "steps", rollout.iteration + config.update_iterations
        if config.lag:
            self._fill(step)
        if self.in_turns or (config.lag and by_steps):
            return
        while rollout.placement.num_live and (rollout.iteration < end if by_steps else rollout.seconds < ready):
            self._decode(0.0 if by_steps else ready)  # counted steps: a window at a time

    def _decode(self, until: float = math.inf) -> None:
        finished = self.rollout.decode(until=until)
        self.rollout.carry_out(self.flow.observe(finished), finished)

    def _train_seconds(self, lengths: list[int]) -> float:
        e, gpus = self.model.efficiency, self.config.overlap.train_ranks or self.config.cluster.gpus
        seconds = self.costs.train(lengths, gpus) + e.train_seconds
        self.training += seconds
        return seconds + (e.rollout_seconds if self.in_turns else 0.0)  # engines go to sleep

    def _take_weights(self) -> None:
        """Pause, and compute the contexts of what is under way again if `overlap.flight` says so."""
        self.rollout.wait(self.rollout.seconds + self.costs.weight_sync())
        for replica in self.rollout.replicas:
            if self.config.overlap.flight == "recompute":
                replica.evict()
            else:
                replica.change_weights()

    def split_times(self) -> SplitTimes:
        """Return the means over the run by which GPUs train or decode, as a real run measures them."""
        lengths = [[self.rollout.sampled[id] for id in batch] for batch in self.trained]
        replicas, gpus = self.rollout.replicas, self.config.overlap.train_ranks or self.config.cluster.gpus
        decoded = sum(r.decoded for r in replicas)
        work = Work(
            batches=len(lengths),
            samples=sum(map(len, lengths)),
            tokens=decoded,
            longest=sum(map(max, lengths)),
            decoded=decoded,
            decode_seconds=sum(r.busy for r in replicas) * self.costs.tp,
            train_seconds=self.training * gpus,
            engine_steps=max(r.iteration for r in replicas),
            engine_seconds=max(r.busy for r in replicas),
        )
        return SplitTimes.of([work], self.config.cluster.gpus, self.config.overlap.spread)

    def summary(self) -> dict[str, float]:
        """Return the numbers of the whole run."""
        rollout, replicas = self.rollout, self.rollout.replicas
        decoding = len(replicas) * rollout.seconds
        tokens, samples = (sum(r[key] for r in self.records) for key in ("tokens", "samples"))
        late, launched = [n for stats in self.stats for n in stats.late_length], mean(rollout.drawn)
        lost = len(rollout.drawn) - samples  # stopped, of dropped groups or surplus; here their whole length is known
        return {
            "lag_mean": mean(r["lag"] for r in self.records),
            "lag_max": max(age for stats in self.stats for age in stats.ages),
            "trained_length": tokens / samples / launched,  # of a response, relative to those that were launched
            **({"late_length": mean(late) / launched} if late else {}),
            **({"lost_length": (sum(rollout.drawn) - tokens) / lost / launched} if lost else {}),
            "late": sum(stats.late for stats in self.stats),
            "dropped": sum(stats.dropped for stats in self.stats),
            "decoders_idle": 1 - sum(r.busy for r in replicas) / decoding,
            "trainers_idle": 1 - self.training / rollout.seconds,
            "best_share": self.split_times().best_share,
            "recomputed": sum(r.recomputed for r in replicas) / sum(r.decoded for r in replicas),
        }


def reward_times(
    rollout: SimulatedRound, accepted: Sequence[SampleId], config: GradingConfig, timeouts: AdaptiveTimeouts, seed: int
) -> dict[SampleId, float]:
    """Return the time of each response's reward, in seconds since the rollout began.

    Graders take responses in the order in which they end. Gradings that the round does not need end with the round.
    """
    wanted, end = set(accepted), rollout.seconds
    free = {"code": [0.0] * config.sandboxes, "judge": [0.0] * config.judges, "rule": [0.0] * config.sandboxes}
    done: dict[SampleId, float] = {}
    running: list[tuple] = []  # programs, by when they end
    for id in sorted(rollout.ended, key=lambda id: (rollout.ended[id], id)):
        prompt = rollout.prompts[id.visit]
        task = prompt.task if prompt.task in free else "rule"
        begin = max(free[task][0], rollout.ended[id] if config.overlap else end)
        if id not in wanted and begin >= end:
            continue
        seconds = config.judge_seconds if task == "judge" else config.rule_seconds
        if task == "code":
            while running and running[0][0] <= begin:  # limits are learned only from programs that have ended
                timeouts.observe(*heappop(running)[2:])
            seconds, *learned = run_program(prompt, id, rollout.run.reward(id) > 0, config, timeouts, seed)
            heappush(running, (begin + seconds, id, *learned))
        done[id] = begin + seconds
        heapreplace(free[task], done[id])
    while running:
        timeouts.observe(*heappop(running)[2:])
    return done


def run_program(
    prompt: Prompt, id: SampleId, solves: bool, config: GradingConfig, timeouts: AdaptiveTimeouts, seed: int
) -> tuple[float, CasePlan, list[tuple[float, bool, bool]], bool]:
    """Return the seconds of a program, and the arguments of `AdaptiveTimeouts.observe`.

    All programs of a prompt take the same time, or none of them ends. Its test cases count as one.
    """
    plan = timeouts.plan(str(prompt.index), 1, id)
    nature = Random(f"code {seed} {prompt.index}")
    hangs = nature.random() < config.hanging
    needed = math.inf if hangs else config.code_seconds * math.exp(config.code_spread * nature.gauss())
    seconds = min(needed, plan.allowed[0])
    passed = solves and needed <= seconds
    return seconds, plan, [(seconds, passed, needed > seconds)], passed


def load_model_file(name: str) -> ModelFile:
    return load_config(ModelFile, str(CONFIGS / f"{name}.toml"), [])


def load_hardware(name: str) -> Hardware:
    return load_config(Hardware, str(CONFIGS / f"{name}.toml"), [])


def simulate(
    config: SimulationConfig,
    model: ModelFile | None = None,
    workload: Lengths | None = None,
    profile: Profile | None = None,
) -> Simulation:
    """Run a whole simulation and return it, with its records."""
    model = model or load_model_file(config.cluster.model)
    kind = EndlessSimulation if config.overlap.depth else Simulation
    run = kind(config, model, load_hardware(config.cluster.hardware), workload, profile)
    run.run()
    return run


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "every key and its default:\n" + describe(SimulationConfig())
    sections = ", ".join(each.name for each in fields(SimulationConfig))
    parser.add_argument("--config", help=f"TOML file with sections {sections}")
    parser.add_argument("--replay", help="run folder whose recorded lengths are used")
    parser.add_argument("--profile", help="rollout_profile.json of profiler.py: measured decode and prefill times")
    flags, overrides = parser.parse_known_args(argv)
    try:
        recorded = Recorded(flags.replay) if flags.replay else None
        profile = read_profile(Path(flags.profile)) if flags.profile else None
        given = {override.partition("=")[0] for override in overrides}
        given |= {f"--{key}" for key in keys_in(flags.config)}
        settings = [s for s in (recorded.settings if recorded else ()) if s.partition("=")[0] not in given]
        config = load_config(SimulationConfig, flags.config, settings + overrides)
        run = simulate(config, workload=recorded, profile=profile)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for record in run.records:
        print(json.dumps(record))
    last = {"mean_step_seconds": mean(r["seconds"]["step"] for r in run.records), "events": run.events}
    if isinstance(run, EndlessSimulation):
        last |= run.summary()
    if not profile:  # a profile has measured pages
        size = config.cluster.tensor_parallel
        last |= {"weights": config.cluster.weights, "pages": {n: run.num_pages(size, n) for n in LAYOUTS}}
    print(json.dumps(last))
    return 0


if __name__ == "__main__":
    command.run(main)
