"""Steps that verify drafts: with any drafter, tokens, log-probs, ends and books are those of decoding without one."""

import copy
from collections import abc
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FusedEngine, thorough
from test_rollout import LIMIT, check_invariants, drain, generate, make_engine, make_sequences, preempt
from test_turns import make as make_player
from test_turns import make_episodes, play

from core import Sample, SampleId
from engine.pages import pages_needed
from engine.sequence import Sequence, continued
from rollout import Engine
from sampling import SamplingConfig

kinds = pytest.mark.parametrize("kind", [Engine, FusedEngine])
Samples = abc.Mapping[SampleId, Sample]
READS = SimpleNamespace(decode=lambda ids, **_: "".join(f"<{i}>" for i in ids), all_special_tokens=[])
Outcome = abc.Sequence[tuple[Sequence, int, int]]


class Foresight:
    """Knows what decoding without drafts draws, and proposes it: so many tokens at random or at once, right or wrong.

    right: the probability that a token is right; asked: that a row gets a draft; rests: that none
    does. Checks and counts what it is told.
    """

    def __init__(
        self,
        samples: Samples,
        longest: int = 7,
        right: float = 1.0,
        asked: float = 1.0,
        seed: int = 0,
        at_once=False,
        rests=0.0,
    ):
        self.texts = {id: [*sample.token_ids] for id, sample in samples.items()}
        self.longest, self.right, self.asked, self.shortest = longest, right, asked, longest if at_once else 0
        self.rests = rests
        self.rng, self.drafted, self.accepted, self.computed, self.steps = Random(seed), 0, 0, 0, 0

    def wants_rows(self, num_rows: int) -> bool:
        return self.rng.random() >= self.rests

    def propose(self, rows: abc.Sequence[tuple[Sequence, np.ndarray]]) -> list[list[int]]:
        drafts = []
        for s, text in rows:
            known, count = self.texts[s.id], len(text)
            assert text.dtype == np.int64 and text.tolist() == known[:count] and count < len(known), "it has ended"
            length = self.rng.randint(self.shortest, self.longest) if self.rng.random() < self.asked else 0
            draft = (known[count:] + [7] * length)[:length]  # longer than the response
            drafts.append([t if self.rng.random() < self.right else (t + 1) % 100 for t in draft])
        return drafts

    def learn(self, outcome: Outcome) -> None:
        assert outcome and all(0 <= accepted <= drafted > 0 for _, drafted, accepted in outcome)
        self.drafted += sum(drafted for _, drafted, _ in outcome)
        self.accepted += sum(accepted for _, _, accepted in outcome)

    def observe(self, tokens: int, seconds: float) -> None:
        assert tokens > 0 < seconds
        self.steps, self.computed = self.steps + 1, self.computed + tokens


def play_turn(engine: Engine, sequence: Sequence) -> list[Sample]:
    """Return the sample of a sequence whose pages are kept."""
    engine.add(sequence)
    return [sample for _ in iter(lambda: engine.is_idle, True) for sample in engine.step()]


def assert_same(found: Samples, wanted: Samples, tolerance: float = 2e-5) -> None:
    """All but the log-probs to the last bit: forwards of other shapes round otherwise."""
    assert found.keys() == wanted.keys()
    for id, sample in wanted.items():
        assert replace(found[id], logprobs=()) == replace(sample, logprobs=())
        assert list(found[id].logprobs) == pytest.approx(sample.logprobs, abs=tolerance)


