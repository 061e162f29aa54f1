"""One co-execution group, response by response: rollouts whose workers come and go, and tail migration. No torch.

The permits are those of the server (policies/group.py), rounds and engines those of simulate.py. A rollout begins on
the replicas whose GPUs are free, and goes on to the others when they are. At a share of its responses it keeps a few
replicas and gives back the rest, if others wait for these. (RollMux, arXiv 2512.11306, section 4.3)
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import fmean

from core import RoundPlan, SampleId
from policies.group import Part, Permits
from policies.placement import Placement, frees
from policies.scale_down import StreamConfig
from scheduler import RoundPolicy, SchedulerConfig
from simulate import ClusterConfig, SimulatedRound, Simulation, SimulationConfig, load_hardware, load_model_file
from simulation.costs import Costs, Efficiency

NODE = 8  # GPUs
APART = ("h20", "h800")  # for rollouts, and for training
TRAINING = ("train",)
STEPS = 64  # the most that a job may play
ENGINE = "qwen3-8b-base"  # whose file has the engine of this paper's group, fitted to figures of ROLL Flash
# An H20 has few operations for its memory, and reaches more of them: set by hand.
PREFILL = {"h20": 0.85, "h800": 0.5}
TRAIN = 0.27  # share of the peak that training reaches; fitted, as the prompts of a batch, to the paper's Figure 2


@dataclass(frozen=True)
class Kind:
    """A kind of job: its model and its batch. It trains on as many nodes as it has for its rollout."""

    model: str  # a file in configs/simulate: shape and lengths
    limit: int  # tokens of a response
    prompts: int = 192  # of a batch, with 8 responses each (fitted)
    nodes: int = 1
    tensor_parallel: int = 1
    ratio: float = 0.0  # rollout seconds over training seconds, alone; 0: training takes what the simulator says
    switch: tuple[float, float] = (0.9, 4.1)  # seconds of a warm start of rollout and training (the paper's, of 7B)
    sync: float = 0.9  # seconds until the rollout has new weights (the paper's, of 7B)

    def simulation(self, gpu: str, seed: int) -> Simulation:
        """Return a run on its rollout nodes, of which no step has been played."""
        file, engine = load_model_file(self.model), load_model_file(ENGINE).efficiency
        lengths = replace(file.lengths, limit=self.limit)
        efficiency = replace(engine, prefill=PREFILL[gpu], train=TRAIN, train_seconds=Efficiency.train_seconds)
        weights = "whole" if self.tensor_parallel == 1 else "sharded"
        cluster = ClusterConfig(
            gpus=NODE * self.nodes, tensor_parallel=self.tensor_parallel, weights=weights, steps=STEPS, seed=seed
        )
        scheduler = SchedulerConfig("synchronous", self.prompts, 8, migrate=True)
        config = SimulationConfig(cluster, scheduler, stream=StreamConfig("off"))
        return Simulation(config, replace(file, lengths=lengths, efficiency=efficiency), load_hardware(gpu))


def sync_seconds(kind: Kind, gpus: tuple[str, str]) -> float:
    """Seconds until a job's rollout has new weights: none where it is on the nodes that train."""
    return kind.sync if gpus[0] != gpus[1] else 0.0


class SharedRound(SimulatedRound):
    """A round whose replicas come and go."""

    def __init__(self, run: Simulation, plan: RoundPlan, step: int):
        super().__init__(run, plan, step)
        self.spare, self.replicas = self.replicas, []
        self.placement = Placement(0)

    def join(self, now: float) -> None:
        """Go on with one replica more. It takes over what others have too much of."""
        replica = self.spare.pop()
        clocks = (other.clock for other in self.replicas)
        replica.clock, replica.iteration = max(now, self.clock, *clocks), self.iteration
        self.placement.join(len(self.replicas))
        self.replicas.append(replica)

    def shrink(self, keep: int) -> None:
        """Go on with the first replicas only."""
        self.replicas, self.freed = self.replicas[:keep], self.replicas[keep:]
        self._move(self.placement.shrink(keep))

    def _move(self, moves: Sequence[tuple[SampleId, int, int]]) -> None:
        """Move responses with their keys and values, which takes no time inside a node."""
        super()._move(moves)
        moved = {id for id, _, _ in moves}
        for replica in self.replicas if moved else ():
            for response in replica.waiting:
                if response.id in moved and response.done:
                    response.sharers = []  # its prompt's pages are its own here
                    replica.park(response)

    def go_on(self, policy: RoundPolicy, until: float) -> bool:
        """Decode until something ends, at most about `until`; return whether the round is done."""
        if not self.prompts:
            self._launch(self.plan.prompts, self.plan.expected)
        self._move(self.placement.handovers())  # to replicas that have joined
        finished = self.decode(until=until)
        decision = policy.observe(finished)
        self.carry_out(decision, finished)
        return decision.done

    @property
    def share(self) -> float:
        """Of the responses that it wants, those that have ended."""
        return len(self.lengths) / (self.plan.keep_prompts * self.plan.keep_responses)


