"""The buffer between rollout and training: complete groups go in, batches come out. Pure: no torch, clock, collective.

A group is complete once all its responses are graded. A feeder puts it in: after the round (`learning.put_groups`),
or while the round goes on, on ranks that train already (overlap/streamed.py). Each sample comes out once:

    buffer.put(visit, examples)                 # a complete group, or the part of it that this rank has
    batch = buffer.take(tokens)                 # the next micro-batch of a rank that trains by itself
    buffer.agree(what each rank has taken)      # ... and is together with all others again
    batches = buffer.deal(num_ranks, updates)   # all that waits, for all ranks to train together

Every rank has a copy. Copies that were put the same and agree deal the same, so each rank takes its own share.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from core import Example, SampleId, VisitId
from policies.placement import assign_by_load

Batch = list[Example]  # what one rank adds up gradients of


class SampleBuffer:
    """Samples of complete groups that wait to be trained, in the order of their names."""

    def __init__(self, capacity: int):
        """`capacity`: groups that wait at most."""
        self.capacity = capacity
        self.taken: set[SampleId] = set()  # by `take`: by this rank, and after `agree` by any
        self._groups: dict[VisitId, dict[SampleId, Example]] = {}  # what waits

    def __len__(self) -> int:
        """Return how many samples wait."""
        return sum(map(len, self._groups.values()))

    def put(self, visit: VisitId, examples: Iterable[Example]) -> None:
        """Take in what there is to learn from a complete group; samples that were taken are left out."""
        group = self._groups.setdefault(visit, {})
        assert len(self._groups) <= self.capacity, f"{visit} is one group more than {self.capacity}"
        for example in examples:
            assert example.id not in group, f"{example.id} is there already"
            if example.id not in self.taken:
                group[example.id] = example

    def take(self, num_tokens: int) -> Batch:
        """Take out the first samples that `num_tokens` hold: at least one, if any waits."""
        batch: Batch = []
        for example in self._in_order(sorted(self._groups)):
            num_tokens -= example.num_tokens
            if batch and num_tokens < 0:
                break
            batch.append(example)
        self.taken.update(example.id for example in batch)
        for example in batch:
            group = self._groups[example.id.visit]
            del group[example.id]
            if not group:
                del self._groups[example.id.visit]
        return batch

    def deal(
        self,
        num_ranks: int,
        num_batches: int = 1,
        held: Sequence[float] = (),
        work_of: Callable[[Example], float] = lambda example: example.num_tokens,
    ) -> list[list[Batch]]:
        """Take out all that waits: groups in turn into `num_batches`, each spread over ranks by `work_of` its samples.

        Returns the batches, and in each the samples of every rank. `held`: work that the ranks have already.
        """
        visits, batches = sorted(self._groups), []
        for part in range(num_batches):
            examples = self._in_order(visits[part::num_batches])
            shares = assign_by_load([*map(work_of, examples)], num_ranks, held)
            batches.append([[examples[i] for i in share] for share in shares])
        self._groups.clear()
        return batches

    def agree(self, taken: Iterable[Collection[SampleId]]) -> None:
        """Learn what each rank has taken. Nothing waits afterwards: all ranks put the whole groups in again."""
        parts = list(taken)
        self.taken = set().union(*parts)
        assert len(self.taken) == sum(map(len, parts)), "a sample was taken twice"
        self._groups.clear()

    def _in_order(self, visits: Iterable[VisitId]) -> Batch:
        return [example for visit in visits for _, example in sorted(self._groups[visit].items())]
