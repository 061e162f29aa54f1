"""Steps under way on the device: the host reads one thing back from each, the rows that it ends.

On a CPU a step has ended when it returns. On a GPU the flags of a step arrive while the next step runs.
"""

from array import array
from collections import deque
from collections.abc import Collection
from itertools import chain, repeat

import torch
from torch import Tensor

from core import Sample, SampleId, Tokenizer
from engine.batcher import Batcher
from engine.drafts import Drafts
from engine.rows import stopped_by_text
from engine.runner import Runner
from engine.sequence import Parked, Sequence


class Flight:
    """Flags of one step on their way to the host, with the sequences that the rows were then.

    `asking`: those with stop texts, and how many tokens each had drawn; several counts where the step drew several.
    """

    def __init__(self, sequences: list[Sequence], ended: Tensor, asking: list[tuple[Sequence, int]]):
        self.sequences, self.event = list(sequences), torch.cuda.Event() if ended.is_cuda else None
        self.asking = asking
        self.host = torch.empty(len(sequences), dtype=ended.dtype, pin_memory=ended.is_cuda)
        self.host.copy_(ended[: len(sequences)], non_blocking=True)
        if self.event:
            self.event.record()

    def land(self) -> list[tuple[Sequence, int]]:
        """Wait for the flags; return (sequence, flag) of every row that has ended."""
        if self.event:
            self.event.synchronize()
        return [(self.sequences[row], int(self.host[row])) for row in self.host.nonzero()[:, 0].tolist()]


class Flights:
    """The steps of one engine that are under way, and the samples that ended in those that have landed."""

    def __init__(self, batcher: Batcher, runner: Runner, tokenizer: Tokenizer | None):
        self.batcher, self.runner, self.tokenizer = batcher, runner, tokenizer
        self.launched: deque[Flight] = deque()
        self.finished: list[Sample] = []  # for the engine to return
        self.may_end: dict[tuple[frozenset[str], int], bool] = {}  # as in `stopped_by_text`

    def take_off(self, drafts: Drafts | None = None) -> None:
        """Send the flags of the step that was launched to the host."""
        if running := self.batcher.running:
            asking = []
            if self.batcher.num_stops:
                new_counts = chain(drafts.kept.tolist() if drafts else [], repeat(1))
                for s, new in zip(running, new_counts, strict=False):
                    count = self.batcher.num_drawn(s)
                    asking += [(s, i) for i in range(count - new + 1, count + 1)] if s.stop else []
            self.launched.append(Flight(running, self.runner.rows.ended, asking))

    def land(self, version: int, leaving: int = 0) -> None:
        """Wait for all steps but the newest `leaving`, so that the host knows what the device knows.

        `version`: of the weights that sampled.
        """
        while len(self.launched) > leaving:
            self._land_oldest(version)

    def take(self, ids: Collection[SampleId] | None = None) -> list[Sample]:
        """Return the samples that finished, all or those named, and forget them."""
        taken = [sample for sample in self.finished if ids is None or sample.id in ids]
        self.finished = [] if ids is None else [sample for sample in self.finished if sample.id not in ids]
        return taken

    def _land_oldest(self, version: int) -> None:
        """Take out the sequences that the oldest flight reports as ended, and those that a stop text ends."""
        flight = self.launched.popleft()
        ended = {s: flag for s, flag in flight.land() if s.row >= 0}  # else an earlier flight's
        if asking := [(s, count) for s, count in flight.asking if s.row >= 0]:
            assert self.tokenizer, "`add` refuses stop texts without a tokenizer"
            with self.runner.rows.reading():
                stopped = stopped_by_text(asking, self.runner.rows.tokens, self.tokenizer, self.may_end)
            ended |= {s: 2 * count + 1 for s, count in stopped.items()}
        if not ended:
            return
        # What a step under way draws for them, and a draft behind a stop text, is dropped.
        dropped = sum(self.batcher.num_drawn(s) - flag // 2 for s, flag in ended.items())
        self.batcher.stats.decoded_tokens -= dropped
        tokens, logprobs = self.runner.rows.read([s.row for s in ended], max(ended.values()) // 2)
        for (s, flag), ids, values in zip(ended.items(), tokens, logprobs, strict=True):
            s.is_taken = False
            length = flag // 2
            reason = "stop" if flag % 2 else "length" if length == s.max_new_tokens else "cut"
            token_ids = array("i", ids[:length])
            drawn = token_ids, array("f", values[:length]), reason, s.spans_to(length, version)
            taken = self.runner.experts(s, len(s.prompt_ids) + length - 1)
            self.finished.append(Sample(s.prompt_index, s.response_index, s.epoch, *drawn, taken))
            if s.has_turns and reason == "stop" and not s.has_old_kv:
                parked = Parked(s.prompt_ids, token_ids)
                self.batcher.park(s, parked)
                self.runner.park(s, parked)
        self.runner.close(self.batcher.remove(list(ended)), len(self.batcher.running))

    def evict(self, sequences: list[Sequence], version: int) -> None:
        """Take admitted sequences out unfinished; they keep their tokens, their KV is dropped."""
        running = [s for s in sequences if s.row >= 0]
        counts = [self.batcher.num_drawn(s) for s in running]
        tokens, logprobs = self.runner.rows.read([s.row for s in running], max(counts, default=0))
        for s, count, ids, values in zip(running, counts, tokens, logprobs, strict=True):
            s.token_ids, s.logprobs = array("i", ids[:count]), array("f", values[:count])
            s.spans, s.has_old_kv = s.spans_to(count, version), False
        if sequences:
            self.runner.close(self.batcher.evict(sequences), len(self.batcher.running))
