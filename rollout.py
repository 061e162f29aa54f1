"""The generation engine: a paged KV cache, continuous batching, sampling, abort, preemption by recomputation.

engine/batcher.py decides on the host who is prefilled and who decodes, in which row, by which pages; engine/runner.py
does it on the device. Decode state lives in device tensors whose first `n` rows are the running sequences
(engine/rows.py); the host mirrors only lengths and page tables. Per decoded token the host reads one thing back: which
rows have ended; on a GPU one step later, while the next step runs (engine/graphs.py).
"""

import time
from collections import abc
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from config import check_options
from core import Sample, SampleId, Tokenizer, Visit
from engine.batcher import Batcher
from engine.cpu import BatchedPages
from engine.drafts import Drafter, propose
from engine.flights import Flights
from engine.graphs import DecodeGraphs
from engine.memory import PageMemory, RolloutConfig, cache_of, kv_budget, num_pages_for
from engine.pages import Pages
from engine.rows import Rows
from engine.runner import Runner
from engine.sequence import EngineStats, Sequence
from engine.shard import Shard, num_own_elements
from model import Model, check_split
from parallel import TensorParallel, World
from sampling import SamplingConfig, sample_key

ALONE = TensorParallel(World(0, 1, torch.device("cpu")))


class Engine:
    """Generates samples for one model replica. `add`, then `step` until `is_idle`; `abort` and `export` whenever."""

    def __init__(
        self,
        model: Model,
        config: RolloutConfig,
        sampling: SamplingConfig,
        eos_ids: Iterable[int],
        tokenizer: Tokenizer | None = None,
        parallel: TensorParallel = ALONE,
        sizes: Iterable[int] = (),
    ):
        """Only `stop` texts and text prompts need the `tokenizer`.

        With `parallel`, all its ranks make the same calls in the same order and get the same samples. `sizes` are the
        tensor-parallel sizes, besides its own, that `regroup` may ask for. With `kv_gib` = 0 the pages take half of the
        GPU memory that is free: a run plans the rest (policies/memory_plan.py), an engine does not know what will want
        it. Raises ValueError when settings are outside their limits, a size does not divide the model, or the memory
        does not hold one full sequence.
        """
        check_options(config, "rollout")
        check_options(sampling, "sampling")
        sizes = {parallel.size, *sizes}
        for size in sizes:
            check_split(model.shape, size)
        self.config, self.sampling, self.tokenizer = config, sampling, tokenizer
        self.version, self.stats = 0, EngineStats()  # the version of the weights that sample
        self.model, shape, dtype, self.device = model, model.shape, model.dtype, model.embed.weight.device
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            raise ValueError(f"the model is on {self.device}; call torch.cuda.set_device({self.device.index}) first")
        if config.kv_gib == 0:  # what is free now: the sizes share it
            config = replace(config, kv_gib=kv_budget(config, self.device) / 2**30)
        #: Pages of one replica, by tensor-parallel size.
        self.num_pages = {n: num_pages_for(config, shape, dtype, self.device, n) for n in sizes}
        #: Elements of a rank's own copies of weights, by tensor-parallel size; 0: the weights are whole.
        self.own_elements = {n: num_own_elements(shape, n) if config.layout == "sharded" else 0 for n in sizes}
        cache = cache_of(config, shape, dtype)
        num_bytes = max(
            self.own_elements[n] * dtype.itemsize + pages * cache.page_bytes(n) for n, pages in self.num_pages.items()
        )
        longest = cache.pages_of_longest
        self.batcher = Batcher(config.max_running, config.step_tokens, longest)
        rows = Rows(config.max_running, config.max_response_tokens, sampling, eos_ids, self.device)
        graphs = DecodeGraphs(rows.ended, config.max_running, longest) if self._is_fused(self.device) else None
        self.runner = Runner(rows, PageMemory(num_bytes, dtype, self.device, cache), graphs)
        self.flights = Flights(self.batcher, self.runner, tokenizer)
        self.shards: dict[int, Shard] = {}
        self.is_stale = self.is_released = False  # stale: shard or memory must be made again
        self.drafter: Drafter | None = None  # set between steps
        self._enter(parallel)

    @staticmethod
    def _is_fused(device: torch.device) -> bool:
        """Whether to decode by fused kernels, with shared pages; the tests say yes on a CPU too."""
        return device.type == "cuda"

    # ---- interface -------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self.batcher.is_idle and not self.flights.finished

    def load_weights(self, model: Model, version: int) -> None:
        """Decode with `model` from now on; where a shard can be a view nothing is copied. Wants an idle engine.

        Copies are made again by the next `regroup` or `step`, so that weights that are regrouped are not copied twice;
        by `regroup`, on all ranks, where the model lies over several. Weights that were changed in place need this too.
        Sequences under way are exported before, and added again: then their KV is that of the new weights.
        """
        assert self.is_idle, "sequences that run have KV of the old weights: `export` them, or `change_weights`"
        self.version, self.is_stale = version, True
        if model is not self.model:
            self.model = model
            self.drop_shards()

    def change_weights(self, version: int) -> None:
        """Decode with the model's new weights from now on; running sequences keep the KV of the older ones.

        (PipelineRL, arXiv 2509.19128.) Contexts in prefill, and parked ones, are computed anew. Collective where the
        model lies over several ranks.
        """
        self.flights.land(self.version)
        self._refresh()
        running = self.batcher.running
        prefilling = [s for s in self.batcher.admitted if s.row < 0]
        self.flights.evict(prefilling, self.version)
        self.batcher.forget([*self.batcher.parked])
        self.batcher.waiting.extendleft(reversed(prefilling))
        for s in running:
            s.spans, s.has_old_kv = s.spans_to(self.batcher.num_drawn(s), self.version), True
        self.shards[self.parallel.size].refresh()
        self.version = version

    def regroup(self, parallel: TensorParallel) -> None:
        """Decode in the group `parallel` from now on: same weights, same memory. Wants an idle engine.

        Shards of whole weights are views; those that must be copies (`Shard.copied_bytes`), and those of sharded
        weights, are copied layer by layer, and so are they, without counting, when the size stays but the weights are
        new. Graphs of the size that are not there are captured. Collective in the group, and where the model lies over
        several ranks. A released engine takes the group with its memory. (RollPacker, section 4.2)
        """
        assert self.is_idle, "sequences that run hold pages of the old shape"
        assert parallel.size in self.num_pages, f"the engine was made for the sizes {sorted(self.num_pages)}"
        if self.is_released:
            self.parallel = parallel
            return
        if parallel is not self.parallel:
            self.flights.land(self.version)
            self._enter(parallel)
            self.stats.regroup_bytes += self.runner.weights.copied_bytes
        self._refresh()
        self.runner.capture()

    def _refresh(self) -> None:
        """Have weights and memory as the next step needs them."""
        assert not self.is_released, "the engine was released: take it back first"
        if self.is_stale:
            self._enter(self.parallel)

    @torch.inference_mode(False)  # what is made inside could not be changed outside
    def _enter(self, parallel: TensorParallel) -> None:
        """Take the shards of `parallel` and give the KV memory the shape of their pages."""
        size, runner = parallel.size, self.runner
        runner.memory.take()
        if size in self.shards:
            self.shards[size].refresh()
        else:
            if not runner.graphs:  # they hold addresses, so they need their shards; without them one size is enough
                self.drop_shards()
            own = runner.memory.whole if self.own_elements[size] else None
            self.shards[size] = Shard(self.model, parallel, self.config.prepack, own)
        self.parallel, self.is_stale = parallel, False
        self.pages = (Pages if runner.graphs else BatchedPages)(self.num_pages[size], self.config.page_size)
        self.batcher.use(self.pages, EngineStats() if parallel.rank else self.stats)
        runner.use(self.shards[size], self.pages, self.own_elements[size])

    def drop_shards(self) -> None:
        """Forget the shards, and the graphs that hold their addresses.

        A capture runs the collectives of a step, so ranks that may ever share a replica do this together.
        """
        self.shards.clear()
        self.runner.shard = None
        if self.runner.graphs:
            self.flights.land(self.version)
            self.runner.graphs.clear()

    def release(self) -> None:
        """Give up the KV memory and all that is made of the weights, until `take_back`. Wants an idle engine.

        On a CPU the memory goes to the process only. What stays on the device is the state of the rows: a few numbers
        for each token of `max_running` responses.
        """
        assert self.is_idle, "sequences that run have their pages there"
        self.drop_shards()
        self.batcher.forget([*self.batcher.parked])
        self.runner.memory.free()
        self.is_stale = self.is_released = True

    def take_back(self) -> None:
        """Have shards and KV memory again. The model has its weights back. Collective where it is sharded."""
        assert self.is_released, "nothing was released"
        self.is_released = False
        self._refresh()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: new, exported, or `continued` after a turn. Raises ValueError when it cannot fit."""
        self._check(sequence)
        sequence.is_taken = True
        self.batcher.wait(sequence)

    def _check(self, sequence: Sequence) -> None:
        c, shape = self.config, self.model.shape
        sequence.check(c.max_prompt_tokens, c.max_response_tokens, shape.max_positions, shape.vocab_size)
        if sequence.stop and self.tokenizer is None:
            raise ValueError(f"sequence {sequence.id} has stop texts; give the engine a tokenizer")

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Admit what fits; decode one token in every row and prefill some; return the samples that finished.

        On a CPU this is one forward, and the samples are its own. On a GPU it is a graph and a forward for the prefill,
        and the samples are those of the step before. After an exception from here only `abort` makes sense.
        """
        self._refresh()
        batcher, runner, drafter = self.batcher, self.runner, self.drafter
        drafts, asks = None, drafter is not None and drafter.wants_rows(len(batcher.running))
        leaving = 0 if asks or not runner.graphs else 1
        if asks:
            self.flights.land(self.version)
        is_steady = len(self.flights.launched) == leaving  # a step's seconds are not those of two or of none
        if batcher.waiting:
            runner.start(batcher.admit())
        if batcher.running:
            self._make_room()
        chunks, n = batcher.plan_chunks(), len(batcher.running)
        start = time.perf_counter()
        if drafter and asks and n:
            drafts = propose(drafter, batcher, runner.drawn, runner.rows.ends, chunks)
        start = start if drafts else time.perf_counter()  # to look for drafts is part of what they cost
        if runner.graphs and n:
            runner.launch(batcher, drafts)
        if chunks or (n and not runner.graphs):
            runner.forward(batcher, chunks, drafts)
        self.flights.take_off(drafts)
        self.flights.land(self.version, leaving)
        if drafter and drafts:
            drafter.learn(drafts.outcome)
        if drafter and n and not chunks and is_steady:
            drafter.observe(drafts.num_tokens if drafts else n, time.perf_counter() - start)
        return self.flights.take()

    @torch.inference_mode()
    def prefill(self) -> list[Sample]:
        """Admit and prefill all that finds room, while no row decodes; return the samples that finished.

        Each sequence draws its next token at the end of its prefill. So those that are added together count the same
        steps from then on, however they are spread over engines and however long their contexts are.
        """
        self.flights.land(self.version)
        self._refresh()
        batcher, runner = self.batcher, self.runner
        while True:
            runner.start(batcher.admit(takes_late=False))
            if not batcher.prefills:
                return self.land()
            runner.forward(batcher, batcher.plan_chunks(), decodes=False)
            self.flights.take_off()
            self.flights.land(self.version)

    def land(self) -> list[Sample]:
        """Wait for the steps under way; return the samples that finished in them."""
        self.flights.land(self.version)
        return self.flights.take()

    def abort(self, ids: Iterable[SampleId]) -> dict[SampleId, abc.Sequence[int]]:
        """Drop sequences by id, free their pages, parked ones too, and return the response tokens that each had."""
        ids = set(ids)
        thrown = {sequence.id: sequence.token_ids for sequence in self.export(ids)}
        return thrown | {sample.id: sample.token_ids for sample in self.flights.take(ids)}

    def export(self, ids: Iterable[SampleId]) -> list[Sequence]:
        """Take sequences out with all they need to continue, token by token the same, in another engine's `add`."""
        ids = set(ids)
        self.flights.land(self.version)
        admitted = [s for s in self.batcher.admitted if s.id in ids]
        queued = self.batcher.withdraw(ids)
        self.flights.evict(admitted, self.version)
        for sequence in (*admitted, *queued):
            sequence.is_taken = False
        return admitted + queued

    def generate(
        self, prompts: Collection[str | list[int]], num_responses: int = 1, seed: int = 0, **limits: Any
    ) -> list[list[Sample]]:
        """Return `num_responses` samples for each prompt, text or token ids. For notebooks and scripts.

        `limits` are fields of `Sequence`: max_new_tokens, stop, ignore_eos. Raises ValueError on what cannot be done;
        whatever goes wrong, and on Ctrl-C, the engine is idle again afterwards.
        """
        if not self.is_idle:
            raise ValueError("generate would mix with sequences under way; `abort` them or `step` to their end")
        if not isinstance(prompts, (list, tuple)) or num_responses < 1:
            raise ValueError("generate wants a list of prompts, texts or lists of token ids, and num_responses > 0")
        limits = {"max_new_tokens": self.config.max_response_tokens, **limits}
        sequences = []
        for i, prompt in enumerate(prompts):
            ids = self._ids_of(prompt)
            sequences += [Sequence(i, r, 0, ids, sample_key(seed, 0, i, r), **limits) for r in range(num_responses)]
        for sequence in sequences:
            self._check(sequence)  # all of them before any is queued
        for sequence in sequences:
            self.add(sequence)
        done: dict[SampleId, Sample] = {}
        with tqdm(total=len(prompts) * num_responses, desc="generate", disable=None, leave=False) as bar:
            try:
                while not self.is_idle:
                    for sample in self.step():
                        done[sample.id] = sample
                        bar.update()
            finally:  # if it was interrupted, else there is nothing to abort
                self.abort([sequence.id for sequence in sequences])
        return [[done[SampleId(0, i, r)] for r in range(num_responses)] for i in range(len(prompts))]

    def _ids_of(self, prompt: str | list[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; give the engine one, or token ids")
        return tuple(self.tokenizer.encode(prompt))

    # ---- one step --------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Give a page to every row that has filled its last one; when none is left, preempt the newest sequence."""
        if self.flights.launched and self.pages.free < len(self.batcher.full_rows()):
            self.flights.land(self.version)  # what has ended meanwhile makes room: perhaps no sequence is preempted
        for newest in self.batcher.make_room():
            self.flights.evict([newest], self.version)


def sequence_for(
    visit: Visit, response: int, seed: int, max_new_tokens: int, stop: tuple[str, ...] = (), max_turn_tokens: int = 0
) -> Sequence:
    """Return the sequence of one response, before its first token. Its random numbers depend on its name and `seed`."""
    again = (visit.launch,) if visit.launch else ()
    key, prompt = sample_key(seed, *visit.id, response, *again), visit.prompt
    return Sequence(
        prompt.index,
        response,
        visit.epoch,
        prompt.token_ids,
        key,
        max_new_tokens,
        stop=stop,
        max_turn_tokens=max_turn_tokens if prompt.env else 0,
        has_turns=bool(prompt.env),
    )
