"""Several turns in a response: exactly the sampled tokens are trained, under the log-probs that they were drawn with."""

import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from conftest import FusedEngine
from test_rollout import full_logits, make_engine, make_sequences
from test_trainer import assert_same_gradient, gradient, make_trainer

from checkpoint import load_tokenizer
from core import Example, Prompt, Sample, SampleId, Span, turns_of, with_span
from engine.sequence import Sequence as EngineSequence
from engine.sequence import continued
from learning import examples_of
from loss import LOSSES, LossConfig
from model import Model
from overlap.endless import _packed, _unpacked
from rollout import Engine
from sampling import SamplingConfig, sample, uniforms
from trainer import join

kinds = pytest.mark.parametrize("kind", [Engine, FusedEngine])
ENDS = range(0, 258, 9)  # so many end tokens that a turn has 9 tokens on average
LIMIT = 90  # tokens of a transcript
Replies = Callable[[SampleId, int], Sequence[int]]


@pytest.fixture
def model(tiny_model: Model) -> Model:
    """Large weights: every token depends on the whole context."""
    with torch.no_grad():
        for weight in tiny_model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return tiny_model


def reply_to(id: SampleId, turn: int) -> list[int]:
    """The environment of these tests: replies of 1 to 12 tokens, for 6 turns at most."""
    rng = Random(f"{id} {turn}")
    return [rng.randrange(2, 258) for _ in range(rng.randint(1, 12))] if turn < 6 else []


def play(
    engine: Engine,
    sequences: Iterable[EngineSequence],
    replies: Replies = reply_to,
    disturb: Callable[[Engine], None] = lambda engine: None,
) -> dict[SampleId, Sample]:
    """Return the transcripts of episodes. A reply that is empty, or does not fit, ends one."""
    episodes = {s.id: s for s in sequences}
    for s in episodes.values():
        engine.add(s)
    done: dict[SampleId, Sample] = {}
    while len(done) < len(episodes):
        for turn in engine.step():
            reply = replies(turn.id, len(turns_of(turn.spans)))
            episode = episodes[turn.id]
            fits = len(turn.token_ids) + len(reply) < episode.max_new_tokens
            if turn.finish_reason != "stop" or not reply or not fits:
                done[turn.id] = turn
                engine.abort([turn.id])
            else:
                episodes[turn.id] = continued(episode, turn, reply)
                engine.add(episodes[turn.id])
        disturb(engine)
    assert engine.is_idle and engine.pages.used == 0
    return done


def make_episodes(count: int = 8, **settings) -> list[EngineSequence]:
    return [replace(s, **settings) for s in make_sequences(count, limit=LIMIT)]


def make(model: Model, kind: type[Engine] = Engine, eos: Iterable[int] = ENDS, **settings) -> Engine:
    return make_engine(model, eos=eos, kind=kind, max_response_tokens=LIMIT, **settings)


def check_exact(model: Model, s: EngineSequence, done: Sample, replies: Replies = reply_to) -> None:
    """Every sampled token is the one that a forward over all before it draws; the others are the replies."""
    count, first = len(done.token_ids), len(s.prompt_ids)
    logits = full_logits(model, [*s.prompt_ids, *done.token_ids])[first - 1 : -1]
    drawn, logprobs = sample(logits, uniforms(torch.full([count], s.key), torch.arange(count)), SamplingConfig())
    end = 0
    for i, turn in enumerate(turns_of(done.spans)):
        assert [*done.token_ids[end : turn.start]] == ([] if i == 0 else [*replies(done.id, i)])
        assert [*done.logprobs[end : turn.start]] == [0.0] * (turn.start - end)
        assert [*done.token_ids[turn.start : turn.stop]] == drawn[turn.start : turn.stop].tolist()
        own = torch.tensor(done.logprobs[turn.start : turn.stop])
        torch.testing.assert_close(own, logprobs[turn.start : turn.stop], rtol=0, atol=1e-5)
        end = turn.stop
    assert end == count


# ---- spans -------------------------------------------------------------------------------------------------------


def test_spans_leave_given_tokens_out_and_those_that_touch_are_one_turn() -> None:
    first = with_span((), 3, 0)
    assert with_span(first, 7, 0, given=5) == (Span(0, 3, 0), Span(5, 7, 0))
    assert with_span(first, 5, 0, given=5) == first, "nothing is sampled yet"
    spans = with_span(with_span(first, 7, 0, given=5), 9, 2, given=5)
    assert spans == (Span(0, 3, 0), Span(5, 7, 0), Span(7, 9, 2))
    assert turns_of(spans) == [range(0, 3), range(5, 9)] and turns_of(()) == []
    assert with_span((), 4, 1, given=2) == (Span(2, 4, 1),), "a reply may come first"


