"""KV pages: how many a rank has, who gets in, and who has which. Bookkeeping on the host, no torch.

`Cache.num_pages` and `Admission` are the rules of the engine, and of the planner and the simulator that play it.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol, TypeVar

import numpy as np


class Holder(Protocol):
    """Has pages: a sequence."""

    pages: list[int]
    row: int  # in which it decodes; -1: none


class Entrant(Protocol):
    """Waits to be admitted: a sequence."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def is_resumed(self) -> bool: ...


N = TypeVar("N", int, np.ndarray)
S = TypeVar("S", bound=Entrant)
LAYOUTS = ("whole", "sharded")  # of the rollout's weights: all on every rank of a replica, or spread over them


@dataclass(frozen=True)
class Cache:
    """What a token leaves in the cache, and how many tokens may ever be there."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes of a number
    page_size: int  # tokens of a page
    max_running: int  # sequences of a replica that decode together
    longest: int  # tokens of a sequence, its prompt included

    @property
    def pages_of_longest(self) -> int:
        return pages_needed(self.longest, self.page_size)

    def page_bytes(self, tensor_parallel: int) -> int:
        """Bytes of one page on one rank: with fewer KV heads than ranks each rank has a copy of one."""
        heads = max(self.kv_heads // tensor_parallel, 1)
        return 2 * self.layers * heads * self.page_size * self.head_dim * self.itemsize

    @staticmethod
    def own_weights(weights: float, tensor_parallel: int, layout: str) -> float:
        """Return the bytes of one rank's weights, of which there are `weights` bytes in all."""
        return {"whole": weights, "sharded": weights / tensor_parallel}[layout]

    def num_pages(self, memory: float, tensor_parallel: int, weights: float = 0.0, layout: str = "whole") -> int:
        """Return how many pages one rank of a replica has, and so the replica: each rank has its heads of all pages.

        `memory`: bytes of one rank for pages and weights; `weights`: bytes of all weights. (Norms, and KV heads that
        several ranks share, are on each rank whatever the layout, and not counted.) More pages than `max_running`
        sequences can fill are not made. May be 0 or too few for one sequence (`pages_of_longest`): the caller refuses
        that.
        """
        room = max(memory - self.own_weights(weights, tensor_parallel, layout), 0.0)
        return min(int(room // self.page_bytes(tensor_parallel)), self.max_running * self.pages_of_longest)


def pages_needed(num_tokens: N, page_size: int) -> N:
    """Return how many pages hold so many tokens; also of an array."""
    return -(-num_tokens // page_size)


def has_room(needed: int, free: int, num_pages: int, num_admitted: int) -> bool:
    """Whether a sequence that needs so many pages is admitted beside `num_admitted` others.

    A hundredth of all pages stays free then: the next page that an older sequence needs should not preempt the newest.
    """
    return needed <= free - (num_pages // 100 if num_admitted else 0)


@dataclass(frozen=True, slots=True)
class Admission:
    """Who gets in: the rule of the engine's batcher, and of the replicas that play it (policies/replica.py)."""

    num_pages: int
    page_size: int
    max_running: int
    shares_prompts: bool  # responses share the whole pages of their prompt, as on a GPU; on a CPU they copy them

    def admit(
        self,
        waiting: deque[S],
        num_admitted: int,
        free: int,
        computing: Callable[[S], S | None],
        cached: Callable[[S], S | None],
        parked: Callable[[S], Collection[int]] = lambda _: (),
    ) -> Iterator[tuple[S, S | None, bool, int, int]]:
        """Take sequences off `waiting`, in order, while rows and pages last.

        Yields (sequence, donor, whether it is late, pages of the donor to share, pages to take). The donor has, or will
        have, the same context in its pages. `computing` returns a sequence that computes the same context in this step,
        `cached` one that has computed the same prompt before, and then the new sequence is late. A resumed sequence's
        own tokens are in nobody's pages, but for the pages that were `parked` for it: it is computed again.
        """
        while waiting and num_admitted < self.max_running:
            tokens, kept = waiting[0].num_tokens, parked(waiting[0])
            needed, shared = pages_needed(tokens, self.page_size) - len(kept), 0
            if not self.shares_prompts and not has_room(needed, free, self.num_pages, num_admitted):
                return  # before it looks for a donor, step after step
            donor, is_late = None if kept else computing(waiting[0]), False
            if not donor and not waiting[0].is_resumed:
                donor = cached(waiting[0])
                is_late = donor is not None
            if donor and self.shares_prompts:
                # A late one decodes the prompt's last token again, for its logits: it needs a page of its own for that.
                shared = (tokens - is_late) // self.page_size
                needed -= shared
            if not has_room(needed, free, self.num_pages, num_admitted):
                return
            free -= needed
            num_admitted += 1
            yield waiting.popleft(), donor, is_late, shared, needed


class PageMove(NamedTuple):
    """What stands on page `source` must be moved to page `target`, which is its holder's page `place` now."""

    source: int
    target: int
    holder: Holder
    place: int


class Pages:
    """Pages given to holders and taken back. A page may have several holders."""

    shares = True  # whether it may

    def __init__(self, num_pages: int, page_size: int):
        self.size, self.page_size, self.used = num_pages, page_size, 0
        self.users = [0] * num_pages  # number of holders
        self.unused = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return self.size - self.used

    def take(self, holder: Holder) -> int:
        """Append a page of its own to `holder.pages` and return it. The caller has made sure that one is free."""
        page = self.unused.pop()
        self.used += 1
        self.users[page] = 1
        holder.pages.append(page)
        return page

    def share(self, holder: Holder, page: int) -> None:
        """Append another holder's page to `holder.pages`; it is free again when the last of them has released it."""
        self.users[page] += 1
        holder.pages.append(page)

    def release(self, holders: Sequence[Holder], kept: Iterable[int] = repeat(0)) -> list[PageMove]:
        """Take the pages of `holders` back, but for the first `kept` of each.

        Returns the moves that the caller must make: none, these pages stay.
        """
        for page in cut(holders, kept):
            self.users[page] -= 1
            if not self.users[page]:
                self.unused.append(page)
                self.used -= 1
        return []

    def park(self, holder: Holder, parked: Holder) -> None:
        """Have `parked` keep the pages of a holder that leaves its row."""
        parked.pages, holder.pages = holder.pages, []

    def resume(self, parked: Holder, holder: Holder) -> None:
        """Give a new holder the pages that were parked."""
        holder.pages, parked.pages = parked.pages, []

    def seat(self, holder: Holder, row: int) -> None:
        """Note in which row a holder decodes. Of use to pages that are a batch (engine/cpu.py)."""


def cut(holders: Sequence[Holder], kept: Iterable[int]) -> list[int]:
    """Leave each holder its first `kept` pages; return the others."""
    gone = []
    for holder, count in zip(holders, kept):
        gone += holder.pages[count:]
        holder.pages = holder.pages[:count]
    return gone


def compact(freed: list[int], num_used: int) -> list[tuple[int, int]]:
    """Return the moves (from, to) that close the holes `freed` in 0 .. num_used - 1. No move feeds another."""
    new_used, gone = num_used - len(freed), set(freed)
    holes = sorted(i for i in freed if i < new_used)
    tail = [i for i in range(new_used, num_used) if i not in gone]
    return list(zip(tail, holes, strict=True))
