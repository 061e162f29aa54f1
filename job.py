"""A job: all state of one run and the parts of its steps, which `train.py` calls in the order of the paper."""

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

import checkpoint
import parallel
from buffer import SampleBuffer
from config import Auto, ConfigError, flatten
from core import Group, Prompt, RoundPlan, Tokenizer, Visit, VisitId
from data import checksum, dump_groups, load_groups, load_prompts, open_cursor, write_transcripts
from envs.episodes import Episodes
from learning import group_advantages, learn, put_groups, told_advantages, visits_of
from metrics import Clock, Record, Recorder, peak_memory
from model import Model, ModelShape, empty_model
from overlap.ahead import Ahead
from overlap.drafting import Drafting
from overlap.endless import Endless
from overlap.phases import Phases
from overlap.pools import make_pools
from overlap.streamed import StreamedRound, StreamTraining
from overlap.tail import PartialRound, part_of
from parallel import World
from policies.flow import Flow, check_steps
from policies.planner import Choice, EngineLimits, Launch, ParallelismPlanner, Report
from policies.split import SplitPolicy
from records import (
    RankReport,
    audit_report,
    evaluation_record,
    generate_seconds,
    lag_record,
    planner_record,
    preemptions,
    work_of,
)
from rewards.gradings import PoolStats
from rewards.judge import open_graders
from rewards.teacher import Teacher
from rollout import Engine
from rounds import Referee, Round
from scheduler import POLICIES, Race, RoundPolicy, races
from settings import (
    MODELS,
    Config,
    box_of_programs,
    model_dtype,
    possible_splits,
    rollout_profile,
    rollout_sizes,
    sizes_with_room,
    trains,
    with_kv_memory,
    with_layout,
    with_split,
)
from trainer import Trainer
from warm_start import ensure_model
from weights.lora import LoraConfig

EVENT_BYTES = 2**18  # of a rank: what ends in a window takes less
EVAL_EPOCH = -1  # held-out samples have names, and so random streams, of their own


@dataclass(frozen=True)
class Rollout:
    """The groups that a step learns from, the same on every rank, and the record of the round that made them."""

    groups: list[Group]
    buffer: SampleBuffer  # takes them in; it knows what was trained while the rollout went on
    lengths: tuple[int, ...] = ()  # tokens of all launched responses, those of aborted ones too
    record: dict[str, dict] = field(default_factory=dict)  # its sections; none when the groups were replayed