def test_the_newest_turn_of_a_sequence_begins_behind_the_given_tokens() -> None:
    start = EngineSequence(0, 0, 0, (5,), 0, LIMIT, token_ids=(1, 2, 3), logprobs=(0.0,) * 3, max_turn_tokens=4)
    assert start.turn_start == 3 and start.limit == 7 and start.spans_to(5, 1) == (Span(3, 5, 1),)
    inside = replace(start, spans=(Span(0, 1, 0), Span(2, 3, 0)))
    assert inside.turn_start == 2 and inside.limit == 6 and inside.spans_to(6, 1)[1:] == (Span(2, 3, 0), Span(3, 6, 1))
    assert replace(inside, max_turn_tokens=0).limit == replace(inside, max_turn_tokens=LIMIT).limit == LIMIT


# ---- the engine --------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("num_pages, step_tokens", [(2000, 1000), (48, 16)])
def test_every_sampled_token_is_drawn_from_the_whole_transcript_before_it(
    model: Model, kind: type[Engine], num_pages: int, step_tokens: int
) -> None:
    engine, episodes = make(model, kind, num_pages=num_pages, step_tokens=step_tokens), make_episodes()
    done = play(engine, episodes)
    for s in episodes:
        check_exact(model, s, done[s.id])
    assert {"stop", "length"} <= {d.finish_reason for d in done.values()} or num_pages > 1000
    assert max(len(turns_of(d.spans)) for d in done.values()) > 3, "too quiet to show anything"
    assert num_pages > 1000 or engine.stats.preemptions > 3


@kinds
def test_a_sequence_carries_its_given_tokens_wherever_it_goes(model: Model, kind: type[Engine]) -> None:
    """It leaves an engine at any time, in a turn or between two, pickled or packed for a checkpoint."""
    rng = Random(0)

    def disturb(engine: Engine) -> None:
        live = [*engine.batcher.live_tokens()]
        for s in engine.export(rng.sample(live, rng.randint(0, len(live)))):
            _, tokens, logprobs, spans = _unpacked(*_packed(s))
            fresh = replace(by_id[s.id], token_ids=(), logprobs=(), spans=(), is_taken=False)
            packed = replace(fresh, token_ids=tokens, logprobs=logprobs, spans=spans)
            engine.add(rng.choice([packed, pickle.loads(pickle.dumps(s))]))

    episodes = make_episodes(max_turn_tokens=20)
    by_id = {s.id: s for s in episodes}
    calm = play(make(model, kind), make_episodes(max_turn_tokens=20))
    done = play(make(model, kind), episodes, disturb=disturb)
    assert {id: (d.token_ids, d.spans) for id, d in done.items()} == {
        id: (d.token_ids, d.spans) for id, d in calm.items()
    }
    for s in episodes:
        check_exact(model, s, done[s.id])


@kinds
@pytest.mark.parametrize("max_turn_tokens", [1, 3, LIMIT])
def test_a_turn_has_its_own_limit(model: Model, kind: type[Engine], max_turn_tokens: int) -> None:
    episodes = make_episodes(max_turn_tokens=max_turn_tokens)
    done = play(make(model, kind), episodes)
    for s in episodes:
        check_exact(model, s, d := done[s.id])
        *ended, last = (len(turn) for turn in turns_of(d.spans))
        assert max([0, *ended]) <= max_turn_tokens and last <= max_turn_tokens
        assert d.finish_reason != "cut" or last == max_turn_tokens
    reasons = Counter(d.finish_reason for d in done.values())
    assert (reasons["cut"] > 0) == (max_turn_tokens < LIMIT), reasons


@kinds
def test_a_reply_may_come_before_the_first_turn(model: Model, kind: type[Engine]) -> None:
    episodes = make_episodes(4)
    opened = [continued(s, s, [7, 8, 9]) for s in episodes]
    done = play(make(model, kind), opened)
    for s in episodes:
        check_exact(model, s, done[s.id], lambda id, turn: reply_to(id, turn) if turn else [7, 8, 9])
        assert done[s.id].spans[0].start == 3


@kinds
def test_a_stop_text_is_looked_for_in_the_turn_only(model: Model, tiny_folder, kind: type[Engine]) -> None:
    """Replies end with the stop text, or with its first half; the second half begins no turn's end."""
    engine, tokenizer = make(model, kind, eos=[999]), load_tokenizer(tiny_folder)
    engine.tokenizer = engine.flights.tokenizer = tokenizer
    alone = play(engine, make_episodes(1))
    [letter] = {tokenizer.decode([alone[SampleId(0, 0, 0)].token_ids[5]])}  # ends the first turn
    [id] = tokenizer.encode(letter, add_special_tokens=False)
    episodes = make_episodes(6, stop=(letter,), max_turn_tokens=30)
    done = play(engine, episodes, lambda *turn: [*reply_to(*turn), id] if reply_to(*turn) else [])
    turns = [(d, turn) for d in done.values() for turn in turns_of(d.spans)]
    assert len(turns) > 8 and min(len(turn) for _, turn in turns) > 0
    for d, turn in turns:
        places = [i for i in turn if d.token_ids[i] == id]
        assert places in ([], [turn[-1]]), "a turn ends where its first stop text does"
    ends = [d.token_ids[turn[-1]] == id for d, turn in turns]
    assert sum(ends) > 4 and all(d.token_ids[turn[-1]] == id for d, turn in turns if turn.stop < len(d.token_ids)), (
        "turns before the last end with the stop text"
    )


