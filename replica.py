"""One engine of the simulator: admission, decoding, preemption, from event to event. Pure.

Between two events the set of decoding sequences does not change, so any number of decode steps is one closed-form sum.
`rollout.Engine` follows the same rules, token by token.
"""

import math
from collections import Counter, deque
from collections.abc import Set
from dataclasses import dataclass
from heapq import heappop, heappush

from config import ConfigError
from core import Finished, PromptId, SampleId
from costs import Costs


@dataclass(slots=True, eq=False)
class Response:
    """A response inside a replica."""

    id: SampleId
    prompt_tokens: int
    length: int
    done: int = 0  # tokens it had when it was admitted
    start: int = 0  # the replica's iteration at that time

    @property
    def ends(self) -> int:
        return self.start + self.length - self.done


class Replica:
    """One engine: admits, decodes, preempts the newest when pages run out. Mirrors `rollout.Engine`."""

    def __init__(self, costs: Costs, max_running: int = 256, page_size: int = 64, longest: int = 0):
        self.costs, self.max_running, self.padding = costs, max_running, page_size / 2
        if costs.capacity < longest + page_size:
            raise ConfigError(
                f"{costs.capacity} tokens of KV fit on a replica of {costs.tp} GPUs, one response may need {longest}; "
                "raise cluster.tensor_parallel"
            )
        self.clock = 0.0
        self.iteration = 0
        self.running: dict[SampleId, Response] = {}  # in order of admission
        self.waiting: deque[Response] = deque()
        self.ending: list[tuple[int, SampleId]] = []  # heap; entries of what left early are passed over
        self.prompts: Counter[PromptId] = Counter()  # of the running sequences
        self.context = 0  # their tokens
        self.busy = 0.0
        self.events = self.preemptions = self.decoded = 0

    @property
    def used(self) -> float:
        """Tokens' worth of pages. On average a sequence's last page is half full."""
        return self.context + self.padding * len(self.running)

    def add(self, sequence: Response) -> None:
        self.waiting.append(sequence)
        self._admit()

    def remove(self, ids: Set[SampleId]) -> list[Response]:
        """Take out those of these sequences that are here, with what they have; they can go on elsewhere."""
        gone = [self._release(id) for id in self.running.keys() & ids]
        gone += [s for s in self.waiting if s.id in ids]
        self.waiting = deque(s for s in self.waiting if s.id not in ids)
        self._admit()
        return gone

    def next_event(self) -> float:
        """Return the iteration at whose end something may happen: a response ends, or pages run out."""
        while self.ending and not self._is_current(*self.ending[0]):
            heappop(self.ending)
        if not self.running:
            return math.inf
        room = (self.costs.capacity - self.used) // len(self.running) + 1
        return min(self.ending[0][0], self.iteration + room)

    def run_until(self, iteration: float) -> list[tuple[Finished, float]]:
        """Decode up to an iteration; return what ended, and when."""
        finished = []
        while math.inf > (at := self.next_event()) <= iteration:
            self._advance(at)
            while self.ending and self.ending[0][0] <= at:
                ended = heappop(self.ending)
                if self._is_current(*ended):
                    sequence = self._release(ended[1])
                    finished.append((Finished(self.iteration, sequence.id, sequence.length), self.clock))
            while self.used > self.costs.capacity:
                self.waiting.appendleft(self._release(next(reversed(self.running))))
                self.preemptions += 1
            self._admit()
        if iteration < math.inf:
            self._advance(iteration)
        return finished

    def _is_current(self, end: int, id: SampleId) -> bool:
        return id in self.running and self.running[id].ends == end

    def _advance(self, iteration: float) -> None:
        steps, running = int(iteration - self.iteration), len(self.running)
        if running and steps:
            self._spend(self.costs.decode(running, self.context, steps))
            self.context += running * steps
            self.decoded += running * steps
        self.iteration = int(iteration)

    def _spend(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds

    def _release(self, id: SampleId) -> Response:
        self.events += 1
        sequence = self.running.pop(id)
        sequence.done += self.iteration - sequence.start
        self.context -= sequence.prompt_tokens + sequence.done
        self.prompts[id[:2]] -= 1
        return sequence

    def _admit(self) -> None:
        """Start waiting sequences while rows and pages last. A prompt is computed once for all its responses."""
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            tokens = sequence.prompt_tokens + sequence.done
            reserve = self.costs.capacity / 100 if self.running else 0
            if self.used + tokens + self.padding > self.costs.capacity - reserve:
                return
            self.waiting.popleft()
            self.events += 1
            if sequence.done or not self.prompts[sequence.id[:2]]:
                self._spend(self.costs.prefill(tokens))
            if not sequence.done:
                self._spend(self.costs.efficiency.response_seconds)
            sequence.start = self.iteration
            self.running[sequence.id] = sequence
            self.prompts[sequence.id[:2]] += 1
            self.context += tokens
            heappush(self.ending, (sequence.ends, sequence.id))