class Job:
    """All state of one run: model, engine, trainer, graders, policies, cursor over the prompts, records.

    Every rank has one and makes the same calls in the same order.
    """

    def __init__(
        self, config: Config, world: World, resume: bool, clock: Clock | None = None, phases: Phases | None = None
    ):
        """Make or load the model and put the rooms together; with `resume`, as the newest checkpoint has them.

        `phases`: of the group that the job is in. Collective. Raises ConfigError on a damaged checkpoint and on
        settings that do not go on from it.
        """
        self.folder, self.step = Path(config.run.dir), 0
        saved = newest_checkpoint(self.folder, world) if resume else None
        state = checkpoint.load_state(saved) if saved else {}
        config, self.split = open_split(config, world.size, state)
        train_ranks = config.overlap.train_ranks
        self.config, self.world, self.clock = config, world, clock or Clock()
        self.choice: Choice | None = None  # of the newest round
        self.is_released = False
        self.pools = make_pools(world, train_ranks, self.clock) if train_ranks else None
        own = self.pools.own if self.pools else world
        self.round_world = parallel.with_shared_memory(own, EVENT_BYTES, naps=True)
        self.trains, self.decodes = (self.pools.trains, not self.pools.trains) if self.pools else (trains(config), True)
        self.source = Path(config.model.path)  # whose config and tokenizer checkpoints carry on
        if not config.model.path:
            self.source = ensure_model(config.warm_start, config.data.train, MODELS, world)
        self.tokenizer = checkpoint.load_tokenizer(self.source)
        dtype = model_dtype(config, world.device.type)
        shape, base = checkpoint.check_model(self.source)
        self.base = checkpoint.fingerprint(base) if config.trainer.lora.rank or config.loss.kl_coef else 0
        laid_out = with_layout(config, shape, world.size, world.node_size, world.device)
        laid_out = parallel.broadcast_object(world, laid_out)  # all as rank 0
        weights = saved or self.source, self.source, shape, dtype, laid_out.rollout.layout == "whole"
        self.trainer = build_trainer(config, *weights, own, self.trains)
        prompts, self.held_out = load_data(config, self.tokenizer, self.source, world)
        ends = checkpoint.eos_ids(self.source, self.tokenizer, shape.vocab_size)
        built = build_rollout(laid_out, self.trainer.model, ends, self.tokenizer, world)
        self.tp_groups, self.engine, self.planner = built
        self.drafting = Drafting(config.drafts, self.engine, world, config.scheduler)
        self.ahead = Ahead(self.drafting, world, partial(next_plan, self)) if config.drafts.ahead else None
        streams, parts = config.stream.policy != "off", (self.engine, self.trainer, world, self.tp_groups)
        self.streaming = StreamTraining(config.stream, config.reward, *parts) if streams and world.size > 1 else None
        self.cursor = open_cursor(config.data, prompts, config.run.seed)
        self.policy = POLICIES[config.scheduler.policy](config.scheduler, config.run.seed)
        keep, sharing = config.run.keep_checkpoints, (config.trainer.shard, train_ranks, config.run.keep_best)
        self.checkpoints = checkpoint.Checkpoints(self.folder, self.source, keep, world, *sharing)
        if saved:
            restore(self, saved, state)
        # The first rank of a replica has its samples graded: any rank, when the size changes.
        grades = self.engine.parallel.rank == 0 or config.planner.rule != "fixed"
        tasks = {p.task for p in (*prompts, *self.held_out)} if grades and self.decodes else set()
        self.graders = open_graders(config.reward, config.judge, tasks, world.device, dtype)
        if saved:
            self.graders.timeouts.load_state_dict(state["timeouts"])
        played = (*prompts, *self.held_out) if self.decodes else ()
        chat, log = config.data.chat_for(self.tokenizer), self.folder / "prints.log"
        self.episodes = Episodes(config.env, config.reward, played, self.tokenizer, config.run.seed, chat, log)
        settings = {key: value for key, (value, _) in flatten(config).items()}
        self.recorder = Recorder(self.folder, config.log, settings, self.step, config.run.steps, world.is_main)
        self.endless = open_endless(self, state) if config.overlap.depth and self.decodes else None
        self.phases = phases or Phases(config.group, world, self.folder, train_ranks, self.clock)
        self.phases.join(self, own)
        introduce(self, saved, resume)

    # ---- a step --------------------------------------------------------------------------------------------------

    def plan(self) -> RoundPlan:
        """Let the policy plan the next round. No collective: all plan the same."""
        return self.policy.begin(self.cursor.take, self.config.run.steps - self.step)

    def part_of(self, plan: RoundPlan | None) -> int:
        """Return the ranks that can begin a round without the others (overlap/tail.py); 0: all begin together."""
        return part_of(plan, self.config.scheduler, self.engine.parallel.size)

    def regroup(self, plan: RoundPlan) -> None:
        """Let the planner choose the round's tensor-parallel size, and take it. No collective: all choose the same."""
        self.choice = self.planner.choose(plan.kind, Launch.of(plan))
        with self.clock.span("regroup"):
            self.engine.regroup(self.tp_groups[self.choice.size])

    def roll_out(self, plan: RoundPlan) -> Rollout:
        """Generate and grade what the policy planned, until it says that the round is done. Collective."""
        buffer = SampleBuffer(plan.keep_prompts)
        streamed = self.streaming.begin(plan, buffer) if self.streaming else None
        groups, played = self.play(plan, self.policy, self.clock, streamed)
        lengths, accepted = self.policy.race.tokens | played.aborted, self.policy.accepted_ids()
        seen = self.cursor.observe(_visits(self.config, groups) | dict.fromkeys(self.policy.race.zero_variance, False))
        record = asdict(self.policy.close(played.aborted)) | played.record | seen
        if plan.audit:
            record["audited"] = audit_report(accepted, played.audited, self.config.loss)
        if streamed:
            record["stream"] = streamed.record
        assert self.choice, "`regroup` comes first"
        sections = {"round": record, "planner": planner_record(plan.kind, self.choice)}
        return Rollout(groups, buffer, tuple(lengths.values()), sections)

    def play(
        self, plan: RoundPlan, referee: Referee, clock: Clock, streamed: StreamedRound | None = None
    ) -> tuple[list[Group], Round]:
        """Play one round; return its accepted groups, on every rank the same, and the finished round. Collective."""
        if not self.phases.part:  # else its permit may come later
            self._refuse_if_released()
        with clock.span("regroup"):
            self.engine.regroup(self.engine.parallel)  # new weights, on all: a rank without work makes no step
        played = self.make_round(clock)
        with clock.span("rollout"), self.drafting(played, plan):
            play_round(self, played, plan, referee, streamed)
        with clock.span("exchange"):
            return played.collect(), played

    def make_round(self, clock: Clock) -> Round:
        c = self.config
        settings = c.scheduler, c.run.seed, c.reward.overlong_buffer, self.recorder.progress
        sizes = (self.planner, self.tp_groups) if c.planner.within_round else None
        return Round(self.engine, self.graders, self.round_world, clock, *settings, sizes, self.episodes)

    def next_batch(self) -> Rollout:
        """Go on with the endless rollout until a batch is there; its groups may be several updates old.

        Collective among the ranks that decode.
        """
        self._refuse_if_released()
        assert self.endless
        with self.clock.span("rollout"):
            groups, record = self.endless.next_batch()
        record |= {"lag": lag_record(groups, self.step)} | self.cursor.observe(_visits(self.config, groups))
        return Rollout(groups, SampleBuffer(len(groups)), record={"round": record})

    def hand_over(self, rollout: Rollout | None) -> Rollout:
        """Return the rollout; ranks that only train wait for that of the others. Collective."""
        if not self.pools:
            assert rollout
            return rollout
        groups, told = (rollout.groups, (rollout.lengths, rollout.record)) if rollout else ([], ((), {}))
        with self.clock.span("wait_batch"):
            groups, told = self.pools.hand_over(f"batch {self.step}", groups, told, readers=self.pools.num_trainers)
        return Rollout(groups, SampleBuffer(len(groups)), *told)

    def replay(self) -> Rollout:
        """Return the groups that the run of `run.replay` trained in this step."""
        folder, shape = Path(self.config.run.replay), self.trainer.model.shape
        with self.clock.span("rollout"):
            groups = load_groups(folder, self.step + 1, shape)
            return Rollout(groups, SampleBuffer(len(groups)))

    def learn(self, rollout: Rollout) -> tuple[torch.Tensor, list[dict]]:
        """Update the weights; return the advantages [P, R] and the statistics of each update. Collective.

        Ranks that only decode wait, or go on with an endless rollout; they have the new weights afterwards.
        """
        c, updates, event = self.config, list[dict](), f"update {self.step}"
        advantages = group_advantages(rollout.groups, c.loss, c.reward, c.rollout.max_response_tokens)
        if self.trains:
            self._refuse_if_released()
            if self.endless and self.graders.judge:  # else its queue was drained
                self.graders.judge.give_back()
            with self.clock.span("train"):
                put_groups(rollout.buffer, rollout.groups, advantages, c.loss, c.reward, c.rollout.max_response_tokens)
                updates = learn(self.trainer, rollout.buffer, self.clock.move)
        if self.pools:
            if self.endless:
                with self.clock.span("rollout"):
                    self.endless.decode_on(self.pools.watch(event))
            with self.clock.span("wait_update"):
                self.pools.signal(event) if self.trains else self.pools.wait_for(event)
            with self.clock.span("publish"):
                updates = self.pools.publish(self.trainer.model, updates)
            rollout.record["sync"] = self.pools.synced
        return advantages, updates

    def sync_weights(self) -> None:
        """End the step: the engine decodes with the new weights from now on."""
        with self.clock.span("sync"):
            self.step += 1
            taker = self.endless.take_weights if self.endless else self.engine.load_weights
            taker(self.trainer.model, self.step)

    # ---- after a step --------------------------------------------------------------------------------------------

    def take_reports(self) -> list[RankReport]:
        """Return what each rank has counted since the last call, and count from zero. Collective.

        From then on every rank limits programs by what those of all ranks took.
        """
        pool, judge = self.graders.take_stats()
        own = RankReport(
            engine=self.engine.stats.take(),
            tensor_parallel=self.engine.parallel.size,
            num_pages=self.engine.pages.size,
            seconds=self.clock.take(),
            track=self.clock.take_track(),
            memory=peak_memory(),
            pool=pool,
            judge=judge,
            episodes=self.episodes.take_stats(),
            drafts=self.drafting.policy.take_stats(),
        )
        reports = parallel.gather_objects(self.world, own)
        share_timeouts(self, (report.pool for report in reports))
        return reports

    def observe(self, plan: RoundPlan | None, rollout: Rollout, reports: Sequence[RankReport]) -> None:
        """Report a round to the planner, and a step of an endless rollout to the policy of its split."""
        if self.config.overlap.depth:
            times = self.split.observe(work_of(rollout.groups, rollout.record["round"]["wasted_tokens"], reports))
            rollout.record["split"] = asdict(times) | {"best_share": times.best_share}
            if self.pools and self.step in (self.split.decides, self.config.run.steps):
                rollout.record["split"]["advice"] = self.split.review(self.step)
        if not plan:
            return
        resized = len(rollout.record["round"]["resized"])
        seconds = max(r.seconds.get("resize", 0.0) for r in reports) / resized if resized else None
        report = Report(preemptions(reports), generate_seconds(reports), rollout.lengths, seconds)
        self.planner.observe(plan.kind, report)

    def dump(self, groups: Sequence[Group], advantages: torch.Tensor) -> None:
        """Write what the step was trained on, when `run.dump_rollouts` asks for it. Collective."""
        if self.config.run.dump_rollouts:
            c, groups = self.config, bring_to_main(self.world, groups)
            if self.world.is_main:
                told = told_advantages(groups, advantages, c.loss, c.reward, c.rollout.max_response_tokens)
                dump_groups(self.folder / "rollouts", self.step, groups, told)

    # ---- between steps -------------------------------------------------------------------------------------------

    def evaluate(self, transcripts: int = 16) -> Record:
        """Score the held-out prompts; return the record, empty when there are none. Collective."""
        k = self.config.run.eval_samples
        if not self.held_out:
            return {}
        start = time.perf_counter()
        if self.endless:
            self.endless.lend_engine()
        groups, own = list[Group](), self.episodes.take_stats()
        prompts = tuple(Visit(EVAL_EPOCH, prompt) for prompt in self.held_out)
        plan = RoundPlan("long", prompts, k, keep_prompts=len(prompts), keep_responses=k)
        with self.phases("rollout", self.part_of(plan), "evaluate"):
            if self.decodes:
                groups, _ = self.play(plan, Race(plan), Clock(parent=self.clock))
        self.engine.stats.take()  # the next step counts from zero
        self.episodes.stats = own
        if self.pools:
            groups, _ = self.pools.hand_over(f"evaluation {self.step}", groups, None, readers=1)
        else:
            groups = bring_to_main(self.world, groups)
        share_timeouts(self, (pool for pool, _ in parallel.gather_objects(self.world, self.graders.take_stats())))
        if self.world.is_main:
            path = self.folder / "samples" / f"step_{self.step:06d}.txt"
            write_transcripts(path, groups, self.tokenizer, transcripts)
        return self.checkpoints.rated(self.step, evaluation_record(groups, time.perf_counter() - start))

    def save(self, waits: bool = False) -> None:
        """Begin to write a checkpoint of this moment, as soon as the one before it is whole. Collective.

        `waits`: until this one is whole too. Sampling is counter-based, so there is no random state in it. Raises
        OSError when a checkpoint could not be written.
        """
        with self.phases("train", name="checkpoint"), self.trainer.saved_tensors() as tensors:
            if self.trains:
                self._refuse_if_released()
            self.checkpoints.save(self.step, self.trainer.model, tensors, state_of(self), self.trainer.adapters)
        if waits:
            self.checkpoints.wait()

    # ---- sharing a device ----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let another job have the device: between two steps, or between a step's rollout and its update.

        Weights, gradient sums and optimizer state wait in host memory; KV memory, CUDA graphs and copies of weights are
        given up and made again. The trajectory is the same as without, but with `overlap.flight = keep`: KV of old
        weights goes, too. What stays on the device: the state of decoding rows, tables of positions, a judge and a
        teacher. No collective. Until `take_back`, work there raises RuntimeError.
        """
        self._refuse_if_released()
        if self.endless:
            self.endless.interrupt()
        if self.decodes:
            self.engine.release()
        self.trainer.release()
        self.is_released = True
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes can have it too

    def take_back(self) -> None:
        """Have all on the device again, as it was before `release`. Collective where weights are sharded."""
        if not self.is_released:
            raise RuntimeError("this job has the device; call its release() first")
        self.trainer.take_back()
        if self.decodes:
            self.engine.take_back()
        self.is_released = False

    def _refuse_if_released(self) -> None:
        if self.is_released:
            raise RuntimeError("this job has released the device; call its take_back() first")


@contextmanager
def open_job(config: Config, world: World, resume: bool, clock: Clock | None = None) -> Iterator[Job]:
    """Give the job of a run, and end its worker processes afterwards. Collective. Raises what `Job` raises."""
    clock = clock or Clock(config.log.trace)
    phases = Phases(config.group, world, Path(config.run.dir), config.overlap.train_ranks, clock)
    with clock.span("start"), phases("start"):
        job = Job(config, world, resume, clock, phases)
    gc.collect()  # what the start has left, perhaps with tensors: it would stay until the end
    gc.freeze()  # else full collections look at every module, while all ranks wait for this one
    try:
        with phases, job.graders, job.episodes, job.checkpoints:
            yield job
        job.engine.drop_shards()  # the caller may keep the job, and NCCL waits for graphs with collectives in them
    finally:
        gc.unfreeze()


def share_timeouts(job: Job, pools: Iterable[PoolStats]) -> None:
    """Let this rank know how long programs took on all."""
    for pool in pools:
        job.graders.timeouts.merge(pool.anchors)


def load_data(config: Config, tokenizer: Tokenizer, source: Path, world: World) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train and those held out. Collective.

    Raises ConfigError if another machine has other prompts, or other weights in `source`.
    """
    prompts, held_out = load_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens)
    if world.spans_machines:
        _, weights = checkpoint.check_model(source)
        seen = {f"the model folder {str(source)!r}": checkpoint.fingerprint(weights)}
        seen["the data (data.train, data.mix, data.eval)"] = checksum((*prompts, *held_out))
        parallel.check_alike(world, seen)
    return prompts, held_out


