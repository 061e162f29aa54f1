"""A model of an engine: admission, decoding, preemption, from event to event. Pure, no torch.

Both the simulator's replicas and the planner's predictions are a `Replica`. It does to the page what `rollout.Engine`
does before and in each step, and admits by the same code (engine/pages.py); tests hold both to the same preemptions and
steps. Between two events the set of decoding sequences does not change, so any number of decode steps is one
closed-form sum.
"""

import math
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import takewhile

import numpy as np

from core import Finished, SampleId, VisitId
from engine.pages import Admission, pages_needed
from policies.step_times import StepTimes


@dataclass(slots=True, eq=False)
class Response:
    """A response inside a replica."""

    id: SampleId
    prompt_tokens: int
    length: int
    done: int = 0  # tokens it had when it was admitted
    start: int = 0  # the replica's iteration at that time
    kept: int = 0  # tokens that are still in its pages when it is admitted again
    has_old_kv: bool = False  # of older weights: nobody may take its pages over
    shared: int = 0  # pages of its prompt that others may share
    sharers: list[int] = field(default_factory=list)  # `shared` of all that have these pages

    @property
    def sampled(self) -> int:
        """Tokens of its length that are drawn."""
        return self.length

    @property
    def ends(self) -> int:
        return self.start + self.length - self.done

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.done

    @property
    def is_resumed(self) -> bool:
        return self.done > 0

    @property
    def base(self) -> int:
        """Tokens in the cache after iteration i, less i. The newest token is not in the cache."""
        return self.num_tokens - 1 - self.start


