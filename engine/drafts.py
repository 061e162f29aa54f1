"""Drafts: tokens that may follow in a row, verified by drawing. Pure, no torch.

A token is a pure function of weights, context, key and position. So a step may compute, behind a row's newest token,
tokens that somebody expects, and draw at each place as a step of its own would: the draws count up to and including
the first that differs from the draft, and they are those of decoding token by token. What is in the cache for later
places is written over. (Drafter-invariant decoding, arXiv 2408.07978; drafts cost time when they are wrong, never
tokens.)
"""

from collections import abc
from typing import Protocol

import numpy as np

from engine.batcher import Batcher
from engine.sequence import Chunk, Sequence


class Drafter(Protocol):
    """Who expects tokens. The ranks of a replica have a drafter each, and these must propose alike."""

    def wants_rows(self, num_rows: int) -> bool:
        """Whether to `propose` in the next step, of about so many rows. Asked before each step.

        Where not, the host does not wait for the tokens of the step before.
        """
        ...

    def propose(self, rows: abc.Sequence[tuple[Sequence, np.ndarray]]) -> abc.Sequence[abc.Sequence[int]]:
        """Return for each running sequence the tokens that may follow, perhaps none.

        Beside each are the response tokens that it has, int64 [count]: a view, valid during the call.
        """
        ...

    def learn(self, outcome: abc.Sequence[tuple[Sequence, int, int]]) -> None:
        """Be told of each sequence with a draft: tokens that were computed of it, tokens of them that were drawn."""
        ...

    def observe(self, tokens: int, seconds: float) -> None:
        """Be told of steps without prefill: tokens computed, newest ones and drafts; wall seconds."""
        ...


class Drafts:
    """The tokens of one step, T in all: of each row the newest, and its draft behind it.

    counts [n]: drafted tokens, by row; start [n]: the first of its tokens. row, place, tokens [T]: each token's row,
    its distance from the row's newest, and itself; drawn [T]: response tokens up to it. After the step: kept [n],
    tokens that each row drew.
    """

    def __init__(self, rows: abc.Sequence[tuple[Sequence, np.ndarray]], drafts: abc.Sequence[abc.Sequence[int]]):
        """`rows`: as for `Drafter.propose`."""
        self.sequences = [s for s, _ in rows]
        self.counts = np.array([len(draft) for draft in drafts])
        ends = (self.counts + 1).cumsum()
        self.start = ends - self.counts - 1
        self.row = np.arange(len(drafts)).repeat(self.counts + 1)
        self.place = np.arange(ends[-1]) - self.start[self.row]
        self.tokens = np.empty(ends[-1], np.int64)
        self.tokens[self.start] = [text[-1] if len(text) else s.prompt_ids[-1] for s, text in rows]
        self.tokens[self.place > 0] = [token for draft in drafts for token in draft]
        self.drawn = np.array([len(text) for _, text in rows])[self.row] + self.place
        self.kept = np.zeros(len(drafts), np.int64)

    @property
    def num_tokens(self) -> int:
        return len(self.row)

    def positions(self, length: np.ndarray) -> np.ndarray:
        """Return the tokens' places in their sequences. length [n]: tokens that each row has in the cache. [T]"""
        return length[self.row] + self.place

    def settle(self, drawn: np.ndarray) -> np.ndarray:
        """Find which of the drawn tokens [T] are kept. Return each row's newest among them, as places in T. [n]"""
        is_wrong = np.ones(len(drawn), bool)  # as is the last of each row, behind which nothing was foreseen
        np.logical_or(drawn[:-1] != self.tokens[1:], self.place[1:] == 0, out=is_wrong[:-1])
        wrong = is_wrong.nonzero()[0]
        newest = wrong[wrong.searchsorted(self.start)]
        self.kept = self.place[newest] + 1
        return newest

    @property
    def outcome(self) -> list[tuple[Sequence, int, int]]:
        """Return what a drafter learns."""
        settled = zip(self.sequences, self.counts.tolist(), self.kept.tolist(), strict=True)
        return [(s, count, kept - 1) for s, count, kept in settled if count]


def propose(
    drafter: Drafter,
    batcher: Batcher,
    drawn: abc.Callable[[np.ndarray], np.ndarray],
    ends: abc.Container[int],
    chunks: list[Chunk],
) -> Drafts | None:
    """Return what a drafter proposes for the running rows, cut to what can be kept and has room, or None.

    `drawn` returns the tokens of the first rows, by how many each has; `ends`: the end tokens. Drafts take what chunks
    of prefill leave of the step, and only pages that are free: nobody waits for a draft or is preempted for one.
    """
    counts = [batcher.num_drawn(s) for s in batcher.running]
    tokens = drawn(np.array(counts))
    rows = [(s, text[:count]) for s, text, count in zip(batcher.running, tokens, counts, strict=True)]
    left = batcher.step_tokens - len(rows) - sum(chunk.end - chunk.start for chunk in chunks)
    proposed, drafts = drafter.propose(rows), list[abc.Sequence[int]]()
    if not any(map(len, proposed)):
        return None
    for (s, text), draft in zip(rows, proposed, strict=True):
        if not len(draft):
            drafts.append(())
            continue
        most = max(min(s.limit - len(text) - 1, left), 0)  # the last token is drawn, never read
        last = (i for i, token in enumerate(draft[:most]) if token in ends and not s.ignore_eos)  # and so is an end
        drafts.append(draft[: next(last, most)])
        left -= len(drafts[-1])
    if not any(map(len, drafts)):
        return None
    room = batcher.make_room_ahead(np.array([len(draft) for draft in drafts]))
    fitting = [draft[:most] for draft, most in zip(drafts, room, strict=True)]
    return Drafts(rows, fitting) if room.any() else None