def newest_checkpoint(folder: Path, world: World) -> Path | None:
    """Return the newest checkpoint of a run folder, if there is any. Collective.

    Raises ConfigError when it is damaged.
    """
    checkpoints = checkpoint.list_checkpoints(folder)
    if world.spans_machines:
        found = checkpoints[-1].name if checkpoints else "none"
        parallel.check_alike(world, {f"the newest checkpoint of run.dir = {str(folder)!r}": found})
    if not checkpoints:
        return None
    wrong = parallel.gather_objects(world, checkpoint.damage(checkpoints[-1], world.rank, world.size))
    if any(wrong):
        raise ConfigError(max(wrong))
    return checkpoints[-1]


def introduce(job: Job, saved: Path | None, resume: bool) -> None:
    """Say what a reader of the console should know before the first step."""
    say = job.recorder.say
    if job.graders.judge:
        say(job.graders.judge.about)
    if job.trainer.teacher:
        say(job.trainer.teacher.about)
    if resume:
        say(f"resumed from {saved}" if saved else f"no checkpoint in {job.folder}: starts afresh")
    if job.split.is_auto and job.step < job.split.decides:
        first = f"{job.split.now} of {job.world.size} ranks train until step {job.split.decides}"
        say(f"overlap.train_ranks = auto: {first}")
    every = (*job.cursor.prompts, *job.held_out)
    if box := box_of_programs(any(p.task == "code" for p in every), {p.env for p in every if p.env}):
        say(f"sandbox: {box}")


