"""One co-execution group, response by response: rollouts whose workers come and go, and tail migration. No torch.

The permits are those of the server (policies/group.py), rounds and engines those of simulate.py. Each worker of a
rollout has a permit of its own: so a rollout begins on the workers that are free, and goes on to the others when they
are. At a share of its responses it keeps a few workers and gives back the rest. (RollMux, arXiv 2512.11306, section 4.3)
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from statistics import fmean

from core import RoundPlan, SampleId
from policies.group import Permits, Worker
from policies.scale_down import StreamConfig
from scheduler import RoundPolicy, SchedulerConfig
from simulate import ClusterConfig, SimulatedRound, Simulation, SimulationConfig, load_hardware, load_model_file
from simulation.costs import Costs, Efficiency

NODE = 8  # GPUs
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

    def simulation(self, gpu: str, policy: str, steps: int, seed: int) -> Simulation:
        """Return a run on its rollout nodes, of which no step has been played."""
        file, engine = load_model_file(self.model), load_model_file(ENGINE).efficiency
        lengths = replace(file.lengths, limit=self.limit)
        efficiency = replace(engine, prefill=PREFILL[gpu], train=TRAIN, train_seconds=Efficiency.train_seconds)
        weights = "whole" if self.tensor_parallel == 1 else "sharded"
        cluster = ClusterConfig(
            gpus=NODE * self.nodes, tensor_parallel=self.tensor_parallel, weights=weights, steps=steps, seed=seed
        )
        scheduler = SchedulerConfig(policy, self.prompts, 8, migrate=True)
        config = SimulationConfig(cluster, scheduler, stream=StreamConfig("off"))
        return Simulation(config, replace(file, lengths=lengths, efficiency=efficiency), load_hardware(gpu))


class SharedRound(SimulatedRound):
    """A round whose replicas come and go."""

    def __init__(self, run: Simulation, plan: RoundPlan, step: int):
        super().__init__(run, plan, step)
        self.spare, self.replicas = self.replicas, []
        self.placement.live.clear()

    def join(self, now: float) -> None:
        """Go on with one replica more. It takes over what others have too much of."""
        replica = self.spare.pop()
        replica.clock, replica.iteration = max([now, *(other.clock for other in self.replicas)]), self.iteration
        self.replicas.append(replica)
        self.placement.live.append({})

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
        gpus: tuple[str, str] = ("h20", "h800"),
        policy: str = "synchronous",
        steps: int = 32,
        seed: int = 0,
    ):
        """`nodes`: where its rollout runs. `train_seconds`: of a batch on its own nodes; 0: by its lengths.

        `gpus`: for the rollout and for training. `steps`: most that are played.
        """
        self.name, self.kind, self.steps, self.train_seconds = name, kind, steps, train_seconds
        workers = kind.nodes * NODE // kind.tensor_parallel
        each = workers // len(nodes)
        self.pool: list[Worker] = [(node, i) for node in nodes for i in range(each)]
        self.run = kind.simulation(gpus[0], policy, steps, seed)
        self.costs = Costs(load_hardware(gpus[1]), self.run.model.shape, self.run.model.efficiency)
        self.round: SharedRound | None = None
        self.workers: list[Worker] = []  # of the round
        self.is_tail = self.is_done = False
        self.rollouts: list[float] = []  # seconds from the first worker on, of each
        self.ends: list[float] = []  # of iterations

    def begin(self) -> None:
        plan = self.run.policy.begin(self.run.cursor.take, self.steps - len(self.ends))
        self.round, self.is_tail, self.is_done = SharedRound(self.run, plan, len(self.ends)), False, False

    def end(self, nodes: int) -> float:
        """Close the round; return the seconds of its training on so many nodes."""
        assert self.round
        ids = self.run.policy.accepted_ids()
        lengths = [self.round.lengths[id] + len(self.round.prompts[id.visit].token_ids) for id in ids]
        self.run.policy.close(self.round.aborted)
        self.round, self.workers = None, []
        own = self.train_seconds * self.kind.nodes / nodes
        return own or self.costs.train(lengths, NODE * nodes) + self.run.model.efficiency.train_seconds


@dataclass(frozen=True)
class Held:
    """A worker in the hands of a job."""

    worker: Worker
    job: str
    start: float
    end: float


class Group:
    """Jobs on one set of nodes. Each iterates for ever: rollout, training, weight sync."""

    def __init__(self, jobs: Sequence[Job], train_nodes: int = 1, tail_share: float = 1.0, tail_workers: int = 2):
        """`tail_share`: of its responses, at which a rollout goes on with `tail_workers` of its workers."""
        self.jobs, self.train_nodes, self.tail_share, self.tail_workers = jobs, train_nodes, tail_share, tail_workers
        self.permits, self.order = Permits(), count()
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.asked: dict[str, tuple[Job, Worker]] = {}  # by the name of a permit
        self.since: dict[str, float] = {}  # of permits that are given
        self.held: list[Held] = []

    def play(self, iterations: int) -> list[float]:
        """Return each job's seconds an iteration: the mean over all but the first."""
        for job in self.jobs:
            self._ask(job, job.pool, 0.0)
        while min(len(job.ends) for job in self.jobs) < iterations:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
        return [(job.ends[-1] - job.ends[0]) / (len(job.ends) - 1) for job in self.jobs]

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time, next(self.order), happen))

    def _switch(self, job: Job, is_training: bool) -> float:
        return job.kind.switch[is_training] if len(self.jobs) > 1 else 0.0

    # ---- permits -----------------------------------------------------------------------------------------------

    def _ask(self, job: Job, workers: Iterable[Worker], now: float) -> None:
        for worker in workers:
            self.asked[f"{job.name} {worker}"] = job, worker
            self._begin(self.permits.request(f"{job.name} {worker}", [worker]), now)

    def _begin(self, granted: Iterable[str], now: float) -> None:
        for name in granted:
            self.since[name] = now
            job, worker = self.asked[name]
            if worker == "train":
                seconds = self._switch(job, True) + job.end(self.train_nodes) + job.kind.sync
                self._at(now + seconds, partial(self._trained, job))
            else:
                self._at(now + self._switch(job, False), partial(self._join, job, worker))

    def _release(self, job: Job, workers: Iterable[Worker], now: float) -> None:
        for name in [f"{job.name} {worker}" for worker in workers]:
            if name in self.since:
                self.held.append(Held(self.asked[name][1], job.name, self.since.pop(name), now))
            self._begin(self.permits.release(name), now)

    # ---- phases ------------------------------------------------------------------------------------------------

    def _join(self, job: Job, worker: Worker, now: float) -> None:
        if f"{job.name} {worker}" not in self.since:
            return  # the round has shrunk meanwhile
        if not job.round:
            job.begin()
            self._at(now, partial(self._decode, job, now))
        assert job.round
        job.round.join(now)
        job.workers.append(worker)

    def _decode(self, job: Job, start: float, now: float) -> None:
        assert job.round
        if job.is_done:
            job.rollouts.append(now - start)
            self._release(job, job.pool, now)
            self._ask(job, ["train"], now)
            return
        if job.round.share >= self.tail_share and not job.is_tail and self._awaited(job):
            job.is_tail = True
            job.round.shrink(self.tail_workers)
            job.workers = job.workers[: self.tail_workers]
            self._release(job, [worker for worker in job.pool if worker not in job.workers], now)
        job.is_done = job.round.go_on(job.run.policy, self.events[0][0] if self.events else inf)
        self._at(job.round.seconds, partial(self._decode, job, start))

    def _awaited(self, job: Job) -> bool:
        """Whether others wait for its workers: else giving some back would make its tail longer for nothing."""
        return any(len(self.permits.queues[worker]) > 1 for worker in job.workers)

    def _trained(self, job: Job, now: float) -> None:
        job.ends.append(now)
        self._release(job, ["train"], now)
        self._ask(job, job.pool, now)


@dataclass(frozen=True)
class Alone:
    """Mean seconds of a job on nodes of its own."""

    rollout: float
    train: float  # with the weight sync

    @property
    def period(self) -> float:
        return self.rollout + self.train


def alone(kind: Kind, iterations: int = 4, gpus: tuple[str, str] = ("h20", "h800")) -> Alone:
    """Play a kind of job on nodes of its own, or on nodes of one kind that do both."""
    job = Job("", kind, gpus=gpus)
    period = Group([job], kind.nodes).play(iterations)[0]
    rollout = fmean(job.rollouts[1:])
    if not kind.ratio:
        return Alone(rollout, period - rollout)
    as_on = alone(kind, iterations).rollout / kind.ratio if gpus != ("h20", "h800") else rollout / kind.ratio
    return Alone(rollout, as_on * load_hardware("h800").flops / load_hardware(gpus[1]).flops + kind.sync)