class Replica:
    """One engine: admits while rows and pages last, decodes, preempts the newest when pages run out."""

    def __init__(
        self, times: StepTimes, num_pages: int, page_size: int = 64, max_running: int = 256, shares_prompts: bool = True
    ):
        """`shares_prompts`: the responses of a group share their prompt's pages, as on a GPU; a CPU copies them."""
        self.times, self.num_pages, self.page_size = times, num_pages, page_size
        self.admission = Admission(num_pages, page_size, max_running, shares_prompts)
        self.clock = 0.0
        self.iteration = 0
        self.running: dict[SampleId, Response] = {}  # in order of admission
        self.waiting: deque[Response] = deque()
        self.parked: dict[SampleId, Response] = {}  # have their pages still, as long as nobody needs them; oldest first
        self.ending: list[tuple[int, SampleId]] = []  # heap; entries of responses that left early are passed over
        self.prompts: dict[VisitId, list[Response]] = {}  # the running ones
        self.new: dict[SampleId, Response] = {}  # admitted, their context not computed
        self.has_begun, self.event = False, math.inf  # what comes before the next step is done; see `next_event`
        # Pages: of each sequence the whole ones, counted at iteration 0, and how many tokens are left over.
        self.whole_pages = self.saved_pages = self.parked_pages = self.base = 0
        self.left_over, self.steps = np.zeros(page_size, np.int64), np.arange(page_size)
        self.busy = 0.0
        self.events = self.preemptions = self.decoded = 0
        self.recomputed = self.resumed = 0  # tokens of contexts that were computed again, and that were not
        self.plain = (0, 0, 0.0)  # steps that compute no context: how many, the tokens that they drew, their seconds

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def pages_used(self) -> int:
        return self._pages_at(self.iteration)

    def add(self, sequence: Response) -> None:
        self.waiting.append(sequence)
        self.has_begun = False

    def remove(self, ids: Set[SampleId]) -> list[Response]:
        """Take those of `ids` that are here out, with their tokens; another replica's `add` continues them."""
        self.forget(ids)
        gone = [self._release(id) for id in self.running.keys() & ids]
        gone += [s for s in self.waiting if s.id in ids]
        self.waiting = deque(s for s in self.waiting if s.id not in ids)
        self.has_begun = False
        return gone

    def evict(self) -> None:
        """Take the pages of all: new weights have other keys and values. They wait in their order, and go on."""
        while self.running:
            self._evict_newest()
        self.forget([*self.parked])
        self.has_begun = False

    def change_weights(self) -> None:
        """Take new weights; the running responses keep the KV of the older ones."""
        self.forget([*self.parked])
        for sequence in self.running.values():
            sequence.has_old_kv = sequence.id not in self.new
        self.has_begun = False

    def park(self, sequence: Response) -> None:
        """Keep the pages of a response that has just left its row, until it is admitted again."""
        if sequence.has_old_kv:
            return
        sequence.kept = sequence.num_tokens - 1
        self.parked[sequence.id] = sequence
        self._keep(sequence, 1)

    def forget(self, ids: Iterable[SampleId]) -> None:
        """Free what is parked of these responses: they will be computed again."""
        for sequence in [self.parked.pop(id) for id in ids if id in self.parked]:
            self._keep(sequence, -1)
            sequence.kept = 0

    def live_tokens(self) -> list[int]:
        """Return the response tokens so far of each response that runs or waits."""
        running = [s.done + self.iteration - s.start for s in self.running.values()]
        return running + [s.done for s in self.waiting]

    @property
    def step_seconds(self) -> float:
        """Seconds of the next decode step."""
        rows = len(self.running)
        return self.times.decode(rows, self.base + rows * self.iteration) if rows else 0.0

    def next_event(self) -> float:
        """Return the iteration at whose end a response may end, pages run out, or a waiting response get in."""
        if not self.has_begun:
            self._begin()
            self.event = self._next_event()
        return self.event

    def run_until(self, iteration: float) -> list[tuple[Finished, float]]:
        """Decode up to an iteration; return the responses that ended, each with the clock at its end."""
        finished = []
        while self.iteration < iteration and (at := self.next_event()) < math.inf:
            self._advance(int(min(at, iteration)))
            finished += self._end()
        if iteration < math.inf:
            self.iteration = int(iteration)  # a replica that ran dry counts on
        return finished

    def _end(self) -> list[tuple[Finished, float]]:
        """Return the responses that have just ended."""
        return [(Finished(self.iteration, s.id, s.length), self.clock) for s in self._take_ended()]

    def _take_ended(self) -> list[Response]:
        ended = []
        while self.ending and self.ending[0][0] <= self.iteration:
            end = heappop(self.ending)
            if self._is_current(*end):
                ended.append(self._release(end[1]))
        return ended

    def _next_event(self) -> float:
        if not self.running:
            return math.inf
        # A resumed response's prompt can be shared once it has been computed: the first in the queue may then fit.
        first = self.waiting[0] if self.waiting and self.admission.shares_prompts else None
        if first and not first.done and any(s.done and s.id.visit == first.id.visit for s in self.new.values()):
            return self.iteration + 1
        while not self._is_current(*self.ending[0]):
            heappop(self.ending)
        end = self.ending[0][0]
        return end if self._fits(end) else min(end, self.iteration + self._steps_left())

    def _is_current(self, end: int, id: SampleId) -> bool:
        sequence = self.running.get(id)
        return sequence is not None and sequence.ends == end

    # ---- pages -----------------------------------------------------------------------------------------------

    def _pages_at(self, iteration: int) -> int:
        """Return how many pages the running sequences have after an iteration."""
        own = pages_needed(self.steps + iteration, self.page_size) @ self.left_over
        return self.whole_pages + int(own) + self.parked_pages - self.saved_pages

    def _fits(self, iteration: int) -> bool:
        rows = len(self.running)
        most = (self.base + rows * iteration) // self.page_size + rows + self.parked_pages  # as if nothing were shared
        return most <= self.num_pages or self._pages_at(iteration) <= self.num_pages

    def _steps_left(self) -> int:
        """Return for how many steps there are pages: each sequence takes one in every `page_size` steps."""
        free = self.num_pages - self.pages_used
        turns, free = divmod(free, len(self.running))
        due = self.left_over[(-self.iteration - self.steps) % self.page_size].cumsum()  # pages taken in 1, 2 .. steps
        return turns * self.page_size + int(due.searchsorted(free, "right"))

    def _hold(self, sequence: Response, sign: int) -> None:
        """Count a sequence's pages and tokens in (1) or out (-1)."""
        whole, rest = divmod(sequence.base, self.page_size)
        self.whole_pages += sign * whole
        self.left_over[rest] += sign
        self.base += sign * sequence.base
        self._share(sequence, sign)

    def _keep(self, sequence: Response, sign: int) -> None:
        """Count a parked response's pages in (1) or out (-1)."""
        self.parked_pages += sign * pages_needed(sequence.kept, self.page_size)
        self._share(sequence, sign)

    def _share(self, sequence: Response, sign: int) -> None:
        before = _saved(sequence.sharers)
        if sign > 0:
            sequence.sharers.append(sequence.shared)
        else:
            sequence.sharers.remove(sequence.shared)
        self.saved_pages += _saved(sequence.sharers) - before

    # ---- before a step ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Admit, then preempt the newest while there are no pages for the next token of every sequence."""
        self.has_begun = True
        self._admit()
        while self.waiting and len(self.running) < self.admission.max_running:
            others = [id for id in self.parked if id != self.waiting[0].id]
            if not others:
                break
            self.forget(others[:1])  # nobody waits for pages that are only kept
            self._admit()
        assert self.running or not self.waiting, "one sequence does not fit"
        while not self._fits(self.iteration + 1):
            if self.parked:
                self.forget([next(iter(self.parked))])
            else:
                self._evict_newest()
                self.preemptions += 1

    def _evict_newest(self) -> None:
        self.waiting.appendleft(self._release(next(reversed(self.running))))

    def _admit(self) -> None:
        """Start waiting sequences, in order. A prompt is computed once for all its responses."""
        if not self.waiting or len(self.running) >= self.admission.max_running:
            return
        newest = takewhile(lambda s: s.start == self.iteration, reversed(self.running.values()))
        ahead = sum((s.num_tokens - 1) % self.page_size == 0 for s in newest)  # pages of theirs that count from now on
        state = len(self.running), self.num_pages - self.pages_used - ahead
        donors = self._computing, self._cached
        given = self.waiting, *state, *donors, lambda s: range(pages_needed(s.kept, self.page_size))
        for sequence, donor, is_late, shared, _ in self.admission.admit(*given):
            self.events += 1
            sequence.start, sequence.has_old_kv = self.iteration, False
            if sequence.kept:
                self._keep(self.parked.pop(sequence.id), -1)
            else:
                sequence.sharers = donor.sharers if donor else []
                sequence.shared = shared if donor else sequence.prompt_tokens // self.page_size
            self.running[sequence.id] = sequence
            self.prompts.setdefault(sequence.id.visit, []).append(sequence)
            self._hold(sequence, 1)
            if not sequence.done:
                self._spend(self.times.response_seconds)
            if not is_late:
                self.new[sequence.id] = sequence
            self._expect(sequence)

    def _expect(self, sequence: Response) -> None:
        heappush(self.ending, (sequence.ends, sequence.id))

    def _computing(self, sequence: Response) -> Response | None:
        siblings = () if sequence.done else self.prompts.get(sequence.id.visit, ())
        return next((s for s in siblings if s.id in self.new and not s.done), None)

    def _cached(self, sequence: Response) -> Response | None:
        siblings = self.prompts.get(sequence.id.visit, ())
        return next((s for s in siblings if s.id not in self.new and not s.has_old_kv), None)

    # ---- steps -----------------------------------------------------------------------------------------------

    def _advance(self, iteration: int) -> None:
        steps, rows = iteration - self.iteration, len(self.running)
        context = self.base + rows * self.iteration
        self.decoded += rows * steps
        if self.new:  # a step that computes contexts; it decodes the others only
            computed = {s.id if s.done else s.id.visit: s for s in self.new.values()}
            for s in computed.values():
                self._spend(self.times.prefill(s.num_tokens) - self.times.prefill(s.kept))
            self.resumed += sum(s.kept for s in self.new.values())
            self.recomputed += sum(s.num_tokens for s in self.new.values() if s.done and not s.kept)
            if others := rows - len(self.new):
                self._spend(self.times.decode(others, context - sum(s.num_tokens - 1 for s in self.new.values())))
            self.new.clear()
            steps, context = steps - 1, context + rows
        if steps:
            seconds = self.times.decode(rows, context, steps)
            self._spend(seconds)
            self.plain = self.plain[0] + steps, self.plain[1] + rows * steps, self.plain[2] + seconds
        self.iteration, self.has_begun = iteration, iteration < self.event  # until then nothing can change

    def _spend(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds

    def _release(self, id: SampleId) -> Response:
        self.events += 1
        sequence = self.running.pop(id)
        self._hold(sequence, -1)
        siblings = self.prompts[id.visit]
        siblings.remove(sequence)
        if not siblings:
            del self.prompts[id.visit]
        self.new.pop(id, None)
        sequence.done += self.iteration - sequence.start
        sequence.kept = 0
        return sequence


def _saved(sharers: list[int]) -> int:
    """Return how many pages are saved by sharing: each page is there once."""
    return sum(sharers) - max(sharers, default=0)
