"""The endless rollout: updates interrupt it, and sequences go on with the new weights. (ROLL Flash, arXiv 2510.11345)

All ranks decode until the policy (policies/flow.py) has a batch, train it together, and decode on: the longest
responses run through several updates, so no step waits for them. Every rank asks its own copy of the policy, fed with
what all ranks report after each window.
"""

import base64
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

import parallel
from core import Decision, Finished, Group, Prompt, Reward, Sample, SampleId, Span, VisitId
from engine.sequence import Sequence as EngineSequence
from metrics import Record, quantiles
from model import Model
from overlap.drafting import Drafting
from policies.flow import Flow
from rounds import Round

IDLE_SECONDS = 0.01  # between two windows in which nothing is decoded


class Endless:
    """What lasts from update to update: sequences under way, finished samples, and the policy that picks batches."""

    def __init__(self, round: Round, flow: Flow, drafting: Drafting):
        self.round, self.flow, self.drafting = round, flow, drafting
        self.interrupted: list[EngineSequence] = []  # not in the engine now
        self.is_out = True  # all sequences are out of the engine, if there are any
        # Else rows would count steps that depend on who is prefilled beside them, and so on the number of ranks.
        round.prefills_first = flow.config.clock == "steps"
        round.begin(flow.plan, flow)

    def next_batch(self) -> tuple[list[Group], Record]:
        """Decode until a batch is there; return its groups, on every rank the same, and the record. Collective."""
        r = self.round
        self.fill()
        with r.clock.span("reward"):
            r.rewards.update(r.graders.wait(id for id in self.flow.accepted_ids() if id in r.samples))
        groups = r.collect()
        trained, stats = {group.visit for group in groups}, asdict(self.flow.advance(r.aborted))
        stats["ages"] = {str(age): count for age, count in stats["ages"].items()}
        stats |= {key: quantiles(found) if (found := stats[key]) else {} for key in ("late_length", "dropped_length")}
        self.drafting.pause(sample for id, sample in r.samples.items() if id.visit in trained)
        self._forget(trained)
        r.prompts = {id: visit for id, visit in r.prompts.items() if id not in trained}
        record = {"kind": r.plan.kind, "padded": 0, "queue": stats["buffered"], **r.record, **stats}
        r.dropped, r.aborted, r.windows, r.migrated = {}, {}, 0, 0
        return groups, record

    def fill(self) -> None:
        """Launch prompts and decode until a batch is there, unless it is. Collective."""
        self.flow.fill(self._launch, lambda: self._play_window(False))

    def _launch(self, decision: Decision) -> None:
        self._go_on()
        # Replies were settled between two batches: what ended then may belong to a group that is given up now.
        self.round.early = [event for event in self.round.early if event.id not in decision.abort]
        self._forget({visit.id for visit in decision.launch})
        self.round.carry_out(decision)
        self.drafting.go_on(self.round)

    def decode_on(self, is_due: Callable[[], bool]) -> None:
        """Decode while other ranks train. Collective among those that decode.

        With `sync` = with_batch the next batch is launched and completed. Else nothing is launched: on the steps' clock
        this takes `update_iterations` engine steps. On measured time it ends when `is_due` on some rank.
        """
        r, config = self.round, self.flow.config
        end, over = r.iteration + config.update_iterations, False
        if config.sync == "with_batch":
            self.fill()
            over = config.clock == "steps"
        while not over:
            over = self._play_window(is_due())
            if config.clock == "steps":
                over = r.iteration >= end
            elif r.engine.is_idle:
                time.sleep(IDLE_SECONDS)

    def _play_window(self, note: bool) -> bool:
        """Decode a window and carry out what the policy says; return whether any rank had the note."""
        _, notes = self.round.exchange(self.round.decode(lands=True), note)
        return any(notes)

    def _go_on(self) -> None:
        """Have all sequences in the engine again."""
        engine = self.round.engine
        if self.is_out:
            engine.regroup(engine.parallel)  # new weights, on all ranks: a rank without work makes no step
        for sequence in self.interrupted:
            engine.add(sequence)
        self.interrupted, self.is_out = [], False

    def _forget(self, visits: Collection[VisitId]) -> None:
        """Forget the finished samples of groups that are trained, or launched again because they got too old."""
        r = self.round
        gone = [id for id in r.samples if id.visit in visits]
        for id in gone:
            del r.samples[id]
            r.rewards.pop(id, None)
        if gone:
            r.graders.forget(keep=r.samples)

    # ---- others use the engine -----------------------------------------------------------------------------------

    def take_weights(self, model: Model, version: int) -> None:
        """Decode with the model's new weights from now on. Collective where they are sharded."""
        if self.flow.config.flight == "keep" and not self.is_out:
            self.round.engine.change_weights(version)
        else:
            self.interrupt()
            self.round.engine.load_weights(model, version)

    def interrupt(self) -> None:
        """Take all sequences out of the engine until the next batch."""
        engine = self.round.engine
        self.interrupted += engine.export(engine.batcher.live_tokens())
        self.is_out = True

    def lend_engine(self) -> None:
        """Leave engine, graders and environments idle: others use them before the next batch. Waits for them."""
        self.round.settle()
        self.interrupt()
        with self.round.clock.span("reward"):
            self.round.rewards.update(self.round.graders.drain())

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> Record:
        """Return plain values: the policy's, and the tokens of all responses, by replica. Collective."""
        self.lend_engine()
        r = self.round
        samples = [(_packed(sample), sample.finish_reason, asdict(r.rewards[id])) for id, sample in r.samples.items()]
        early = [(event.iteration, event.id, event.num_tokens) for event in r.early]
        stopped = [(id, [*tokens]) for id, tokens in r.dropped.items()]
        own = {"sequences": [*map(_packed, self.interrupted)], "samples": samples, "early": early, "stopped": stopped}
        replicas = parallel.gather_objects(r.world, own)[:: r.engine.parallel.size]
        return {"flow": self.flow.state_dict(), "iteration": r.iteration, "replicas": replicas}

    def load_state_dict(self, state: Record, prompts: Sequence[Prompt]) -> None:
        """Go on from there. On another number of replicas sequences and samples are dealt again."""
        r, replicas = self.round, state["replicas"]
        self.flow.load_state_dict(state["flow"], prompts)
        r.iteration = state["iteration"]
        r.prompts = {id: group.visit for id, group in self.flow.open.items()}
        if len(replicas) != (count := r.placement.num_replicas):
            keys = ("sequences", "samples", "early", "stopped")
            whole = {key: sorted(x for part in replicas for x in part.get(key, ())) for key in keys}
            replicas = [{key: values[i::count] for key, values in whole.items()} for i in range(count)]
        for replica, part in enumerate(replicas):
            r.placement.hold(replica, {SampleId(*packed[0]): 1.0 for packed in part["sequences"]})  # all alike
        own = replicas[r.engine.parallel.replica]
        r.early = [Finished(at, SampleId(*id), count) for at, id, count in own["early"] if r.is_first]
        r.dropped = {SampleId(*id): tokens for id, tokens in own.get("stopped", ()) if r.is_first}
        self.interrupted = [self._sequence(*packed) for packed in own["sequences"]]
        for packed, reason, reward in own["samples"] if r.is_first else ():
            id, tokens, logprobs, spans, experts = _unpacked(*packed)
            r.samples[id] = Sample(id.prompt, id.response, id.epoch, tokens, logprobs, reason, spans, experts)
            r.rewards[id] = Reward(**reward | {"parts": dict(reward["parts"])})

    def _sequence(self, *packed: Any) -> EngineSequence:
        id, tokens, logprobs, spans, _ = _unpacked(*packed)
        return replace(self.round.sequence(id), token_ids=tokens, logprobs=logprobs, spans=spans)


def _packed(response: Sample | EngineSequence) -> tuple:
    """Return name, tokens, log-probs, spans and experts as plain values."""
    ids, values = array("i", response.token_ids), array("f", response.logprobs)
    tokens, logprobs, experts = (
        base64.b85encode(data).decode() for data in (ids, values, bytes(getattr(response, "experts", b"")))
    )
    return response.id, tokens, logprobs, [astuple(span) for span in response.spans], experts


def _unpacked(
    id: Iterable[int], tokens: str, logprobs: str, spans: Iterable[Iterable[int]], experts: str = ""
) -> tuple:
    """Return name, tokens, log-probs, spans, experts."""
    ids, values = array("i", base64.b85decode(tokens)), array("f", base64.b85decode(logprobs))
    return SampleId(*id), ids, values, tuple(Span(*span) for span in spans), base64.b85decode(experts) or ()
