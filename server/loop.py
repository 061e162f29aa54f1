"""One thread that steps an engine for all requests; others hand it requests, take them back and give it new weights."""

import itertools
import os
import threading
import time
from array import array
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

from core import Sample, SampleId
from engine.host import upload
from engine.sequence import Sequence
from model import Model
from rollout import Engine
from sampling import sample_key
from server.wire import COMPLETION_TOKENS, ApiError, Ask, Piece

STREAM_SECONDS = 0.05  # between two looks at what streamed responses have newly got


class Ticket:
    """A request under way: its sequences, and the pieces of their responses as they come."""

    def __init__(self, ask: Ask, sequences: list[Sequence]):
        self.ask, self.sequences = ask, {s.id: s for s in sequences}
        self.sent = dict.fromkeys(self.sequences, 0)  # tokens
        self.pieces: SimpleQueue[Piece] = SimpleQueue()

    def send(self, id: SampleId, ids: array, logprobs: array, sample: Sample | None = None) -> None:
        """Hand on the new tokens of a response, and that it has ended."""
        self.sent[id] += len(ids)
        end = (sample.finish_reason, sample.spans) if sample else ("", ())
        choice = id.prompt * self.ask.num_responses + id.response
        self.pieces.put(Piece(choice, ids, logprobs, *end))