def state_of(job: Job) -> Record:
    """Return what `restore` needs beside the tensors, as plain values. Collective."""
    state: Record = {
        "step": job.step,
        "trainer": job.trainer.state_dict(),
        "cursor": job.cursor.state_dict(),
        "policy": job.policy.state_dict(),
        "planner": job.planner.state_dict(),
        "timeouts": job.graders.timeouts.state_dict(),
        "split": job.split.state_dict(),
        "base": job.base,
        "best": job.checkpoints.best,
        "teacher": job.trainer.teacher.fingerprint if job.trainer.teacher else 0,
    }
    if job.streaming:
        state["streaming"] = job.streaming.state_dict()
    if job.config.drafts.sources:
        state["drafts"] = job.drafting.state_dict()
    if job.endless:
        state["endless"] = job.endless.state_dict()
    if job.pools:  # ranks that only train have no part in these
        state |= job.pools.of_decoders({key: state[key] for key in ("cursor", "policy", "endless") if key in state})
    return state


def restore(job: Job, saved: Path, state: Record) -> None:
    """Take over the state of a checkpoint. The model has its weights already. Collective.

    Raises ConfigError when model.path no longer has the weights beneath the adapters, or of the reference model, and
    when the teacher has others.
    """
    if state.get("base", job.base) != job.base:
        raise ConfigError(
            f"--resume: model.path = {str(job.source)!r} has other weights than when {job.folder} was started, and "
            "trainer.lora or loss.kl_coef goes on from those; put them back, or start another run in a new run.dir"
        )
    if (teacher := job.trainer.teacher) and state.get("teacher", teacher.fingerprint) != teacher.fingerprint:
        raise ConfigError(
            f"--resume: distill.teacher = {teacher.config.teacher!r} has other weights than when {job.folder} was "
            "started; put them back, or start another run in a new run.dir"
        )
    job.step = state["step"]
    fill = partial(checkpoint.load_tensors, saved, world=job.trainer.world)
    job.trainer.load_state_dict(state["trainer"], fill if job.trains else lambda _: None)
    job.cursor.load_state_dict(state["cursor"])
    job.planner.load_state_dict(state["planner"])
    job.checkpoints.best = state.get("best", {})
    if job.streaming and "streaming" in state:
        job.streaming.load_state_dict(state["streaming"])
    if "drafts" in state:
        job.drafting.load_state_dict(state["drafts"])
    job.policy.load_state_dict(state["policy"], job.cursor.prompts)
    check_queue(job.policy, state, job.config.run.steps)
    job.engine.load_weights(job.trainer.model, job.step)