# ---- any drafter, any time ---------------------------------------------------------------------------------------


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("seed", [0, 1, *map(thorough, range(2, 12))])
def test_no_drafter_changes_a_sample(model, kind: type[Engine], seed: int) -> None:
    """Random drafters, set and taken away between steps that admit, prefill in chunks, preempt, abort and export."""
    rng = Random(seed)
    page, sampling = rng.choice((1, 3, 4, 16)), SamplingConfig(1.0, 0, rng.choice((1.0, 0.9)))
    pages, eos = -(-64 // page) * rng.choice((1, 2, 4)), range(2, 12) if seed % 3 else [999]
    more = {"page_size": page, "max_running": rng.choice((3, 8)), "step_tokens": rng.choice((24, 8192))}
    sequences = make_sequences(24, seed)
    for i, s in enumerate(sequences):
        if seed % 2:  # groups of four with one prompt: some begin with nothing drawn
            s.prompt_ids = sequences[i // 4 * 4].prompt_ids
        s.max_new_tokens, s.ignore_eos = rng.randint(1, LIMIT), i % 5 == 0
    wanted = generate(make_engine(model, sampling, eos, kind=kind), copy.deepcopy(sequences))
    drafters = [None] + [
        Foresight(wanted, rng.choice((1, 5, 20)), p, rng.choice((0.3, 1.0)), rests=rng.choice((0.0, 0.5)))
        for p in (1.0, 0.7, 0.0)
    ]
    engine, other = (make_engine(model, sampling, eos, pages, kind, **more) for _ in range(2))
    other.drafter = drafters[2]
    samples: dict[SampleId, Sample] = {}
    aborted: set[SampleId] = set()
    while sequences or not engine.is_idle:
        engine.drafter = rng.choice(drafters)
        operation = rng.choices(("add", "step", "abort", "preempt", "export"), (4, 9, 0.2, 1, 1))[0]
        if operation == "add" and sequences:
            engine.add(sequences.pop())
        elif operation == "abort" and (live := sorted(engine.batcher.live_tokens())):
            aborted |= engine.abort([rng.choice(live)]).keys()
        elif operation == "preempt" and engine.batcher.running:
            preempt(engine, rng.choice(engine.batcher.running))
        elif operation == "export" and engine.batcher.running:
            for moved in engine.export([rng.choice(engine.batcher.running).id]):
                other.add(moved)
        else:
            samples |= {s.id: s for s in engine.step()}
        check_invariants(engine)
    samples |= drain(other, check_invariants)
    assert_same(samples, {id: sample for id, sample in wanted.items() if id not in aborted})
    assert engine.stats.accepted_tokens > 0 and engine.stats.drafted_tokens > engine.stats.accepted_tokens
    counts = [sum(getattr(e.stats, name) for e in (engine, other)) for name in ("drafted_tokens", "accepted_tokens")]
    told = [sum(getattr(d, name) for d in drafters if d) for name in ("drafted", "accepted")]
    assert counts == told


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("pages, page", [(16, 4), thorough(40, 4), (90, 1), thorough(6, 16)])
def test_drafts_in_vain_leave_the_books_as_they_were(model, kind: type[Engine], pages: int, page: int) -> None:
    """Step by step: nobody is preempted, admitted later, or has fewer pages because of drafts that are all wrong."""
    settings = {"kind": kind, "num_pages": pages, "page_size": page, "step_tokens": 32}
    wanted = generate(make_engine(model, kind=kind), make_sequences(10))
    engines = [make_engine(model, **settings) for _ in range(2)]
    for engine, right in zip(engines, (1.0, 0.0), strict=True):
        engine.drafter = Foresight(wanted, 0 if right else 9, right, at_once=True)
        for s in make_sequences(10):
            engine.add(s)
    while not engines[0].is_idle:
        done, others = ([*engine.step()] for engine in engines)
        assert_same({s.id: s for s in others}, {s.id: s for s in done})
        check_invariants(engines[1])
        assert not engines[1].flights.launched, "a step with a drafter has ended"
        assert engines[0].pages.used == engines[1].pages.used
        assert [s.id for s in engines[0].batcher.admitted] == [s.id for s in engines[1].batcher.admitted]
    assert engines[1].is_idle and engines[0].stats.preemptions > 0 and engines[1].stats.drafted_tokens > 500
    assert replace(engines[1].stats, drafted_tokens=0) == engines[0].stats


@kinds
def test_counters_count_drafts(model, kind: type[Engine]) -> None:
    sequences = [replace(s, ignore_eos=True) for s in make_sequences(4)]
    wanted = generate(make_engine(model, kind=kind), copy.deepcopy(sequences))
    engine = make_engine(model, kind=kind, eos=range(256))
    engine.drafter = right = Foresight(wanted, 7, at_once=True)
    assert_same(generate(engine, copy.deepcopy(sequences)), wanted)
    steps = -(-(LIMIT - 1) // 8)  # the prefill draws the first token
    stats = engine.stats.take()
    assert (stats.decode_steps, stats.decoded_tokens) == (steps, 4 * (LIMIT - 1))
    assert stats.drafted_tokens == stats.accepted_tokens == 4 * (LIMIT - 1 - steps), "the last is not drafted"
    assert (right.steps, right.computed) == (steps, 4 * (LIMIT - 1))
    engine.drafter = wrong = Foresight(wanted, 7, right=0.0, at_once=True)
    generate(engine, sequences)
    drafted = 4 * sum(min(7, LIMIT - 1 - count) for count in range(1, LIMIT))
    assert (engine.stats.decode_steps, engine.stats.decoded_tokens) == (LIMIT - 1, 4 * (LIMIT - 1))
    assert (engine.stats.drafted_tokens, engine.stats.accepted_tokens) == (drafted, 0)
    assert (wrong.steps, wrong.computed) == (LIMIT - 1, 4 * (LIMIT - 1) + drafted)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("budget", [40, thorough(60)])
def test_drafts_keep_the_budget_of_a_step_and_chunks_go_first(model, kind: type[Engine], budget: int) -> None:
    wanted, prefilled = generate(make_engine(model, kind=kind), make_sequences(12)), list[list[int]]()
    for longest in (0, 20):
        engine, computed, beside = make_engine(model, kind=kind, step_tokens=budget), [0], 0
        engine.drafter = Foresight(wanted, longest, right=0.0, at_once=True)
        for s in make_sequences(12):
            engine.add(s)
        prefilled.append([])
        while not engine.is_idle:
            engine.step()
            stats = engine.stats.take()
            prefilled[-1].append(stats.prefilled_tokens)
            computed.append(stats.prefilled_tokens + stats.decoded_tokens + stats.drafted_tokens)
            beside += stats.prefilled_tokens > 0 < stats.drafted_tokens
    assert prefilled[0] == prefilled[1] and max(computed) == budget and beside > 0


# ---- ends --------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("right", [thorough(1.0), 0.8])
def test_a_stop_text_inside_a_draft_ends_the_response_there(model, kind: type[Engine], right: float) -> None:
    wanted = generate(make_engine(model, kind=kind), make_sequences(6))

    def stopping() -> list[Sequence]:
        sequences = make_sequences(6)
        for i, s in enumerate(sequences[:5]):
            tokens = wanted[s.id].token_ids
            s.stop = ("never", f"<{tokens[9 + 5 * i]}><{tokens[10 + 5 * i]}>")
        sequences[4].max_new_tokens = 31  # its stop text and its limit
        return sequences

    engines = [make_engine(model, kind=kind) for _ in range(2)]
    for engine in engines:
        engine.tokenizer = engine.flights.tokenizer = READS
    engines[1].drafter = Foresight(wanted, 7, right, at_once=True)
    plain, drafted = (generate(engine, stopping()) for engine in engines)
    assert_same(drafted, plain)
    assert [len(s.token_ids) for _, s in sorted(plain.items())] == [11, 16, 21, 26, 31, LIMIT]
    assert [s.finish_reason for _, s in sorted(plain.items())] == ["stop"] * 5 + ["length"]
    assert engines[1].stats.decoded_tokens == engines[0].stats.decoded_tokens
    assert engines[1].stats.decode_steps < LIMIT - 1


@kinds
@pytest.mark.parametrize("seed", [0, *map(thorough, range(1, 4))])
def test_a_turn_that_a_stop_text_cuts_inside_a_draft_parks_no_more_than_itself(model, kind: type, seed: int) -> None:
    first = make_sequences(1, seed=seed)[0]
    [known] = generate(make_engine(model, kind=kind), [copy.deepcopy(first)]).values()
    first.has_turns, first.stop = True, (f"<{known.token_ids[2]}>",)
    seconds = []
    for drafter in (None, Foresight({first.id: known}, 16, at_once=True)):
        engine = make_engine(model, kind=kind)
        engine.tokenizer = engine.flights.tokenizer = READS
        engine.drafter = drafter
        [turn] = play_turn(engine, copy.deepcopy(first))
        parked = engine.batcher.parked[first.id]
        assert len(parked.pages) == engine.pages.used == pages_needed(parked.num_tokens, engine.pages.page_size)
        engine.drafter = None
        seconds += play_turn(engine, replace(continued(copy.deepcopy(first), turn, [5]), stop=()))
        assert engine.stats.resumed_tokens > 0
    assert_same({first.id: seconds[1]}, {first.id: seconds[0]})


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("limits", [{}, {"max_turn_tokens": 5}])
@pytest.mark.parametrize("right", [thorough(1.0), 0.7])
def test_turns_are_those_without_drafts(model, kind: type[Engine], right: float, limits: dict) -> None:
    """Drafts reach into the environment's replies, behind ends and limits of turns; parked pages are taken up."""
    plain, engine = make_player(model, kind), make_player(model, kind)
    wanted = play(plain, make_episodes(has_turns=True, **limits))
    engine.drafter = Foresight(wanted, 9, right)
    assert_same(play(engine, make_episodes(has_turns=True, **limits)), wanted)
    assert engine.stats.resumed_tokens == plain.stats.resumed_tokens > 0
    assert engine.stats.accepted_tokens > 0 and engine.stats.decoded_tokens == plain.stats.decoded_tokens
    assert not limits or {s.finish_reason for s in wanted.values()} >= {"cut"}


# ---- new weights -------------------------------------------------------------------------------------------------


@kinds
def test_old_text_is_a_draft_for_new_weights(model, kind: type[Engine]) -> None:
    """Weights change when each response has 1 + 4 * 4 tokens; what the old ones would have drawn is proposed on."""
    old = generate(make_engine(model, kind=kind), make_sequences(5))
    before = copy.deepcopy(model.state_dict())
    found = list[dict]()
    for drafts, steps in ((None, 4 * 4), (Foresight(old, 3, at_once=True), 4)):
        model.load_state_dict(before)
        engine = make_engine(model, kind=kind)
        engine.drafter = drafts
        for s in make_sequences(5):
            engine.add(s)
        for _ in range(1 + steps):
            engine.step()
        engine.land()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.02)
        engine.change_weights(1)
        assert set(engine.batcher.live_tokens().values()) == {17}
        if drafts:
            engine.drafter = drafter = Foresight(found[0], 6, right=0.6)
        found.append(drain(engine))
    assert_same(found[1], found[0])
    assert {len(s.spans) for s in found[0].values()} == {2} and drafter.accepted > 0
    assert any(s.token_ids != old[id].token_ids for id, s in found[0].items())