def test_a_reply_that_is_empty_is_a_bug(model: Model) -> None:
    [s] = make_episodes(1)
    with pytest.raises(AssertionError, match="empty reply"):
        continued(s, s, [])


# ---- the trainer -------------------------------------------------------------------------------------------------


def examples_from(done: Iterable[Sample], episodes: Iterable[EngineSequence]) -> list[Example]:
    prompts = {s.id: s.prompt_ids for s in episodes}
    rng, found = Random(1), []
    for d in done:
        prompt = Prompt(d.prompt_index, prompts[d.id], "", "", "math")
        found += examples_of(prompt, [d], [rng.uniform(-1, 1)], mask_truncated=False)
    return found


@kinds
def test_what_is_trained_is_what_was_sampled(model: Model, kind: type[Engine]) -> None:
    """Each token that the engine drew, once, with its log-prob; no other token."""
    engine, episodes = make(model, kind, num_pages=48), make_episodes()
    rows, drawn = engine.runner.rows, Counter[tuple[int, int, int, float]]()
    draw = rows.draw

    def draw_and_note(part: slice, logits: torch.Tensor) -> None:
        alive = [part.start + int(i) for i in (rows.ended[part] == 0).nonzero()]
        draw(part, logits)
        for row in alive:
            place = int(rows.count[row]) - 1
            drawn[int(rows.key[row]), place, int(rows.tokens[row, place]), float(rows.logprobs[row, place])] += 1

    rows.draw = draw_and_note  # type: ignore[method-assign]
    done = play(engine, episodes)
    examples = examples_from(done.values(), episodes)
    trainer, trained = make_trainer(model, tokens_per_microbatch=100), Counter[tuple[int, int, int, float]]()
    keys, own = {s.id: s.key for s in episodes}, {e.id: e for e in examples}
    for batch in trainer._batches(examples):
        token_ids, positions, predicts = join(batch)
        places, tokens = (positions[predicts + 1]).tolist(), token_ids[predicts + 1].tolist()
        logprobs = trainer._old_logprobs(batch, torch.zeros(len(tokens)))[0].tolist()
        ids = [e.id for e in batch for _ in range(e.num_sampled)]
        for id, place, token, logprob in zip(ids, places, tokens, logprobs, strict=True):
            trained[keys[id], place - len(own[id].prompt_ids), token, logprob] += 1
    assert trained == drawn and max(trained.values()) == 1 and engine.stats.preemptions
    assert sum(map(len, (d.token_ids for d in done.values()))) > 1.3 * trained.total(), "much of it was given"


@kinds
def test_the_trainer_scores_sampled_tokens_as_the_engine_did(model: Model, kind: type[Engine]) -> None:
    episodes = make_episodes()
    examples = examples_from(play(make(model, kind, num_pages=48), episodes).values(), episodes)
    for e in make_trainer(model, tokens_per_microbatch=300).with_old_logprobs(examples):
        sampled = [x for span in e.spans for x in e.logprobs[span.start : span.end]]
        assert [*(e.old_logprobs or ())] == pytest.approx(sampled, abs=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_a_sample_of_many_turns_is_the_sum_of_its_turns(model: Model, name: str) -> None:
    """Each turn as a sample of its own, with all before it as its prompt; but for losses of the whole sequence."""
    episodes = make_episodes(5)
    examples = examples_from(play(make(model), episodes).values(), episodes)
    noisy = [replace(e, logprobs=[x + 0.05 * math.sin(i) for i, x in enumerate(e.logprobs)]) for e in examples]
    alone = [
        replace(
            e,
            prompt_ids=(*e.prompt_ids, *e.token_ids[: turn.start]),
            token_ids=e.token_ids[turn.start : turn.stop],
            logprobs=e.logprobs[turn.start : turn.stop],
            spans=(Span(0, len(turn), 0),),
        )
        for e in noisy
        for turn in turns_of(e.spans)
    ]
    wild = [replace(e, logprobs=[*e.logprobs]) for e in noisy]
    for e in wild:  # a given token's log-prob is nobody's business
        for i in {*range(len(e.token_ids))} - {i for turn in turns_of(e.spans) for i in turn}:
            e.logprobs[i] = math.nan  # type: ignore[index]
    found = []
    for way in (noisy, wild, alone):
        trainer = make_trainer(model, LossConfig(name=name, normalisation="token"))
        trainer.accumulate(way)
        found.append((gradient(trainer), trainer.sums.clone()))
    whole, unread, parts = found
    assert len(alone) > 2 * len(noisy) and whole[0].norm() > 1e-3
    assert torch.equal(whole[0], unread[0]) and torch.equal(whole[1], unread[1])
    if name != "gspo":  # its ratio is that of the whole sample
        assert_same_gradient(whole[0], parts[0])
        torch.testing.assert_close(whole[1], parts[1], rtol=1e-4, atol=1e-4)