def open_split(config: Config, num_ranks: int, state: dict) -> tuple[Config, SplitPolicy]:
    """Return the settings with the number of ranks that train, and the policy that measures it.

    A number that was chosen on as many ranks, if it is possible still, goes on; else a choice begins anew.
    """
    before, is_auto = state.get("split", {}), isinstance(config.overlap.train_ranks, Auto)
    chosen = before["train_ranks"] if before.get("ranks") == num_ranks else 0
    config = with_split(config, num_ranks, chosen)
    start = before.get("start", 0) if config.overlap.train_ranks == chosen else state.get("step", 0)
    possible = possible_splits(config, num_ranks)
    return config, SplitPolicy(num_ranks, config.overlap.spread, possible, config.overlap.train_ranks, is_auto, start)


def open_endless(job: Job, state: dict) -> Endless:
    """Begin the endless rollout, or go on with the one of a checkpoint's state."""
    flow = Flow(job.config.overlap, job.policy.config, job.cursor.take, job.config.run.steps)
    endless = Endless(job.make_round(job.clock), flow, job.drafting)
    if state:
        endless.load_state_dict(state["endless"], job.cursor.prompts)
    return endless


def play_round(job: Job, played: Round, plan: RoundPlan, referee: Referee, streamed: StreamedRound | None) -> None:
    """Play a round in the way that the settings ask for. Collective."""
    if streamed:
        streamed.play(played, referee)
    elif job.phases.part:
        PartialRound(played, job.phases).play(plan, referee)
    elif job.ahead and referee is job.policy and not races(job.config.scheduler, plan.kind):
        job.ahead.play(played, plan, referee)
    else:
        played.play(plan, referee)