class EngineLoop:
    """Owns an engine: only the thread in `run` touches it."""

    def __init__(self, engine: Engine, most: int):
        """`most`: responses that may wait or decode at a time, over all requests."""
        self.engine, self.most = engine, most
        self.under_way = 0  # responses
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.tickets: dict[int, Ticket] = {}  # by the epoch in their samples' names
        self.numbers, self.lock = itertools.count(), threading.Lock()
        self.is_stopping, self.looked = False, 0.0

    # ---- from any thread -----------------------------------------------------------------------------------------

    def submit(self, ask: Ask) -> tuple[int, Ticket]:
        """Queue a request; return its number and its ticket. Raises ApiError: it cannot fit, or too many wait."""
        number, wanted = next(self.numbers), len(ask.prompts) * ask.num_responses
        seed = int.from_bytes(os.urandom(7)) if ask.seed is None else ask.seed
        c, shape, sequences = self.engine.config, self.engine.model.shape, list[Sequence]()
        for place, prompt in enumerate(ask.prompts):
            room = min(c.max_response_tokens, shape.max_positions - len(prompt))
            limit = ask.max_tokens or max(room if ask.is_chat else min(room, COMPLETION_TOKENS), 1)
            if limit > c.max_response_tokens:
                said = f"max_tokens = {limit} is over rollout.max_response_tokens = {c.max_response_tokens}"
                raise ApiError(400, f"{said}; ask for fewer", param="max_tokens")
            for r in range(ask.num_responses):
                key = sample_key(seed, 0, place, r)  # as `Engine.generate` has it
                sequences.append(Sequence(place, r, number, prompt, key, limit, stop=ask.stop))
            try:
                sequences[-1].check(c.max_prompt_tokens, c.max_response_tokens, shape.max_positions, shape.vocab_size)
            except ValueError as error:
                said = str(error).removeprefix(f"sequence {sequences[-1].id} ")
                raise ApiError(400, f"prompt {place} {said}", param="prompt") from None
        with self.lock:
            if self.is_stopping:
                raise ApiError(503, "the server is ending", "server_error")
            if self.under_way + wanted > self.most:
                raise ApiError(
                    429,
                    f"{self.under_way} responses are under way, of serve.queue = {self.most}; ask later",
                    "overloaded",
                )
            self.under_way += wanted
        ticket = Ticket(ask, sequences)
        self.inbox.put(lambda: self._add(number, ticket))
        return number, ticket

    def cancel(self, number: int) -> None:
        """Abort what is left of a request."""
        self.inbox.put(lambda: self._drop(number))

    def change_weights(self, weights: Model, version: int) -> None:
        """Decode with these weights from the next step on; return when that is so. Raises ApiError at the end.

        Responses under way go on with them, and keep the KV of the older ones (`Engine.change_weights`).
        """
        done = threading.Event()

        def take() -> None:
            with torch.no_grad():
                for own, new in zip(self.engine.model.parameters(), weights.parameters(), strict=True):
                    own.copy_(new)
            self.engine.change_weights(version)
            done.set()

        self.inbox.put(take)
        while not done.wait(0.5):
            if self.is_stopping:
                raise ApiError(503, "the server is ending", "server_error")

    def stop(self) -> None:
        """Have `run` return soon; requests under way get an error."""
        self.inbox.put(self._stop)

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`. An engine that has failed is not used again: its error is raised here."""
        torch.set_flush_denormal(True)  # holds for a thread
        if self.engine.device.type == "cuda":
            torch.cuda.set_device(self.engine.device)
        try:
            while not self.is_stopping:
                self._take_orders()
                if not self.engine.is_idle:
                    self._finish(self.engine.step())
                    self._look()
        finally:
            self._stop()  # also after an error

    def _take_orders(self) -> None:
        """Do what other threads have asked for; wait for that when there is nothing to decode."""
        try:
            while True:
                order = self.inbox.get(block=self.engine.is_idle and not self.is_stopping)
                order()
        except Empty:
            pass

    def _stop(self) -> None:
        with self.lock:
            self.is_stopping = True

    def _add(self, number: int, ticket: Ticket) -> None:
        self.tickets[number] = ticket
        if ticket.ask.sampling != self.engine.sampling:
            self.engine.runner.rows.own |= dict.fromkeys(ticket.sequences, ticket.ask.sampling)
        for sequence in ticket.sequences.values():
            self.engine.add(sequence)

    def _drop(self, number: int) -> None:
        if ticket := self.tickets.get(number):
            self.engine.abort(ticket.sequences)
            for id in list(ticket.sequences):
                self._forget(id)

    def _forget(self, id: SampleId) -> None:
        ticket = self.tickets[id.epoch]
        del ticket.sequences[id]
        self.engine.runner.rows.own.pop(id, None)
        if not ticket.sequences:
            del self.tickets[id.epoch]
        with self.lock:
            self.under_way -= 1

    def _finish(self, samples: list[Sample]) -> None:
        for sample in samples:
            ticket = self.tickets[sample.id.epoch]
            self._forget(sample.id)
            old = ticket.sent[sample.id]
            ticket.send(sample.id, array("i", sample.token_ids[old:]), array("f", sample.logprobs[old:]), sample)

    def _look(self) -> None:
        """Send what streamed responses have newly got."""
        streams = [ticket for ticket in self.tickets.values() if ticket.ask.stream]
        now = time.monotonic()
        if not streams or now < self.looked + STREAM_SECONDS:
            return
        self.looked = now
        self._finish(self.engine.land())  # then the host knows how many tokens each row has
        drawn = self.engine.batcher.num_drawn
        running = [(t, s) for t in streams for s in t.sequences.values() if s.row >= 0 and drawn(s) > t.sent[s.id]]
        if not running:
            return
        counts = [drawn(s) - ticket.sent[s.id] for ticket, s in running]  # new ones
        rows, device = self.engine.runner.rows, self.engine.device
        with rows.reading():
            index, first = (upload(x, device)[:, None] for x in zip(*[(s.row, t.sent[s.id]) for t, s in running]))
            columns = (first + torch.arange(max(counts), device=device)).clamp(max=rows.tokens.shape[1] - 1)
            ids, logprobs = rows.tokens[index, columns].tolist(), rows.logprobs[index, columns].tolist()
        for (ticket, s), count, own, their in zip(running, counts, ids, logprobs, strict=True):
            ticket.send(s.id, array("i", own[:count]), array("f", their[:count]))
