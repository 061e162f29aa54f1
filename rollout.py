"""The generation engine: a paged KV cache, continuous batching, sampling, abort, preemption by recomputation.

Decode state lives in device tensors whose first `n` rows are the running sequences; the host mirrors only lengths
and page tables. Per decoded token the host reads one thing back: which rows have ended; on a GPU one step later, while
the next step runs (engine/graphs.py).

A sequence waits, is admitted (it has pages for its whole context), is prefilled in chunks beside the decoding rows, and
runs. Sequences with equal contexts, such as a group's responses, follow one leader through the prefill and take its
pages over: shared where the attention can read shared pages, copied where it cannot.
"""

import math
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from attention import Chunks, PageAttention
from config import check_options
from core import Sample, SampleId, Span
from engine.graphs import DecodeGraphs, Flight, upload
from engine.memory import RolloutConfig, kv_budget, kv_page_bytes, num_pages_for
from engine.pages import Pages, compact, has_room
from engine.sequence import EngineStats, Prefill, Sequence
from model import Model, Shard, check_split
from parallel import TensorParallel, World
from sampling import SamplingConfig, sample, sample_key, uniforms

ALONE = TensorParallel(World(0, 1, torch.device("cpu")))


class Engine:
    """Generates samples for one model replica. `add`, then `step` until `is_idle`; `abort` and `export` whenever."""

    def __init__(
        self,
        model: Model,
        config: RolloutConfig,
        sampling: SamplingConfig,
        eos_ids: Iterable[int],
        tokenizer: Any = None,
        parallel: TensorParallel = ALONE,
        sizes: Iterable[int] = (),
    ):
        """Only `stop` texts and text prompts need the `tokenizer`.

        With `parallel`, all its ranks make the same calls in the same order and get the same samples. `sizes` are the
        tensor-parallel sizes, besides its own, that `regroup` may ask for. Raises ValueError when settings are outside
        their limits, a size does not divide the model, or the memory does not hold one full sequence.
        """
        check_options(config, "rollout")
        check_options(sampling, "sampling")
        for size in {parallel.size, *sizes}:
            check_split(model.shape, size)
        self.config, self.sampling, self.tokenizer = config, sampling, tokenizer
        self.version, self.stats = 0, EngineStats()  # the version is the weights', stamped on finished samples
        self.waiting: deque[Sequence] = deque()
        self.prefills: dict[tuple[int, ...], Prefill] = {}  # by context, in order of admission
        self.running: list[Sequence] = []
        self.admissions = self.num_stops = 0  # num_stops: running sequences that have stop texts
        self.flights: deque[Flight] = deque()  # flags of launched steps, not read yet
        self.finished: list[Sample] = []  # read between two steps, for the next to return
        shape, weight = model.shape, model.embed.weight
        self.device, fused = weight.device, self._is_fused(weight.device)
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            raise ValueError(f"the model is on {self.device}; call torch.cuda.set_device({self.device.index}) first")
        rows, page = config.max_running, config.page_size
        if config.kv_gib == 0:  # what is free now: the sizes share it
            config = replace(config, kv_gib=kv_budget(config, self.device) / 2**30)
        own = {n: (config, shape, weight.dtype, self.device, n) for n in {parallel.size, *sizes}}
        self.num_pages = {n: num_pages_for(*args) for n, args in own.items()}  # by tensor-parallel size
        most_bytes = max(pages * kv_page_bytes(config, shape, weight.dtype, n) for n, pages in self.num_pages.items())
        self.memory: Tensor | None = None
        self.memory_size, self.address = most_bytes // weight.itemsize, 0
        per_sequence = -(-(config.max_prompt_tokens + config.max_response_tokens) // page)

        def state(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.last_token = state(rows)  # sampled, not yet in the cache
        self.length = state(rows)  # tokens in the cache
        self.count = state(rows)  # response tokens so far
        self.limit = state(rows)
        self.key = state(rows)
        self.heeds_eos = state(rows, dtype=torch.bool)
        self.ended = state(rows) + 1  # 0: the row decodes; else 2 * its tokens + (1: it stopped, 0: at its limit)
        columns = config.max_response_tokens + 1  # one more, for what an ended row draws
        self.tokens = state(rows, columns)
        self.logprobs = state(rows, columns, dtype=torch.float32)
        self.row_state: tuple[Tensor, ...] = (self.last_token, self.length, self.count, self.limit, self.key)
        self.row_state += (self.heeds_eos, self.ended, self.tokens, self.logprobs)
        self.eos_ids = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=self.device)
        # Host mirrors of the running rows. On CPU they are also read directly as tensors.
        self.host_length = np.zeros(rows, np.int64)
        self.host_pages = np.zeros(rows, np.int64)
        self.table = np.zeros((rows, per_sequence), np.int64)
        most_pages = max(self.num_pages.values())
        self.page_row = np.zeros(most_pages, np.int64)  # row of a page's sequence; `rows` while it is prefilled
        filled = torch.arange(page)[None] < torch.arange(page + 1)[:, None]  # [page + 1, page]
        self.bias = torch.zeros(page + 1, page).masked_fill(~filled, -torch.inf).to(weight.dtype)
        on_gpu = self.device.type == "cuda"
        self.reader = torch.cuda.Stream() if on_gpu else None
        self.moved = torch.cuda.Event() if on_gpu else None  # after the last moves of rows
        self.graphs = DecodeGraphs(self.ended, rows, per_sequence) if fused else None
        if fused:
            self.device_table = state(rows, per_sequence, dtype=torch.int32)
            # Two, in turns: the copy of the step before may still be on its way.
            self.sent_tables = deque(
                torch.zeros(rows, per_sequence, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)
            )
        self.shards: dict[int, Shard] = {}
        self._enter(model, parallel)

    @staticmethod
    def _is_fused(device: torch.device) -> bool:
        """Whether to decode by fused kernels, with shared pages; the tests say yes on a CPU too."""
        return device.type == "cuda"

    # ---- interface -------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.prefills or self.waiting or self.finished)

    @property
    def pages_used(self) -> int:
        return self.pages.used

    def load_weights(self, model: Model, version: int) -> None:
        """Decode with `model` from now on; where a shard can be a view nothing is copied. Wants an idle engine.

        Copies are made again by the next `regroup` or `step`, so that weights that are regrouped are not copied twice.
        Weights that were changed in place need this too.
        """
        assert self.is_idle, "new weights while sequences run would mix two policies in one sample"
        self.version = version
        if model is self.weights.model:
            self.is_stale = True
            return
        self.shards.clear()
        if self.graphs:
            self.graphs.clear()
        self._enter(model, self.parallel)

    def regroup(self, parallel: TensorParallel) -> None:
        """Decode in the group `parallel` from now on: same weights, same KV memory. Wants an idle engine.

        Shards are views of the full weights; those that must be copies (`Shard.copied_bytes`) are copied layer by
        layer, and so are they, without counting, when the size stays but the weights are new. (RollPacker, section 4.2)
        """
        assert self.is_idle, "sequences that run hold pages of the old shape"
        assert parallel.size in self.num_pages, f"the engine was made for the sizes {sorted(self.num_pages)}"
        if parallel is not self.parallel:
            self._settle()
            self._enter(self.weights.model, parallel)
            self.stats.regroup_bytes += self.weights.copied_bytes
        self._refresh()

    def _refresh(self) -> None:
        if self.memory is None:
            self._take_memory()
        if self.is_stale:
            self.weights.refresh()
            self.is_stale = False

    def _enter(self, model: Model, parallel: TensorParallel) -> None:
        """Take the shards of `parallel` and give the KV memory the shape of their pages."""
        size = parallel.size
        if size in self.shards:
            self.shards[size].refresh()
        else:
            if not self.graphs:  # graphs hold addresses, so they need their shards; without them one size is enough
                self.weights = None
                self.shards.clear()
            self.shards[size] = Shard(model, parallel, self.config.prepack)
        self.parallel, self.weights, self.is_stale = parallel, self.shards[size], False
        if self.graphs:
            self.graphs.layout = size
        self.pages = Pages(self.num_pages[size], self.config.page_size, dense=not self.graphs)
        self._take_memory()

    @torch.inference_mode(False)  # what is made inside could not be changed outside
    def _take_memory(self) -> None:
        """Have memory for the pages, the old if it was not given back, and give it their shape."""
        shape = self.weights.shape
        if self.memory is None:
            self.memory = torch.zeros(self.memory_size, dtype=self.bias.dtype, device=self.device)
            before, self.address = self.address, self.memory.data_ptr()
            if self.graphs and self.address != before:
                self.graphs.clear()  # they hold the address
        page = self.weights.split.num_kv_heads, self.config.page_size, shape.head_dim
        pool_shape = (shape.num_layers, 2, self.pages.size, *page)  # one tensor, so that a page moves with one copy
        self.pool = self.memory[: math.prod(pool_shape)].view(pool_shape)

    def free_memory(self) -> None:
        """Give the memory of the KV pages back until the next step or regroup, on a CPU to the process only."""
        assert self.is_idle, "sequences that run have their pages there"
        self._settle()
        self.memory = self.pool = None

    def release(self) -> None:
        """Give up the KV memory and all that is made of the weights, until `take_back`. Wants an idle engine.

        What stays on the device is the state of the rows: a few numbers for each token of `max_running` responses.
        """
        self.free_memory()
        if self.graphs:
            self.graphs.clear()
        self.released = self.weights.model
        self.shards.clear()
        self.weights = None

    def take_back(self) -> None:
        """Have shards and KV memory again. The model has its weights back."""
        self._enter(self.released, self.parallel)

    def live_tokens(self) -> dict[SampleId, int]:
        """Return how many response tokens each sequence in here has."""
        everyone = (*self._admitted(), *self.waiting)
        return {s.id: self._num_drawn(s) if s.row >= 0 else len(s.token_ids) for s in everyone}

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, new or exported by another engine. Raises ValueError when it cannot fit."""
        self._check(sequence)
        sequence.is_taken = True
        self.waiting.append(sequence)

    def _check(self, sequence: Sequence) -> None:
        c, shape = self.config, self.weights.shape
        sequence.check(c.max_prompt_tokens, c.max_response_tokens, shape.max_positions, shape.vocab_size)
        if sequence.stop and self.tokenizer is None:
            raise ValueError(f"sequence {sequence.id} has stop texts; give the engine a tokenizer")

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Admit what fits; decode one token in every row and prefill some; return the samples that finished.

        On a CPU this is one forward, and the samples are its own. On a GPU it is a graph and a forward for the prefill,
        and the samples are those of the step before, whose flags have arrived meanwhile. After an exception from here
        only `abort` makes sense.
        """
        self._refresh()
        self._admit()
        if self.running:
            self._make_room()
        chunks = self._plan_chunks()
        if self.graphs and self.running:
            self._launch()
        if chunks or (self.running and not self.graphs):
            self._forward(chunks)
        if self.running:
            self.flights.append(Flight(self.running, self.ended))
        lag = 1 if self.graphs and not self.num_stops else 0
        while len(self.flights) > lag:
            self._land()
        finished, self.finished = self.finished, []
        return finished

    def abort(self, ids: Iterable[SampleId]) -> dict[SampleId, int]:
        """Drop sequences by id, free their pages at once and return how many response tokens each had."""
        ids = set(ids)
        thrown = {sequence.id: len(sequence.token_ids) for sequence in self.export(ids)}
        thrown |= {sample.id: len(sample.token_ids) for sample in self.finished if sample.id in ids}
        self.finished = [sample for sample in self.finished if sample.id not in ids]
        return thrown

    def export(self, ids: Iterable[SampleId]) -> list[Sequence]:
        """Take sequences out with all they need to continue, token by token the same, in another engine's `add`."""
        ids = set(ids)
        self._settle()
        admitted = [s for s in self._admitted() if s.id in ids]
        queued = [s for s in self.waiting if s.id in ids]
        self.waiting = deque(s for s in self.waiting if s.id not in ids)
        self._evict(admitted)
        for sequence in (*admitted, *queued):
            sequence.is_taken = False
        return admitted + queued

    def generate(
        self, prompts: list[str] | list[list[int]], num_responses: int = 1, seed: int = 0, **limits: Any
    ) -> list[list[Sample]]:
        """Return `num_responses` samples for each prompt, text or token ids. For notebooks and scripts.

        `limits` are fields of `Sequence`: max_new_tokens, stop, ignore_eos. Raises ValueError on what cannot be done;
        whatever goes wrong, and on Ctrl-C, the engine is idle again afterwards.
        """
        if not self.is_idle:
            raise ValueError("generate would mix with sequences under way; `abort` them or `step` to their end")
        if not isinstance(prompts, (list, tuple)) or num_responses < 1:
            raise ValueError("generate wants a list of prompts, texts or lists of token ids, and num_responses > 0")
        if self.tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("a text prompt needs a tokenizer; give the engine one, or token ids")
        limits = {"max_new_tokens": self.config.max_response_tokens, **limits}
        sequences = []
        for i, prompt in enumerate(prompts):
            ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            for r in range(num_responses):
                sequences.append(Sequence(i, r, 0, ids, sample_key(seed, 0, i, r), **limits))
                self._check(sequences[-1])  # all of them before any is queued
        for sequence in sequences:
            self.add(sequence)
        done: list[list[Sample | None]] = [[None] * num_responses for _ in prompts]
        with tqdm(total=len(prompts) * num_responses, desc="generate", disable=None, leave=False) as bar:
            try:
                while not self.is_idle:
                    for sample in self.step():
                        done[sample.prompt_index][sample.response_index] = sample
                        bar.update()
            except BaseException:
                self.abort([sequence.id for sequence in sequences])
                raise
        return done

    # ---- admission -------------------------------------------------------------------------------------------

    def _admitted(self) -> list[Sequence]:
        return self.running + [s for p in self.prefills.values() for s in (p.leader, *p.followers)]

    def _admit(self) -> None:
        """Give waiting sequences their pages while rows and pages last, in order."""
        num_admitted, late = len(self._admitted()), []
        while self.waiting and num_admitted < self.config.max_running:
            sequence = self.waiting[0]
            if self.pages.dense and self.pages.needed(sequence.num_tokens) > self.pages.free:
                break  # seen before the context is built and compared, step after step
            context = sequence.prompt_ids + tuple(sequence.token_ids)
            prefill = self.prefills.get(context)
            siblings = () if sequence.token_ids else self.running  # what is resumed is computed again
            donor = prefill.leader if prefill else next((s for s in siblings if s.prompt_ids == context), None)
            # Pages that the newcomer only reads. A late one decodes the prompt's last token again, for its logits.
            known = len(context) - (prefill is None)
            whole = known // self.config.page_size if donor and not self.pages.dense else 0
            needed = self.pages.needed(len(context)) - whole
            if not has_room(needed, self.pages.free, self.pages.size, num_admitted):
                break
            self.waiting.popleft()
            for page in donor.pages[:whole] if donor else []:
                self.pages.share(sequence, page)
            for _ in range(needed):
                self.page_row[self.pages.take(sequence)] = self.config.max_running
            if prefill:
                prefill.followers.append(sequence)
            elif donor:
                self._copy_pages([(donor, sequence)])
                late.append(sequence)
            else:
                self.prefills[context] = Prefill(sequence, context)
            self.stats.shared_tokens += known if donor else 0
            sequence.admitted = self.admissions
            self.admissions += 1
            num_admitted += 1
        self._load_rows(late, is_late=True)
        self.stats.peak_pages = max(self.stats.peak_pages, self.pages.used)

    def _plan_chunks(self) -> list[tuple[Prefill, int, int]]:
        """Return (prefill, from, to) pieces of context that fit beside the decoding rows."""
        budget = max(self.config.step_tokens - len(self.running), 1)
        chunks = []
        for prefill in self.prefills.values():
            if budget <= 0:
                break
            end = min(len(prefill.context), prefill.cached + budget)
            chunks.append((prefill, prefill.cached, end))
            budget -= end - prefill.cached
        return sorted(chunks, key=lambda chunk: chunk[1] == 0)  # what continues comes first, as Chunks wants it

    def _make_room(self) -> None:
        """Give a page to every row that has filled its last one; when none is left, preempt the newest sequence."""
        if self.flights and self.pages.free < len(self._full_rows()):
            self._settle()  # what has ended meanwhile makes room before anybody is preempted
        for sequence in self._full_rows():
            while not self.pages.free and sequence.row >= 0:
                newest = max(self._admitted(), key=lambda s: s.admitted)
                self._evict([newest])
                self.waiting.appendleft(newest)
                self.stats.preemptions += 1
            if row := sequence.row + 1:
                self._add_page(row - 1)
        self.stats.peak_pages = max(self.stats.peak_pages, self.pages.used)

    def _full_rows(self) -> list[Sequence]:
        n = len(self.running)
        full = self.host_length[:n] == self.host_pages[:n] * self.config.page_size
        return [self.running[row] for row in np.flatnonzero(full)]

    def _add_page(self, row: int) -> None:
        taken = self.pages.take(self.running[row])
        self.table[row, self.host_pages[row]] = taken
        self.page_row[taken] = row
        self.host_pages[row] += 1

    # ---- one forward -----------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Start one fused decode step over all rows. (GPU path)"""
        n = len(self.running)
        self.sent_tables.rotate()
        table = self.sent_tables[0][:n].copy_(torch.from_numpy(self.table[:n]))
        self.device_table[:n].copy_(table, non_blocking=True)
        self.graphs.run(self._decode_step, n, int(self.host_pages[:n].max()))
        self._count_decoded(n)

    def _decode_step(self, rows: int, width: int) -> None:
        """Decode one token in every row that has not ended, on tensors of fixed places, so that a graph can hold it."""
        alive = self.ended[:rows] == 0
        positions = (self.length[:rows] + 1) * alive - 1  # an ended row: -1
        table = self.device_table[:rows, :width]
        hidden = self.weights.decode(self.last_token[:rows], positions, table, self.pool)
        self.length[:rows] += alive
        self._advance(slice(0, rows), self.weights.logits(hidden))

    def _count_decoded(self, n: int) -> None:
        self.host_length[:n] += 1
        self.stats.decode_steps += n > 0
        self.stats.decoded_tokens += n

    def _forward(self, chunks: list[tuple[Prefill, int, int]]) -> None:
        """Compute `chunks`, on a CPU the decoding rows beside them; draw a token for every row that is due one."""
        n, device = 0 if self.graphs else len(self.running), self.device
        first = len(self.running) - n
        position = self.length[:n]
        decode = PageAttention(self, n, bool(chunks)) if n else None
        if chunks:
            new = Chunks(chunks, self.config.page_size, device, gather=self.graphs is not None)
            token_ids, positions, write_page = new.token_ids, new.positions, new.page
            if decode:
                token_ids = torch.cat((self.last_token[:n], token_ids))
                positions, write_page = torch.cat((position, positions)), torch.cat((decode.page, write_page))
        else:
            token_ids, positions, write_page = self.last_token[:n], position, decode.page
        offset = positions % self.config.page_size

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_pool, v_pool = self.pool[layer, 0], self.pool[layer, 1]
            k_pool[write_page, :, offset] = k
            v_pool[write_page, :, offset] = v
            if not chunks:
                return decode(q, k_pool, v_pool)
            parts = [decode(q[:n], k_pool, v_pool)] if decode else []
            return torch.cat((*parts, new.attend(layer, q[n:], k[n:], v[n:], k_pool, v_pool)))

        hidden = self.weights(token_ids, positions, attend)
        self.length[:n] += 1
        self._count_decoded(n)
        if chunks:
            self.stats.prefilled_tokens += len(new.token_ids)
            last = list(range(n)) + [n + row for row in self._finish_prefills(chunks)]
            hidden = hidden[upload(last, device)]
        if len(hidden):
            self._advance(slice(first, len(self.running)), self.weights.logits(hidden))

    def _finish_prefills(self, chunks: list[tuple[Prefill, int, int]]) -> list[int]:
        """Give rows to the contexts that are now complete; return which chunk token predicts for each new row."""
        predicts, done, offset = [], [], 0
        for prefill, start, end in chunks:
            offset += end - start
            prefill.cached = end
            if end < len(prefill.context):
                continue
            del self.prefills[prefill.context]
            members = [prefill.leader, *prefill.followers]
            predicts += [offset - 1] * len(members)
            done += members
            self._copy_pages([(prefill.leader, follower) for follower in prefill.followers])
        self._load_rows(done)
        return predicts

    def _copy_pages(self, pairs: list[tuple[Sequence, Sequence]]) -> None:
        """Copy the KV of one sequence to another's pages, as far as those reach and are not shared."""
        moves = [(a, b) for donor, taker in pairs for a, b in zip(donor.pages, taker.pages) if a != b]
        if moves:
            source, target = upload(moves, self.device).T
            self.pool[:, :, target] = self.pool[:, :, source]

    def _load_rows(self, sequences: list[Sequence], is_late: bool = False) -> None:
        """Append sequences to the running rows. Their pages hold their context; a late one's all but the last token."""
        if not sequences:
            return
        first = len(self.running)
        rows = slice(first, first + len(sequences))
        for tensor, values in (
            (self.length, [s.num_tokens - is_late for s in sequences]),
            (self.last_token, [s.prompt_ids[-1] for s in sequences]),
            (self.count, [len(s.token_ids) for s in sequences]),
            (self.limit, [s.max_new_tokens for s in sequences]),
            (self.key, [s.key for s in sequences]),
            (self.heeds_eos, [not s.ignore_eos for s in sequences]),
            (self.ended, [0] * len(sequences)),
        ):
            tensor[rows] = upload(values, self.device, tensor.dtype)
        self.num_stops += sum(bool(s.stop) for s in sequences)
        for row, s in enumerate(sequences, first):
            s.row = row
            self.running.append(s)
            self.host_length[row], self.host_pages[row] = s.num_tokens - is_late, len(s.pages)
            self.table[row, : len(s.pages)] = s.pages
            self.page_row[s.pages] = row
            if s.token_ids:
                self.tokens[row, : len(s.token_ids)] = upload(s.token_ids, self.device)
                self.logprobs[row, : len(s.token_ids)] = upload(s.logprobs, self.device, torch.float32)

    # ---- after the forward -----------------------------------------------------------------------------------

    def _advance(self, rows: slice, logits: Tensor) -> None:
        """Draw the next token of each of `rows` that has not ended, record it, mark the rows that it ends. [n, V]"""
        alive, count = self.ended[rows] == 0, self.count[rows]
        uniform = uniforms(self.key[rows], count) if self.sampling.temperature else None
        token, logprob = sample(logits, uniform, self.sampling)
        self.tokens[rows].scatter_(1, count[:, None], token[:, None])
        self.logprobs[rows].scatter_(1, count[:, None], logprob[:, None])
        self.last_token[rows] = token.where(alive, self.last_token[rows])
        count += alive
        stopped = (token[:, None] == self.eos_ids).any(1) & self.heeds_eos[rows]
        self.ended[rows] += (alive & (stopped | (count >= self.limit[rows]))) * (2 * count + stopped)

    def _settle(self) -> None:
        """Wait for the steps under way, so that the host knows what the device knows."""
        while self.flights:
            self._land()

    def _land(self) -> None:
        """Take out the sequences that the oldest flight reports as ended, and those that a stop text ends."""
        ended = {s: flag for s, flag in self.flights.popleft().land() if s.row >= 0}  # else an earlier flight's
        if self.num_stops:
            ended |= {s: 2 * self._num_drawn(s) + 1 for s in self._stopped_by_text()}
        if not ended:
            return
        if self.flights:
            self.stats.decoded_tokens -= len(ended)  # the step under way draws nothing for them
        tokens, logprobs = self._read([s.row for s in ended], max(ended.values()) // 2)
        for (s, flag), ids, values in zip(ended.items(), tokens, logprobs, strict=True):
            s.is_taken = False
            length, reason = flag // 2, "stop" if flag % 2 else "length"
            drawn = tuple(ids[:length]), tuple(values[:length]), reason, (Span(0, length, self.version),)
            self.finished.append(Sample(s.prompt_index, s.response_index, s.epoch, *drawn))
        self._remove(list(ended))

    def _read(self, rows: list[int], longest: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the tokens and log-probs of rows whose flags have arrived, without waiting for the step under way."""
        if self.reader:
            self.reader.wait_event(self.moved)
        with torch.cuda.stream(self.reader) if self.reader else nullcontext():
            index = upload(rows, self.device)
            return self.tokens[index, :longest].tolist(), self.logprobs[index, :longest].tolist()

    def _num_drawn(self, sequence: Sequence) -> int:
        """Return the response tokens of a running sequence; the newest is not in the cache."""
        return int(self.host_length[sequence.row]) - len(sequence.prompt_ids) + 1

    def _stopped_by_text(self) -> list[Sequence]:
        """Return the running sequences that have one of their stop texts in their newest tokens.

        The text is what graders see, without special tokens; only a stop text that names one finds it.
        """
        asking = [s for s in self.running if s.stop]
        special, stops = self.tokenizer.all_special_tokens, {stop for s in asking for stop in s.stop}
        names_one = {stop: any(name in stop for name in special) for stop in stops}
        windows = [4 * max(map(len, s.stop)) + 8 for s in asking]  # a character is at most 4 tokens
        counts = np.array([self._num_drawn(s) for s in asking])
        columns = (counts[:, None] - max(windows) + np.arange(max(windows))).clip(0)
        rows = upload([[s.row] for s in asking], self.device)
        tokens = self.tokens[rows, upload(columns, self.device)].tolist()
        stopped = []
        for s, ids, window, count in zip(asking, tokens, windows, counts.tolist(), strict=True):
            newest, kinds = ids[-min(window, count) :], {names_one[stop] for stop in s.stop}
            texts = {kind: self.tokenizer.decode(newest, skip_special_tokens=not kind) for kind in kinds}
            stopped += [s] if count and any(stop in texts[names_one[stop]] for stop in s.stop) else []
        return stopped

    def _evict(self, sequences: list[Sequence]) -> None:
        """Take admitted sequences out unfinished; they keep their tokens, their KV is dropped."""
        running = [s for s in sequences if s.row >= 0]
        counts = [self._num_drawn(s) for s in running]
        tokens, logprobs = self._read([s.row for s in running], max(counts, default=0))
        for s, count, ids, values in zip(running, counts, tokens, logprobs, strict=True):
            s.token_ids, s.logprobs = ids[:count], values[:count]
        leaderless: list[Sequence] = []
        for prefill in list(self.prefills.values()):
            prefill.followers = [s for s in prefill.followers if s not in sequences]
            if prefill.leader in sequences:
                del self.prefills[prefill.context]
                leaderless += prefill.followers
        self._remove(sequences + leaderless)
        self.waiting.extendleft(reversed(leaderless))

    def _remove(self, sequences: list[Sequence]) -> None:
        """Free the pages and rows of sequences and close the holes that they leave."""
        if not sequences:
            return
        page_moves = self.pages.release(sequences)
        if page_moves:
            source, target = upload(page_moves, self.device).T
            self.pool[:, :, target] = self.pool[:, :, source]
        for source, target in page_moves:
            self.page_row[target] = self.page_row[source]
            holder = self.pages.holder[target]
            if holder.row >= 0:
                self.table[holder.row, self.pages.start[target] // self.config.page_size] = target
        gone = [s.row for s in sequences if s.row >= 0]
        row_moves = compact(gone, len(self.running))
        self.num_stops -= sum(bool(s.stop) for s in sequences if s.row >= 0)
        if row_moves:
            source, target = upload(row_moves, self.device).T
            for tensor in self.row_state:
                tensor[target] = tensor[source]
        self.ended[len(self.running) - len(gone) : len(self.running)] = 1
        if self.moved:
            self.moved.record()
        for s in sequences:
            s.row = -1
        for source, target in row_moves:
            moved = self.running[source]
            moved.row = target
            self.running[target] = moved
            for array in (self.host_length, self.host_pages, self.table):
                array[target] = array[source]
            self.page_row[moved.pages] = target
        del self.running[len(self.running) - len(gone) :]