def next_plan(job: Job) -> RoundPlan | None:
    """Return the plan of the round after the open one, which keeps all that it launches, if nothing races in it."""
    steps_left = job.config.run.steps - job.step - 1
    plan = job.policy.peek(copy(job.cursor).take, steps_left) if steps_left else None
    return plan if plan and not races(job.config.scheduler, plan.kind) else None


def check_queue(policy: RoundPolicy, state: dict, steps: int) -> None:
    """Raise ConfigError when a run of so many steps cannot train the prompts that wait in the state it resumes with."""
    size, step = policy.config.num_prompts, state["step"]
    if steps < step:
        raise ConfigError(f"run.steps = {steps}, but the newest checkpoint is of step {step}; take at least {step}")
    if "endless" in state:  # looked at on all ranks: those that only train have no copy of that policy
        check_steps(state["endless"]["flow"], size, steps)
    waiting, places = len(policy.queue), (steps - step) * size
    if policy.trains_all and waiting > places:
        raise ConfigError(
            f"run.steps = {steps} leaves {waiting - places} prompts of the long-prompt queue untrained; take at least "
            f"{step + -(-waiting // size)}"
        )


def build_trainer(
    c: Config,
    newest: Path,
    source: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    keeps_model: bool,
    world: World,
    trains: bool,
) -> Trainer:
    """Return the trainer, with the weights of `newest`; a rank that only decodes trains none of them. Collective."""
    reference, teacher, config = None, None, c.trainer
    if trains and config.lora.rank:
        newest = source  # a checkpoint's weights have its adapters merged into them
    model = checkpoint.load_model(newest, world.device, dtype) if keeps_model else empty_model(shape, dtype)
    if not trains:
        model.requires_grad_(False)
        config = replace(config, shard=1, lora=LoraConfig())
    elif c.loss.kl_coef:
        reference = checkpoint.load_model(source, world.device, dtype).requires_grad_(False)
    if trains and c.distill.teacher:
        teacher = Teacher(c.distill, shape.vocab_size, c.sampling, world.device, dtype)
    limits = c.rollout.max_response_tokens, c.run.steps * c.trainer.updates_per_step
    loss = c.loss.for_dtype(model.dtype, c.trains_older)
    trainer = Trainer(model, config, loss, c.sampling, world, *limits, reference, keeps_model, teacher)
    if not keeps_model:
        checkpoint.fill(trainer.model, checkpoint.check_model(newest)[1])
        trainer.start_from_model()
    return trainer


