"""The state of the decoding rows on the device: what each has drawn, and what ends it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from core import SampleId, Tokenizer
from engine import native
from engine.batcher import Removed, Started
from engine.drafts import Drafts
from engine.host import upload
from engine.sequence import Sequence
from sampling import SamplingConfig, sample


class Rows:
    """Row i of each tensor is the i-th running sequence, as in the batcher. Rows behind those are dead."""

    def __init__(
        self, num_rows: int, max_tokens: int, sampling: SamplingConfig, eos_ids: Iterable[int], device: torch.device
    ):
        """`max_tokens`: of a response."""

        def state(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.sampling, self.device = sampling, device
        self.own: dict[SampleId, SamplingConfig] = {}  # of samples that are drawn otherwise (server/loop.py)
        self.samplings = [sampling] * num_rows  # of each row
        self.ends = frozenset(eos_ids)
        self.eos_ids = torch.tensor(sorted(self.ends), dtype=torch.int64, device=device)
        self.last_token = state(num_rows)  # sampled, not yet in the cache
        self.length = state(num_rows)  # tokens in the cache
        self.count = state(num_rows)  # response tokens so far
        self.limit = state(num_rows)
        self.key = state(num_rows)
        self.heeds_eos = state(num_rows, dtype=torch.bool)
        self.ended = state(num_rows) + 1  # 0: the row decodes; else 2 * its tokens + (1: it stopped, 0: at its limit)
        self.tokens = state(num_rows, max_tokens + 1)  # one more, for what an ended row draws
        self.logprobs = state(num_rows, max_tokens + 1, dtype=torch.float32)
        self.all: tuple[Tensor, ...] = (self.last_token, self.length, self.count, self.limit, self.key)
        self.all += (self.heeds_eos, self.ended, self.tokens, self.logprobs)
        self.places = native.Rows.of(self)
        self.host = np.zeros(
            (num_rows, max_tokens + 1), np.int64
        )  # tokens that `drawn` has brought: the first of a row,
        self.known = np.zeros(num_rows, np.int64)  # and how many
        self.reader = torch.cuda.Stream() if device.type == "cuda" else None
        self.moved = torch.cuda.Event() if device.type == "cuda" else None  # after the last moves of rows

    def load(self, started: Started) -> None:
        """Begin to decode sequences, in the rows that the batcher gave them: the next ones."""
        sequences = started.sequences
        if not sequences:
            return
        rows = slice(sequences[0].row, sequences[-1].row + 1)
        for tensor, values in (
            (self.length, [s.num_tokens - started.is_late for s in sequences]),
            (self.last_token, [s.prompt_ids[-1] for s in sequences]),
            (self.count, [len(s.token_ids) for s in sequences]),
            (self.limit, [s.limit for s in sequences]),
            (self.key, [s.key for s in sequences]),
            (self.heeds_eos, [not s.ignore_eos for s in sequences]),
            (self.ended, [0] * len(sequences)),
        ):
            tensor[rows] = upload(values, self.device, tensor.dtype)
        for s in sequences:
            self.known[s.row], self.samplings[s.row] = 0, self.own.get(s.id, self.sampling)
            if s.token_ids:
                self.tokens[s.row, : len(s.token_ids)] = upload(s.token_ids, self.device)
                self.logprobs[s.row, : len(s.token_ids)] = upload(s.logprobs, self.device, torch.float32)

    def draw(self, rows: slice, logits: Tensor) -> None:
        """Draw the next token of each of `rows` that has not ended, record it, mark the rows that it ends. [n, V]"""
        count = self.count[rows]
        token, logprob = self._sample(rows, logits, count)
        if native.takes(logprob, self.logprobs):
            native.settle(self.places, rows.start, token, logprob)
            return
        alive = self.ended[rows] == 0
        self.tokens[rows].scatter_(1, count[:, None], token[:, None])
        self.logprobs[rows].scatter_(1, count[:, None], logprob[:, None])
        self.last_token[rows] = token.where(alive, self.last_token[rows])
        count += alive
        self._end(rows, token, alive)

    def _sample(self, rows: slice | Tensor, logits: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token for each of `rows`, some perhaps by samplings of their own. [n], [n, V], [n] -> [n], [n]"""
        keys = self.key[rows] if isinstance(rows, slice) else self.key.index_select(0, rows)
        if not self.own:
            return sample(logits, keys, count, self.sampling)
        kinds = self.samplings[rows] if isinstance(rows, slice) else [self.samplings[row] for row in rows.tolist()]
        token, logprob = torch.empty_like(keys), torch.empty(len(keys), device=self.device)
        for kind in dict.fromkeys(kinds):
            at = upload([i for i, other in enumerate(kinds) if other == kind], self.device)
            token[at], logprob[at] = sample(logits[at], keys[at], count[at], kind)
        return token, logprob

    def _end(self, rows: slice, token: Tensor, alive: Tensor) -> None:
        """Mark the rows that end with the token that each of the `alive` has drawn."""
        count = self.count[rows]
        stopped = (token[:, None] == self.eos_ids).any(1) & self.heeds_eos[rows]
        self.ended[rows] += (alive & (stopped | (count >= self.limit[rows]))) * (2 * count + stopped)

    def drawn(self, counts: np.ndarray) -> np.ndarray:
        """Return the tokens of the first rows, which have so many. Waits for the steps under way. [n, max_tokens + 1]

        Only columns that are new for some row are copied from the device. The array is the next call's, too.
        """
        n, new = len(counts), slice(int(self.known[: len(counts)].min()), int(counts.max()))
        self.host[:n, new] = self.tokens[:n, new].cpu().numpy()
        self.known[:n] = counts
        return self.host[:n]

    def verify(self, drafts: Drafts, logits: Callable[[slice], Tensor]) -> None:
        """Draw at each of the T places, keep each row's draws up to the first that its draft has not foreseen.

        `logits` returns those of some of the places: of no more at a time than there are rows, as the memory plan has
        it. Rows that mean nothing may follow the last. No row has ended before.
        """
        n, row = len(drafts.kept), upload(drafts.row, self.device)
        count = upload(drafts.drawn, self.device)
        parts = [slice(i, i + len(self.key)) for i in range(0, len(row), len(self.key))]
        drawn = [self._sample(row[part], logits(part)[: len(row[part])], count[part]) for part in parts]
        token, logprob = drawn[0] if len(drawn) == 1 else map(torch.cat, zip(*drawn))
        if native.takes(logprob, self.logprobs):
            native.settle(self.places, 0, token, logprob, drafts)
            return
        self.tokens[row, count], self.logprobs[row, count] = token, logprob
        newest = token[upload(drafts.settle(token.cpu().numpy()), self.device)]
        kept = upload(drafts.kept, self.device)
        self.last_token[:n] = newest
        self.count[:n] += kept
        self.length[:n] += kept
        self._end(slice(0, n), newest, self.ended[:n] == 0)

    def read(self, rows: list[int], longest: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the tokens and log-probs of rows whose flags have arrived."""
        with self.reading():
            index = upload(rows, self.device)
            return self.tokens[index, :longest].tolist(), self.logprobs[index, :longest].tolist()

    def reading(self) -> AbstractContextManager:
        """Read inside what steps before the one under way have drawn, without waiting for that."""
        if self.reader and self.moved:
            self.reader.wait_event(self.moved)
        return torch.cuda.stream(self.reader) if self.reader else nullcontext()

    def close(self, removed: Removed, num_running: int) -> None:
        """Move rows into the holes that others left; the rows behind the first `num_running` are dead."""
        if removed.rows:
            source, target = upload(removed.rows, self.device).T
            for tensor in self.all:
                tensor[target] = tensor[source]
            source, target = zip(*removed.rows)
            self.host[[*target]], self.known[[*target]] = self.host[[*source]], self.known[[*source]]
            for a, b in removed.rows:
                self.samplings[b] = self.samplings[a]
        self.ended[num_running : num_running + removed.num_rows] = 1
        if self.moved:
            self.moved.record()


def stopped_by_text(
    asking: list[tuple[Sequence, int]],
    drawn: Tensor,
    tokenizer: Tokenizer,
    known: dict[tuple[frozenset[str], int], bool],
) -> dict[Sequence, int]:
    """Return the sequences that have one of their stop texts in the newest tokens of their turn, and where.

    asking: sequences with stop texts, and how many tokens each has; of several counts of a sequence, in order, the
    first with a stop text is returned; drawn: the tokens of all rows [rows, limit].

    known: which tokens may end which stop texts, as found so far; the texts of other rows are not decoded.

    The text is what graders see, without special tokens; only a stop text that names one finds it.
    """
    special, stops = tokenizer.all_special_tokens, {stop for s, _ in asking for stop in s.stop}
    names_one = {stop: any(name in stop for name in special) for stop in stops}
    windows = [4 * max(map(len, s.stop)) + 8 for s, _ in asking]  # a character is at most 4 tokens
    columns = (np.array([[count] for _, count in asking]) - max(windows) + np.arange(max(windows))).clip(0)
    rows = upload([[s.row] for s, _ in asking], drawn.device)
    tokens = drawn[rows, upload(columns, drawn.device)].tolist()
    stopped: dict[Sequence, int] = {}
    for (s, count), ids, window in zip(asking, tokens, windows, strict=True):
        key = frozenset(stop[-1] for stop in s.stop), ids[-1]
        if key not in known:  # of the second token a decoder keeps the space before it
            text = tokenizer.decode([ids[-1]] * 2, skip_special_tokens=False)
            known[key] = not key[0].isdisjoint(text) or "\ufffd" in text  # a part of a character may complete any
        if s in stopped or not known[key] or not (own := min(window, count - s.turn_start)):
            continue
        kinds = {names_one[stop] for stop in s.stop}
        texts = {kind: tokenizer.decode(ids[-own:], skip_special_tokens=not kind) for kind in kinds}
        stopped |= {s: count} if any(stop in texts[names_one[stop]] for stop in s.stop) else {}
    return stopped