class Job:
    """A simulated run, cut into its phases."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        nodes: Sequence[int] = (0,),
        train_seconds: float = 0.0,
        gpus: tuple[str, str] = APART,
        depth: int = 0,
        seed: int = 0,
    ):
        """`nodes`: where its rollout runs. `train_seconds`: of a batch on its own nodes; 0: by its lengths.

        `gpus`: for the rollout and for training. `depth`: of trainings that its rollouts run ahead.
        """
        self.name, self.kind, self.train_seconds, self.depth = name, kind, train_seconds, depth
        tp = kind.tensor_parallel
        of_node = [range(first, first + tp) for first in range(0, kind.nodes * NODE // len(nodes), tp)]
        self.pool: list[Part] = [tuple((node, gpu) for gpu in gpus) for node in nodes for gpus in of_node]
        self.run = kind.simulation(gpus[0], seed)
        self.sync = sync_seconds(kind, gpus)
        self.costs = Costs(load_hardware(gpus[1]), self.run.model.shape, self.run.model.efficiency)
        self.round: SharedRound | None = None
        self.replicas: list[Part] = []  # of the round: the GPUs of each
        self.is_tail = self.is_done = False
        self.rolls = self.trains = False  # or waits to
        self.begun = 0  # rollouts that it has asked for
        self.batches: list[float] = []  # that wait for their training, in seconds of it
        self.rollouts: list[float] = []  # seconds from the first replica on, of each
        self.ends: list[float] = []  # of iterations

    def begin(self) -> None:
        plan = self.run.policy.begin(self.run.cursor.take, STEPS - self.begun)
        self.round, self.is_tail, self.is_done = SharedRound(self.run, plan, self.begun), False, False

    def end(self, nodes: int) -> None:
        """Close the round, whose batch will be trained on so many nodes."""
        assert self.round
        ids = self.run.policy.accepted_ids()
        lengths = [self.round.lengths[id] + len(self.round.prompts[id.visit].token_ids) for id in ids]
        self.run.policy.close(self.round.aborted)
        self.round, self.replicas, self.rolls = None, [], False
        own = self.train_seconds * self.kind.nodes / nodes
        seconds = own or self.costs.train(lengths, NODE * nodes) + self.run.model.efficiency.train_seconds
        self.batches.append(seconds)


@dataclass(frozen=True)
class Held:
    """Workers in the hands of a job."""

    workers: Part
    job: str
    start: float
    end: float


class Group:
    """Jobs on one set of nodes. Each iterates for ever: rollout, training, weight sync."""

    def __init__(self, jobs: Sequence[Job], train_nodes: int = 1, tail_share: float = 1.0, tail_replicas: int = 2):
        """`tail_share`: of its responses, at which a rollout goes on with `tail_replicas` of its replicas."""
        self.jobs, self.train_nodes, self.tail_share, self.tail_replicas = jobs, train_nodes, tail_share, tail_replicas
        self.permits, self.order = Permits(), itertools.count()
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.asked: dict[str, Job] = {}  # by the name of a phase
        self.since: dict[tuple[Job, Part], float] = {}  # of permits that are given
        self.held: list[Held] = []

    def play(self, iterations: int) -> list[float]:
        """Return each job's seconds an iteration: the mean over all but the first."""
        for job in self.jobs:
            self._go_on(job, 0.0)
        while min(len(job.ends) for job in self.jobs) < iterations:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
        return [(job.ends[-1] - job.ends[0]) / (len(job.ends) - 1) for job in self.jobs]

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time, next(self.order), happen))

    def _switch(self, job: Job, is_training: bool) -> float:
        return job.kind.switch[is_training] if len(self.jobs) > 1 else 0.0

    # ---- permits -----------------------------------------------------------------------------------------------

    def _go_on(self, job: Job, now: float) -> None:
        """Ask for the phases that a job may begin."""
        if not job.rolls and job.begun <= len(job.ends) + job.depth:
            job.rolls, job.begun = True, job.begun + 1
            self._ask(job, job.pool, "rollout", now)
        if not job.trains and job.batches:
            job.trains = True
            self._ask(job, [TRAINING], "train", now)

    def _ask(self, job: Job, parts: Iterable[Part], phase: str, now: float) -> None:
        self.asked[f"{job.name} {phase}"] = job
        self._begin(self.permits.request(f"{job.name} {phase}", parts), now)

    def _begin(self, granted: Iterable[tuple[str, Part]], now: float) -> None:
        for name, workers in granted:
            job = self.asked[name]
            self.since[job, workers] = now
            if workers == TRAINING:
                seconds = self._switch(job, True) + job.batches.pop(0) + job.sync
                self._at(now + seconds, partial(self._trained, job))
            else:
                self._at(now + self._switch(job, False), partial(self._join, job, workers))

    def _release(self, job: Job, parts: Iterable[Part], phase: str, now: float) -> None:
        given = [*parts]
        for workers in given:
            if (job, workers) in self.since:
                self.held.append(Held(workers, job.name, self.since.pop((job, workers)), now))
        self._begin(self.permits.release(f"{job.name} {phase}", {*itertools.chain(*given)}), now)

    # ---- phases ------------------------------------------------------------------------------------------------

    def _join(self, job: Job, workers: Part, now: float) -> None:
        if (job, workers) not in self.since:
            return  # the round has shrunk meanwhile
        if not job.round:
            job.begin()
            self._at(now, partial(self._decode, job, now))
        assert job.round
        job.round.join(now)
        job.replicas.append(workers)

    def _decode(self, job: Job, start: float, now: float) -> None:
        assert job.round
        if job.is_done:
            job.rollouts.append(now - start)
            self._release(job, job.pool, "rollout", now)
            job.end(self.train_nodes)
            self._go_on(job, now)
            return
        if job.round.share >= self.tail_share and not job.is_tail:
            kept = job.replicas[: self.tail_replicas]
            if frees({*itertools.chain(*kept)}, self.permits.awaited(f"{job.name} rollout")):
                leaving = [workers for workers in job.pool if workers not in kept]
                job.is_tail, job.replicas = True, kept
                job.round.shrink(self.tail_replicas)
                self._release(job, leaving, "rollout", now)
        job.is_done = job.round.go_on(job.run.policy, self.events[0][0] if self.events else inf)
        self._at(job.round.seconds, partial(self._decode, job, start))

    def _trained(self, job: Job, now: float) -> None:
        job.ends.append(now)
        job.trains = False
        self._release(job, [TRAINING], "train", now)
        self._go_on(job, now)

    def busy(self) -> tuple[float, float]:
        """Return the share of the time in which the workers of rollouts, and the training nodes, are held."""
        gpus = {worker for job in self.jobs for workers in job.pool for worker in workers}
        span = max(held.end for held in self.held)
        trained = sum(held.end - held.start for held in self.held if held.workers == TRAINING)
        rolled = sum((held.end - held.start) * len(held.workers) for held in self.held if held.workers != TRAINING)
        return rolled / span / len(gpus), trained / span


@dataclass(frozen=True)
class Alone:
    """Mean seconds of a job on nodes of its own."""

    rollout: float
    train: float  # with the weight sync

    @property
    def period(self) -> float:
        return self.rollout + self.train


def alone(kind: Kind, iterations: int = 4, gpus: tuple[str, str] = APART) -> Alone:
    """Play a kind of job on nodes of its own, or on nodes of one kind of GPU for both."""
    job = Job("", kind, gpus=gpus)
    period = Group([job], kind.nodes).play(iterations)[0]
    rollout = fmean(job.rollouts[1:])
    if not kind.ratio:
        return Alone(rollout, period - rollout)
    known = rollout if gpus == APART else alone(kind, iterations).rollout  # the ratio is of nodes apart
    slower = load_hardware(APART[1]).flops / load_hardware(gpus[1]).flops
    return Alone(rollout, known / kind.ratio * slower + sync_seconds(kind, gpus))