def _visits(c: Config, groups: Sequence[Group]) -> dict[VisitId, bool]:
    """Return the visits of these groups, and whether they teach anything."""
    return visits_of(groups, c.loss, c.reward, c.rollout.max_response_tokens)


def bring_to_main(world: World, groups: Sequence[Group]) -> list[Group]:
    """Return groups with the tokens of all samples on rank 0, as they are on the others. Collective."""
    samples = [sample for group in groups for sample in group.samples]
    brought = parallel.bring_tokens(world, samples if world.is_main else (), samples)
    return parallel.with_samples(groups, brought or samples)


def build_rollout(
    config: Config, model: Model, ends: Iterable[int], tokenizer: Tokenizer, world: World
) -> tuple[parallel.TPGroups, Engine, ParallelismPlanner]:
    """Make the engine, all groups that it may ever decode in, and the planner that chooses among them."""
    sizes = rollout_sizes(config, model.shape, world.size, world.node_size, config.planner.rule != "fixed")
    # First: NCCL takes memory for each, and pages get the rest.
    tp_groups = parallel.make_tp_groups(world, sizes, config.overlap.train_ranks)
    config = with_kv_memory(config, model.shape, world)
    rollout, sizes = config.rollout, sizes_with_room(config, model.shape, world.device, sizes)
    # One rank reads it: on other machines there may be none, or another, and all must choose the same.
    profile = rollout_profile(config, model.shape, sizes, world.size, world.device) if world.is_main else None
    profile = parallel.broadcast_object(world, profile)
    own = rollout.tensor_parallel
    engine = Engine(model, rollout, config.sampling, ends, tokenizer, tp_groups[own], sizes)
    if world.rank < config.overlap.train_ranks:
        engine.release()  # for good
    elif engine.runner.graphs:
        for size in (*sizes, own):
            engine.regroup(tp_groups[size])  # captures its graphs, which no round has to wait for
        engine.stats.take()
    sizes_of = rollout.page_size, rollout.max_running, rollout.max_response_tokens
    limits = EngineLimits(world.size, engine.num_pages, *sizes_of, shares_prompts=engine.pages.shares)
    return {n: tp_groups[n] for n in sizes}, engine, ParallelismPlanner(config.planner, limits, own, profile)
