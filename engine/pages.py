"""KV pages: how many a rank has, who gets in, and who has which. Bookkeeping on the host, no torch.

`num_pages` and `has_room` are the rules of the engine, and of the planner and the simulator that play it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

LAYOUTS = ("whole", "sharded")  # of the rollout's weights over the ranks of a replica; the engine's is "whole"


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

    def num_pages(self, memory: float, tensor_parallel: int, weights: float = 0.0, layout: str = "whole") -> int:
        """Return how many pages one rank of a replica has, and so the replica: each rank has its heads of all pages.

        `memory`: bytes of one rank for pages and weights; `weights`: bytes of all weights, 0 where `memory` is what
        they leave. More pages than `max_running` sequences can fill are not made. May be 0 or too few for one
        sequence (`pages_of_longest`): the caller refuses that.
        """
        assert layout in LAYOUTS
        own = weights if layout == "whole" else weights / tensor_parallel
        pages = int(max(memory - own, 0.0) // self.page_bytes(tensor_parallel))
        return min(pages, self.max_running * self.pages_of_longest)


def pages_needed(num_tokens: Any, page_size: int) -> Any:
    """Return how many pages hold so many tokens; also of an array."""
    return -(-num_tokens // page_size)


def has_room(needed: int, free: int, num_pages: int, num_admitted: int) -> bool:
    """Whether a sequence that needs so many pages is admitted beside `num_admitted` others.

    A hundredth of all pages stays free then: the next page that an older sequence needs should not preempt the newest.
    """
    return needed <= free - (num_pages // 100 if num_admitted else 0)


class Pages:
    """KV pages, given to holders (anything with a `pages` list) and taken back.

    `dense`: the pages in use are always 0 .. used - 1, each with one holder, as the CPU attention wants them; `release`
    returns the moves that keep it so. Otherwise pages stay where they are and may be shared.
    """

    def __init__(self, num_pages: int, page_size: int, dense: bool):
        self.size, self.page_size, self.dense = num_pages, page_size, dense
        self.used = 0
        self.holder: list[Any] = [None] * num_pages  # dense only: whose page it is
        self.start = np.zeros(num_pages, np.int64)  # dense only: position of the page's first token in its sequence
        self.users = np.zeros(num_pages, np.int64)  # not dense: number of holders
        self.unused = [] if dense else list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return self.size - self.used

    def needed(self, num_tokens: int) -> int:
        return pages_needed(num_tokens, self.page_size)

    def take(self, holder: Any) -> int:
        """Append a page of its own to `holder.pages` and return it. The caller has made sure that one is free."""
        page = self.used if self.dense else self.unused.pop()
        self.used += 1
        self.users[page] = 1
        self.holder[page], self.start[page] = holder, len(holder.pages) * self.page_size
        holder.pages.append(page)
        return page

    def share(self, holder: Any, page: int) -> None:
        """Append somebody else's page to `holder.pages`; it is free again when the last of them has released it."""
        assert not self.dense
        self.users[page] += 1
        holder.pages.append(page)

    def release(self, holders: list[Any]) -> list[tuple[int, int]]:
        """Take all pages of `holders` back. Returns the (from, to) moves that the caller must make."""
        pages = [page for holder in holders for page in holder.pages]
        for holder in holders:
            holder.pages = []
        if not self.dense:
            for page in pages:
                self.users[page] -= 1
                if not self.users[page]:
                    self.unused.append(page)
                    self.used -= 1
            return []
        moves = compact(pages, self.used)
        self.used -= len(pages)
        for source, target in moves:
            holder, start = self.holder[source], self.start[source]
            holder.pages[start // self.page_size] = target
            self.holder[target], self.start[target] = holder, start
        return moves


def compact(freed: list[int], num_used: int) -> list[tuple[int, int]]:
    """Return the moves (from, to) that close the holes `freed` in 0 .. num_used - 1. No move feeds another."""
    new_used, gone = num_used - len(freed), set(freed)
    holes = sorted(i for i in freed if i < new_used)
    tail = [i for i in range(new_used, num_used) if i not in gone]
    return list(zip(tail, holes, strict=True))
