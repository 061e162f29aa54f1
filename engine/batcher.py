"""Who waits, who is prefilled in which chunks, who decodes in which row, by which pages. Host bookkeeping, no torch.

A sequence waits, is admitted (it has pages for its whole context), is prefilled in chunks beside the decoding rows, and
runs. Sequences with equal contexts, such as a group's responses, follow one leader through the prefill and take its
pages over: shared where the attention can read shared pages, copied where it cannot. When pages run out the newest
leaves, and waits in front.

Between two turns of a sequence its pages are parked, as long as nobody else needs them: then the next turn computes its
reply only.

The engine does on the device what is decided here: copies of pages, moves of pages and of rows.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from core import SampleId
from engine.pages import Admission, PageMove, Pages, compact, pages_needed
from engine.sequence import Chunk, EngineStats, Parked, Prefill, Sequence

PageCopy = tuple[int, int]  # (from, to)


@dataclass(slots=True)
class Started:
    """Sequences that begin to decode, in the order of their rows."""

    is_late: bool = False  # their pages hold their context but for the last token
    sequences: list[Sequence] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)  # to make before
    resumed: list[tuple[Parked, Sequence]] = field(default_factory=list)  # have pages again; still in prefill
    predicts: list[int] = field(default_factory=list)  # which token of the chunks draws each one's next


@dataclass(frozen=True, slots=True)
class Removed:
    """What must move where sequences have left."""

    pages: list[PageMove]
    rows: list[tuple[int, int]]  # (from, to)
    num_rows: int  # that are no longer in use


class Batcher:
    """The books of one engine. Row i decodes `running[i]`; waiting sequences are in order."""

    def __init__(self, max_running: int, step_tokens: int, longest: int):
        """`step_tokens`: of one forward, at most; `longest`: pages of a sequence, at most."""
        self.max_running, self.step_tokens = max_running, step_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefills: dict[tuple[int, ...], Prefill] = {}  # by context, in order of admission
        self.running: list[Sequence] = []
        self.parked: dict[SampleId, Parked] = {}  # the longest first
        self.num_admissions = self.num_stops = 0  # num_stops: running sequences that have stop texts
        self.length = np.zeros(max_running, np.int64)  # tokens of a row in the cache
        self.num_pages = np.zeros(max_running, np.int64)  # of a row
        self.table = np.zeros((max_running, longest), np.int64)  # the pages of a row

    def use(self, pages: Pages, stats: EngineStats) -> None:
        """Give out these pages from now on, and count there."""
        self.pages, self.stats, self.parked = pages, stats, {}
        self.admission = Admission(pages.size, pages.page_size, self.max_running, pages.shares)

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.prefills or self.waiting)

    @property
    def admitted(self) -> list[Sequence]:
        return self.running + [s for p in self.prefills.values() for s in (p.leader, *p.followers)]

    def num_drawn(self, sequence: Sequence) -> int:
        """Return the response tokens of a running sequence; the newest is not in the cache."""
        return int(self.length[sequence.row]) - len(sequence.prompt_ids) + 1

    def live_tokens(self) -> dict[SampleId, int]:
        """Return how many response tokens each sequence has."""
        everyone = (*self.admitted, *self.waiting)
        return {s.id: self.num_drawn(s) if s.row >= 0 else len(s.token_ids) for s in everyone}

    # ---- before a step ---------------------------------------------------------------------------------------

    def wait(self, sequence: Sequence) -> None:
        """Have a sequence wait for its pages. What is parked of another transcript of it is of no use any more."""
        if (parked := self.parked.get(sequence.id)) and not parked.begins(sequence):
            self.forget([sequence.id])
        self.waiting.append(sequence)

    def admit(self, takes_late: bool = True) -> Started:
        """Give waiting sequences their pages. Those whose prompt is in the cache already begin to decode at once.

        `takes_late`: if not, they compute it as others do.
        """
        late = Started(is_late=True)
        if self.parked:
            parked_pages = sum(len(parked.pages) for parked in self.parked.values())
            self.stats.peak_parked_pages = max(self.stats.peak_parked_pages, parked_pages)
        self._admit(late, takes_late)
        while self.waiting and self.parked and len(self.admitted) + len(late.sequences) < self.max_running:
            others = [id for id in self.parked if id != self.waiting[0].id]
            if not others:
                break
            self.forget(others[:1])  # nobody waits for pages that are only kept
            self._admit(late, takes_late)
        self.seat(late)
        self.stats.peak_pages = max(self.stats.peak_pages, self.pages.used)
        return late

    def _admit(self, late: Started, takes_late: bool) -> None:
        state = len(self.admitted) + len(late.sequences), self.pages.free
        donors = self._computing, self._cached if takes_late else lambda _: None
        kept = self._parked_pages
        for sequence, donor, is_late, shared, own in self.admission.admit(self.waiting, *state, *donors, kept):
            if parked := None if donor else self._parked(sequence):
                self.pages.resume(parked, sequence)
                late.resumed.append((parked, sequence))
            self.forget([sequence.id])
            for page in donor.pages[:shared] if donor else ():
                self.pages.share(sequence, page)
            for _ in range(own):
                self.pages.take(sequence)
            context = sequence.context
            if donor and is_late:
                late.sequences.append(sequence)
                late.copies += _copies(donor, sequence)
            elif donor:
                self.prefills[context].followers.append(sequence)
            else:
                known = parked.num_tokens if parked else 0
                self.prefills[context] = Prefill(sequence, context, known)
                self.stats.resumed_tokens += known
                self.stats.recomputed_tokens += 0 if parked else sequence.num_computed
            self.stats.shared_tokens += len(context) - is_late if donor else 0
            sequence.admitted = self.num_admissions
            self.num_admissions += 1

    def _computing(self, sequence: Sequence) -> Sequence | None:
        prefill = self.prefills.get(sequence.context)
        return prefill.leader if prefill else None

    def _cached(self, sequence: Sequence) -> Sequence | None:
        running = (s for s in self.running if not s.has_old_kv)
        return next((s for s in running if s.prompt_ids == sequence.prompt_ids), None)

    def _parked(self, sequence: Sequence) -> Parked | None:
        """Return the parked pages that begin a sequence, unless another computes the same context now."""
        parked = self.parked.get(sequence.id)
        return parked if parked and parked.begins(sequence) and sequence.context not in self.prefills else None

    def _parked_pages(self, sequence: Sequence) -> list[int]:
        parked = self._parked(sequence)
        return parked.pages if parked else []

    def full_rows(self) -> list[Sequence]:
        """Return the sequences whose next token needs a new page."""
        n = len(self.running)
        full = self.length[:n] == self.num_pages[:n] * self.pages.page_size
        return [self.running[row] for row in np.flatnonzero(full)]

    def make_room(self) -> Iterator[Sequence]:
        """Give a page to every row that has filled its last one. Yields whom the caller must `evict` for that."""
        for sequence in self.full_rows():
            while not self.pages.free and sequence.row >= 0:
                if self.parked:
                    self.forget([next(iter(self.parked))])
                    continue
                newest = max(self.admitted, key=lambda s: s.admitted)
                yield newest
                self.waiting.appendleft(newest)
                self.stats.preemptions += 1
            if sequence.row >= 0:
                self._grow(sequence)
        self.stats.peak_pages = max(self.stats.peak_pages, self.pages.used)

    def make_room_ahead(self, wanted: np.ndarray) -> np.ndarray:
        """Give rows pages for drafts of so many tokens, as long as pages are free. Return how many have room. [n]

        Until `count_verified`, which takes back the pages that no token has filled.
        """
        n, page_size = len(wanted), self.pages.page_size
        needed = pages_needed(self.length[:n] + 1 + wanted, page_size)
        for row in np.flatnonzero(needed > self.num_pages[:n]):
            while self.num_pages[row] < needed[row] and self.pages.free:
                self._grow(self.running[row])
        return np.minimum(wanted, self.num_pages[:n] * page_size - self.length[:n] - 1)

    def _grow(self, sequence: Sequence) -> None:
        row = sequence.row
        self.table[row, self.num_pages[row]] = self.pages.take(sequence)
        self.num_pages[row] += 1

    def plan_chunks(self) -> list[Chunk]:
        """Return the pieces of contexts that fit beside the decoding rows."""
        budget = max(self.step_tokens - len(self.running), 1)
        chunks = []
        for prefill in self.prefills.values():
            if budget <= 0:
                break
            end = min(len(prefill.context), prefill.cached + budget)
            chunks.append(Chunk(prefill, prefill.cached, end))
            budget -= end - prefill.cached
        return chunks

    # ---- after it --------------------------------------------------------------------------------------------

    def count_decoded(self, n: int) -> None:
        """Note that the first `n` rows have one token more in the cache."""
        self.length[:n] += 1
        self.stats.decode_steps += n > 0
        self.stats.decoded_tokens += n

    def count_verified(self, drafted: np.ndarray, kept: np.ndarray) -> list[PageMove]:
        """Note that the first n rows have `kept` tokens more in the cache, of `drafted` and the newest. [n], [n]

        Returns the moves of pages that the pages leave behind that were taken for more.
        """
        n = len(kept)
        self.length[:n] += kept
        self.stats.decode_steps += 1
        self.stats.decoded_tokens += int(kept.sum())
        self.stats.drafted_tokens += int(drafted.sum())
        self.stats.accepted_tokens += int(kept.sum()) - n
        needed = pages_needed(self.length[:n], self.pages.page_size)
        spare = np.flatnonzero(self.num_pages[:n] > needed)
        if not len(spare):
            return []
        self.num_pages[spare] = needed[spare]
        return self._release([self.running[row] for row in spare], needed[spare])

    def count_prefilled(self, chunks: list[Chunk]) -> Started:
        """Note that chunks are in the cache. The sequences of contexts that are complete begin to decode."""
        done, offset = Started(), 0
        for prefill, start, end in chunks:
            offset += end - start
            prefill.cached = end
            if end < len(prefill.context):
                continue
            del self.prefills[prefill.context]
            done.sequences += [prefill.leader, *prefill.followers]
            done.predicts += [offset - 1] * (1 + len(prefill.followers))
            for follower in prefill.followers:
                done.copies += _copies(prefill.leader, follower)
        self.stats.prefilled_tokens += offset
        self.seat(done)
        return done

    def seat(self, started: Started) -> None:
        """Append sequences to the running rows."""
        for row, s in enumerate(started.sequences, len(self.running)):
            s.row = row
            self.length[row], self.num_pages[row] = s.num_tokens - started.is_late, len(s.pages)
            self.table[row, : len(s.pages)] = s.pages
            self.pages.seat(s, row)
            self.num_stops += bool(s.stop)
        self.running += started.sequences

    def withdraw(self, ids: set[SampleId]) -> list[Sequence]:
        """Take sequences that wait out of the queue; forget what is parked of them."""
        self.forget(ids)
        gone = [s for s in self.waiting if s.id in ids]
        self.waiting = deque(s for s in self.waiting if s.id not in ids)
        return gone

    def park(self, sequence: Sequence, parked: Parked) -> None:
        """Keep the pages of a sequence whose turn has ended; it is to be removed after this."""
        self.parked[sequence.id] = parked
        if self.pages.shares:  # a draft may have filled more, behind a stop text
            self.pages.release([sequence], [pages_needed(parked.num_tokens, self.pages.page_size)])
        self.pages.park(sequence, parked)

    def forget(self, ids: Iterable[SampleId]) -> None:
        """Free what is parked of these sequences: they will be computed again."""
        self.pages.release([self.parked.pop(id) for id in ids if id in self.parked])

    def evict(self, sequences: list[Sequence]) -> Removed:
        """Take admitted sequences out, unfinished. Who followed one through its prefill waits again, in front."""
        leaderless: list[Sequence] = []
        for prefill in list(self.prefills.values()):
            prefill.followers = [s for s in prefill.followers if s not in sequences]
            if prefill.leader in sequences:
                del self.prefills[prefill.context]
                leaderless += prefill.followers
        removed = self.remove(sequences + leaderless)
        self.waiting.extendleft(reversed(leaderless))
        return removed

    def remove(self, sequences: list[Sequence]) -> Removed:
        """Free the pages and rows of sequences and close the holes that they leave."""
        page_moves = self._release(sequences)
        gone = [s.row for s in sequences if s.row >= 0]
        self.num_stops -= sum(bool(s.stop) for s in sequences if s.row >= 0)
        row_moves = compact(gone, len(self.running))
        for s in sequences:
            s.row = -1
        for source, target in row_moves:
            moved = self.running[target] = self.running[source]
            moved.row = target
            for array in (self.length, self.num_pages, self.table):
                array[target] = array[source]
            self.pages.seat(moved, target)
        del self.running[len(self.running) - len(gone) :]
        return Removed(page_moves, row_moves, len(gone))

    def _release(self, sequences: list[Sequence], kept: Iterable[int] = repeat(0)) -> list[PageMove]:
        """Free the pages of sequences but for the first `kept` of each, and note where that moves others."""
        moves = self.pages.release(sequences, kept)
        for move in moves:
            if move.holder.row >= 0:
                self.table[move.holder.row, move.place] = move.target
        return moves


def _copies(donor: Sequence, taker: Sequence) -> list[PageCopy]:
    """Return the copies of pages that give one sequence another's KV, as far as its pages reach and are not shared."""
    return [(a, b) for a, b in zip(donor.pages, taker.pages) if a != b]
