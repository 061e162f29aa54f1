"""Several turns in a response: exactly the sampled tokens are trained, with the log-probs of their draws."""

import copy
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import FusedEngine, thorough
from test_rollout import full_logits, make_engine, make_sequences
from test_trainer import assert_same_gradient, gradient, make_trainer

import parallel
from buffer import SampleBuffer
from checkpoint import load_model, load_tokenizer
from core import FINISH_REASONS, Example, Group, Prompt, Reward, Sample, SampleId, Span, Visit, turns_of, with_span
from engine.cpu import BatchedPages
from engine.rows import Rows
from engine.sequence import Sequence as EngineSequence
from engine.sequence import continued
from learning import examples_of, group_advantages, put_groups, told_advantages, visits_of
from loss import LOSSES, LossConfig
from model import Model
from overlap.endless import _packed, _unpacked
from parallel import TensorParallel, World
from reward import RewardConfig
from rollout import Engine, RolloutConfig, sequence_for
from sampling import SamplingConfig, sample, score
from trainer import Trainer, join, old_logprobs_of

kinds = pytest.mark.parametrize("kind", [Engine, FusedEngine])
ENDS = range(0, 258, 9)  # so many end tokens that a turn has 9 tokens on average
LIMIT = 90  # tokens of a transcript
Replies = Callable[[SampleId, int], Sequence[int]]


def reply_to(id: SampleId, turn: int) -> list[int]:
    """The environment of these tests: replies of 1 to 12 tokens, for 6 turns at most."""
    rng = Random(f"{id} {turn}")
    return [rng.randrange(2, 258) for _ in range(rng.randint(1, 12))] if turn < 6 else []


def play(
    engine: Engine,
    sequences: Iterable[EngineSequence],
    replies: Replies = reply_to,
    disturb: Callable[[Engine], list[Sample] | None] = lambda engine: None,
    delays: Callable[[], int] = lambda: 0,
) -> dict[SampleId, Sample]:
    """Return the transcripts of episodes. A reply that is empty, or does not fit, ends one. Replies may come late."""
    episodes = {s.id: s for s in sequences}
    for s in episodes.values():
        engine.add(s)
    done: dict[SampleId, Sample] = {}
    ready, steps = list[tuple[int, Sample]](), 0
    while len(done) < len(episodes):
        steps += 1
        ready += [(steps + delays(), turn) for turn in engine.step()]
        now, ready = [turn for due, turn in ready if due <= steps], [(due, t) for due, t in ready if due > steps]
        for turn in now:
            reply = replies(turn.id, len(turns_of(turn.spans)))
            episode = episodes[turn.id]
            fits = len(turn.token_ids) + len(reply) < episode.max_new_tokens
            if turn.finish_reason != "stop" or not reply or not fits:
                done[turn.id] = turn
                engine.abort([turn.id])
            else:
                episodes[turn.id] = continued(episode, turn, reply)
                engine.add(episodes[turn.id])
        ready += [(steps, turn) for turn in disturb(engine) or ()]  # turns that ended in a step under way
    assert engine.is_idle and engine.pages.used == 0 and not engine.batcher.parked
    return done


def make_episodes(count: int = 8, **settings) -> list[EngineSequence]:
    return [replace(s, **settings) for s in make_sequences(count, limit=LIMIT)]


def make(model: Model, kind: type[Engine] = Engine, eos: Iterable[int] = ENDS, **settings) -> Engine:
    return make_engine(model, eos=eos, kind=kind, max_response_tokens=LIMIT, **settings)


def check_exact(model: Model, s: EngineSequence, done: Sample, opening: Sequence[int] = ()) -> None:
    """Every sampled token is the one that a forward over all before it draws; the others are the replies."""
    count, first = len(done.token_ids), len(s.prompt_ids)
    logits = full_logits(model, [*s.prompt_ids, *done.token_ids])[first - 1 : -1]
    drawn, logprobs = sample(logits, torch.full([count], s.key), torch.arange(count), SamplingConfig())
    end = 0
    for i, turn in enumerate(turns_of(done.spans)):
        assert [*done.token_ids[end : turn.start]] == [*(reply_to(done.id, i) if i else opening)]
        assert [*done.logprobs[end : turn.start]] == [0.0] * (turn.start - end)
        assert [*done.token_ids[turn.start : turn.stop]] == drawn[turn.start : turn.stop].tolist()
        own = torch.tensor(done.logprobs[turn.start : turn.stop])
        torch.testing.assert_close(own, logprobs[turn.start : turn.stop], rtol=0, atol=2e-5)
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
    row = Prompt(0, (5,), "", "", "env")  # without an environment it has no turns
    assert [sequence_for(Visit(0, p), 0, 0, LIMIT, (), 4).limit for p in (row, replace(row, env="guess"))] == [LIMIT, 4]
    assert replace(inside, max_turn_tokens=0).limit == replace(inside, max_turn_tokens=LIMIT).limit == LIMIT


# ---- the engine --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("num_pages, step_tokens", [(2000, 1000), (48, 16)])
def test_every_sampled_token_is_drawn_from_the_whole_transcript_before_it(
    model: Model, kind: type[Engine], num_pages: int, step_tokens: int, keeps: bool
) -> None:
    engine = make(model, kind, num_pages=num_pages, step_tokens=step_tokens)
    episodes = make_episodes(has_turns=keeps)
    done = play(engine, episodes)
    for s in episodes:
        check_exact(model, s, done[s.id])
    stats = engine.stats
    assert max(len(turns_of(d.spans)) for d in done.values()) > 3, "too quiet to show anything"
    assert num_pages > 1000 or stats.preemptions > 3
    if num_pages > 1000:
        turns = [(s, turn) for s in episodes for turn in turns_of(done[s.id].spans)[:-1]]
        known = sum(len(s.prompt_ids) + turn.stop - 1 for s, turn in turns)
        assert (stats.resumed_tokens, stats.recomputed_tokens) == ((known, 0) if keeps else (0, known))
        contexts = sum(len(s.prompt_ids) + len(done[s.id].token_ids) for s in episodes)
        assert stats.prefilled_tokens + stats.decoded_tokens == contexts + stats.recomputed_tokens - len(episodes)


@pytest.mark.slow
@kinds
def test_a_sequence_carries_its_given_tokens_wherever_it_goes(model: Model, kind: type[Engine]) -> None:
    """It leaves an engine at any time, in a turn or between two, pickled or packed for a checkpoint."""
    rng = Random(0)

    def disturb(engine: Engine) -> None:
        live = [*engine.batcher.live_tokens()]
        for s in engine.export(rng.sample(live, rng.randint(0, len(live)))):
            _, tokens, logprobs, spans, _ = _unpacked(*_packed(s))
            packed = replace(by_id[s.id], token_ids=tokens, logprobs=logprobs, spans=spans)
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


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_a_transcript_may_be_parked_at_every_token(model: Model, kind: type[Engine], page_size: int) -> None:
    """Each token ends a turn; replies have 1 to 3 tokens, and come late."""
    rng, episodes = Random(page_size), make_episodes(has_turns=True)
    engine = make(model, kind, eos=range(258), page_size=page_size)

    def check_pages(engine: Engine) -> None:
        parked = engine.batcher.parked.values()
        held = {page for s in engine.batcher.admitted for page in s.pages}
        if isinstance(engine.pages, BatchedPages):
            assert held == {*range(engine.pages.dense)}, "a step reads these: parked pages are elsewhere"
            assert engine.pages.used == len(held) + sum(len(p.pages) for p in parked)
        else:
            assert engine.pages.used == len(held | {page for p in parked for page in p.pages})
        seen.append(len(parked))

    def replies(id: SampleId, turn: int) -> list[int]:
        return [turn] * (1 + turn % 3) if turn < 25 else []

    seen: list[int] = []
    done = play(engine, episodes, replies, check_pages, lambda: rng.randrange(5))
    expected = play(make(model, kind, eos=range(258)), make_episodes(), replies)
    for id, d in done.items():
        assert len(turns_of(d.spans)) == 25 and (d.token_ids, d.spans) == (expected[id].token_ids, expected[id].spans)
        assert [*d.logprobs] == pytest.approx([*expected[id].logprobs], abs=1e-5)
    assert max(seen) > 3 and engine.stats.recomputed_tokens == 0 < engine.stats.resumed_tokens


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("flight", ["recompute", "keep"])
def test_new_weights_read_no_parked_pages(model: Model, kind: type[Engine], flight: str) -> None:
    """Between two turns, and in the middle of others, weights change: each span has the log-probs of its weights."""
    newer = copy.deepcopy(model)
    for weight in newer.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.02)
    old, rng, steps = copy.deepcopy(model), Random(0), count(1)
    engine, episodes = make(model, kind), make_episodes(has_turns=True)

    def disturb(engine: Engine) -> list[Sample]:
        if parked or next(steps) < 20 or len(engine.batcher.parked) < 2:
            return []
        parked.append(len(engine.batcher.parked))
        if flight == "recompute":
            moved = engine.export(engine.batcher.live_tokens())
            landed = engine.land()
            engine.load_weights(newer, 1)
            for s in moved:
                engine.add(s)
            return landed
        for weight, new in zip(model.parameters(), newer.parameters(), strict=True):
            weight.data.copy_(new)
        engine.change_weights(1)
        assert not engine.batcher.parked
        mixed.update(s.id for s in engine.batcher.running)
        return []

    parked, mixed = list[int](), set[SampleId]()
    done = play(engine, episodes, disturb=disturb, delays=lambda: rng.randrange(8))
    assert parked, "never were two turns parked"
    versions = set()
    for s in episodes:
        d, first = done[s.id], len(s.prompt_ids)
        tokens = [*s.prompt_ids, *d.token_ids]
        for version, weights in enumerate((old, newer)):
            logprobs = score(full_logits(weights, tokens)[first - 1 : -1], torch.tensor(d.token_ids), SamplingConfig())[
                0
            ]
            for turn in turns_of(d.spans):
                spans = [span for span in d.spans if span.start in turn]
                if d.id in mixed and {span.version for span in spans} == {0, 1}:
                    continue  # its KV is of both
                for span in (span for span in spans if span.version == version):
                    versions.add(version)
                    own = torch.tensor(d.logprobs[span.start : span.end])
                    torch.testing.assert_close(own, logprobs[span.start : span.end], rtol=0, atol=1e-4)
    assert versions == {0, 1}


@kinds
def test_pages_of_another_transcript_are_not_resumed(model: Model, kind: type[Engine]) -> None:
    """A sample that is launched again has the name of the one that was parked."""
    engine, [s] = make(model, kind), make_episodes(1, has_turns=True)
    engine.add(s)
    while not (turns := engine.step()):
        pass
    [turn] = turns
    other = continued(s, replace(turn, token_ids=[t ^ 1 for t in turn.token_ids]), [5])
    assert engine.batcher.parked.keys() == {s.id}
    for again in (other, replace(s, token_ids=(), logprobs=(), spans=())):
        engine.add(again)
        engine.step()
        assert not engine.batcher.parked and engine.stats.resumed_tokens == 0
        engine.abort([s.id])
    assert engine.pages.used == 0


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_a_visit_varies_where_an_advantage_is_not_zero(credit: str) -> None:
    """Penalties and, with credit for turns, what each has earned count; so prompts rest only if they taught nothing."""
    rng, found, limit, reward = Random(0), Counter[bool](), 12, RewardConfig(overlong_buffer=4)
    loss = LossConfig(advantage="dr_grpo", credit=credit)
    for i in range(300):
        samples, rewards = [], []
        for k in range(rng.randint(2, 3)):
            ends = sorted(rng.sample(range(1, 13), rng.choice((1, 2))))
            spans = tuple(Span(start, end, 0) for start, end in zip([0, *(e + 1 for e in ends)], ends) if start < end)
            samples.append(Sample(i, k, 0, (5,) * ends[-1], (0.0,) * ends[-1], "stop", spans))
            turns = tuple(rng.choice((0.0, 1.0)) for _ in range(2)) if rng.random() < 0.5 else ()
            rewards.append(Reward(1.0, turns=turns))
        group = Group(Prompt(i, (9,), "", "", "env"), 0, tuple(samples), tuple(rewards))
        [told] = told_advantages([group], group_advantages([group], loss, reward, limit), loss, reward, limit)
        teaches = any(a for own in told for a in (own if isinstance(own, tuple) else (own,)))
        assert visits_of([group], loss, reward, limit) == {group.visit: teaches}
        found[teaches] += 1
    assert min(found.values()) > 20


@kinds
def test_an_episode_that_starts_over_frees_what_was_parked_of_it(model: Model, kind: type[Engine]) -> None:
    limits = dict(max_prompt_tokens=16, max_response_tokens=16, num_pages=9)
    engine = make_engine(model, eos=range(258), kind=kind, **limits)  # every token ends a turn
    s = EngineSequence(0, 0, 0, tuple(range(2, 18)), key=3, max_new_tokens=16, has_turns=True)
    engine.add(s)
    [first] = [sample for _ in range(4) for sample in engine.step()]
    engine.add(continued(s, first, [5] * 7))
    [second] = [sample for _ in range(4) for sample in engine.step()]
    assert len(second.token_ids) == 9 and engine.pages.free == 3, "fewer than its prompt needs"
    engine.add(replace(s, is_taken=False))
    assert not engine.batcher.parked
    assert [sample.id for _ in range(5) for sample in engine.step()] == [s.id]


def play_together(world: World, folder: Path) -> None:
    model = load_model(folder, torch.device("cpu"), torch.float32)
    for kind in (Engine, FusedEngine):
        alone = play(make(model, kind), make_episodes())
        tp = TensorParallel(world, 2)
        config = RolloutConfig(24, LIMIT, max_running=16, page_size=4, kv_gib=0.0006, tensor_parallel=2)
        engine, rng = kind(model, config, SamplingConfig(), ENDS, parallel=tp), Random(0)
        done = play(engine, make_episodes(has_turns=True), delays=lambda: rng.randrange(6))  # noqa: B023
        for id, d in done.items():
            assert (d.token_ids, d.spans) == (alone[id].token_ids, alone[id].spans)
            assert [*d.logprobs] == pytest.approx([*alone[id].logprobs], abs=1e-4)
        stats = engine.stats if tp.rank == 0 else engine.batcher.stats
        assert (
            stats.resumed_tokens and parallel.gather_objects(world, stats.resumed_tokens) == [stats.resumed_tokens] * 2
        )


def test_ranks_of_a_replica_park_and_resume_alike(run_ranks, tiny_folder: Path) -> None:
    run_ranks(2, play_together, tiny_folder)


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
def test_the_limit_of_a_turn_is_exact(model: Model, kind: type[Engine]) -> None:
    """A turn of n tokens is cut by a limit of n - 1, and ends by itself at n and n + 1."""
    turns = {id: d.token_ids for id, d in play(make(model, kind), make_episodes(), lambda *_: []).items()}
    assert max(map(len, turns.values())) < LIMIT, "all end by themselves"
    for s in make_episodes():
        n = len(turns[s.id])
        for limit in {max(n - 1, 1), n, n + 1}:
            done = play(make(model, kind), [replace(s, max_turn_tokens=limit)], lambda *_: [])[s.id]
            assert done.token_ids == turns[s.id][:limit] and done.finish_reason == ("cut" if limit < n else "stop")


@kinds
@pytest.mark.parametrize("room", [1, 2, 3])
def test_the_limit_of_the_whole_is_exact(model: Model, kind: type[Engine], room: int) -> None:
    """Behind a reply there is room for so many tokens of a turn that would have more."""
    [s] = make_episodes(1)
    engine = make(model, kind, eos=[])
    engine.add(continued(s, s, [7] * (LIMIT - room)))
    while not (found := engine.step()):
        pass
    [done] = found
    assert len(done.token_ids) == LIMIT and done.finish_reason == "length" and done.num_sampled == room


@kinds
def test_a_reply_may_come_before_the_first_turn(model: Model, kind: type[Engine]) -> None:
    episodes = make_episodes(4)
    opened = [continued(s, s, [7, 8, 9]) for s in episodes]
    done = play(make(model, kind), opened)
    for s in episodes:
        check_exact(model, s, done[s.id], [7, 8, 9])
        assert done[s.id].spans[0].start == 3


@kinds
def test_a_stop_text_is_looked_for_in_the_turn_only(model: Model, tiny_folder, kind: type[Engine]) -> None:
    """Each reply ends with a stop text: a turn that looked behind its start would end at once."""
    engine, tokenizer = make(model, kind, eos=[999]), load_tokenizer(tiny_folder)
    engine.tokenizer = engine.flights.tokenizer = tokenizer
    ids = [*range(40, 90, 3)]
    stop = tuple(tokenizer.decode([id]) for id in ids)
    assert [tokenizer.encode(text, add_special_tokens=False) for text in stop] == [[id] for id in ids]
    episodes = make_episodes(6, stop=stop, max_turn_tokens=30)
    done = play(engine, episodes, lambda *turn: [*reply_to(*turn), ids[0]] if reply_to(*turn) else [])
    turns = [
        (d.token_ids[turn.start : turn.stop], turn.stop == len(d.token_ids))
        for d in done.values()
        for turn in turns_of(d.spans)
    ]
    assert len(turns) > 12 and sum(len(tokens) > 1 for tokens, _ in turns) > 6
    for tokens, is_last in turns:
        assert not {*tokens[:-1]} & {*ids}, "a turn ends where its first stop text does"
        assert tokens[-1] in ids or is_last


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


Tokens = Counter[tuple[int, int, int, float]]  # (key of the sequence, place in the response, token, log-prob)


def note_draws(monkeypatch: pytest.MonkeyPatch) -> Tokens:
    """Return all tokens that engines will draw from now on."""
    drawn, draw = Tokens(), Rows.draw

    def draw_and_note(rows: Rows, part: slice, logits: torch.Tensor) -> None:
        alive = [part.start + int(i) for i in (rows.ended[part] == 0).nonzero()]
        draw(rows, part, logits)
        for row in alive:
            place = int(rows.count[row]) - 1
            drawn[int(rows.key[row]), place, int(rows.tokens[row, place]), float(rows.logprobs[row, place])] += 1

    monkeypatch.setattr(Rows, "draw", draw_and_note)
    return drawn


def note_trained(monkeypatch: pytest.MonkeyPatch, key_of: Callable[[SampleId], int]) -> Tokens:
    """Return all tokens whose log-probs trainers will give a gradient from now on."""
    trained, add = Tokens(), Trainer._add_gradients

    def add_and_note(trainer: Trainer, batch: Sequence[Example]) -> None:
        token_ids, positions, predicts = join(batch)
        places, tokens = (positions[predicts + 1]).tolist(), token_ids[predicts + 1].tolist()
        logprobs = old_logprobs_of(batch, torch.zeros(len(tokens)), trainer.loss)[0].tolist()
        of = [e for e in batch for _ in range(e.num_sampled)]
        for e, place, token, logprob in zip(of, places, tokens, logprobs, strict=True):
            trained[key_of(e.id), place - len(e.prompt_ids), token, logprob] += 1
        add(trainer, batch)

    monkeypatch.setattr(Trainer, "_add_gradients", add_and_note)
    return trained


@pytest.mark.slow
@kinds
def test_what_is_trained_is_what_was_sampled(model: Model, kind: type[Engine], monkeypatch) -> None:
    """Each token that the engine drew, once, with its log-prob; no other token."""
    episodes = make_episodes()
    keys = {s.id: s.key for s in episodes}
    drawn, trained = note_draws(monkeypatch), note_trained(monkeypatch, keys.__getitem__)
    engine = make(model, kind, num_pages=48)
    done = play(engine, episodes)
    make_trainer(model, tokens_per_microbatch=100).accumulate(examples_from(done.values(), episodes))
    assert trained == drawn and max(trained.values()) == 1 and engine.stats.preemptions
    assert sum(map(len, (d.token_ids for d in done.values()))) > 1.3 * trained.total(), "much of it was given"


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("way", ["recomputed", "parked and evicted", "moved"])
def test_the_trainer_scores_sampled_tokens_as_the_engine_did(model: Model, kind: type[Engine], way: str) -> None:
    rng, moved = Random(0), Counter[SampleId]()

    def move(engine: Engine) -> None:
        live = [*engine.batcher.live_tokens()] if way == "moved" else []
        for s in engine.export(rng.sample(live, rng.randint(0, len(live)))):
            moved[s.id] += 1
            engine.add(s)

    engine, episodes = make(model, kind, num_pages=48), make_episodes(has_turns=way != "recomputed")
    done = play(engine, episodes, disturb=move, delays=lambda: rng.randrange(6))
    assert (engine.stats.resumed_tokens > 0) == (way != "recomputed") and engine.stats.recomputed_tokens > 0
    assert (len(moved) > 3) == (way == "moved")
    examples = examples_from(done.values(), episodes)
    for e in make_trainer(model, tokens_per_microbatch=300).with_old_logprobs(examples):
        sampled = [x for span in e.spans for x in e.logprobs[span.start : span.end]]
        assert [*(e.old_logprobs or ())] == pytest.approx(sampled, abs=1e-4)


@pytest.mark.slow
# Without, all turns have one advantage.
@pytest.mark.parametrize(
    "name, by_turn",
    [
        *((name, True) for name in LOSSES),
        *((name, False) if name in ("ppo", "gspo") else thorough(name, False) for name in LOSSES),
    ],
)
def test_a_sample_of_many_turns_is_the_sum_of_its_turns(model: Model, name: str, by_turn: bool) -> None:
    """Each turn as a sample of its own, with all before it as its prompt; but for losses of the whole sequence."""
    episodes = make_episodes(5)
    examples = examples_from(play(make(model), episodes).values(), episodes)
    noisy = [replace(e, logprobs=[x + 0.05 * math.sin(i + 0.5) for i, x in enumerate(e.logprobs)]) for e in examples]
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
    if by_turn:
        rng = Random(2)
        noisy = [replace(e, turn_advantages=tuple(rng.uniform(-1, 1) for _ in turns_of(e.spans))) for e in noisy]
        parts = (advantage for e in noisy for advantage in e.turn_advantages)
        alone = [replace(e, advantage=advantage) for e, advantage in zip(alone, parts, strict=True)]
    wild = [replace(e, logprobs=[*e.logprobs]) for e in noisy]
    for e in wild:  # a given token's log-prob is nobody's business
        for i in {*range(len(e.token_ids))} - {i for turn in turns_of(e.spans) for i in turn}:
            e.logprobs[i] = math.nan  # type: ignore[index]
    found = []
    for way in (noisy, wild, alone):
        trainer = make_trainer(model, LossConfig(name=name, normalisation="token"))
        trainer.accumulate(way)
        found.append((gradient(trainer), trainer.sums.clone()))
    whole, unread, summed = found
    assert len(alone) > 2 * len(noisy) and whole[0].norm() > 1e-3
    assert torch.equal(whole[0], unread[0]) and torch.equal(whole[1], unread[1])
    if name != "gspo":  # its ratio is that of the whole sample
        assert_same_gradient(whole[0], summed[0])
        torch.testing.assert_close(whole[1], summed[1], rtol=1e-4, atol=1e-4)


def test_masking_covers_every_end_but_the_episodes_own() -> None:
    samples = [Sample(0, i, 0, (5,), (0.0,), reason, (Span(0, 1, 0),)) for i, reason in enumerate(FINISH_REASONS)]
    prompt, stop = Prompt(0, (9,), "", "", "env"), FINISH_REASONS.index("stop")
    examples = examples_of(prompt, samples, [1.0] * len(samples), mask_truncated=True)
    assert [e.id.response for e in examples] == [stop] and {"length", "cut", "turns"} < {*FINISH_REASONS}


def test_credit_of_a_turn_by_hand() -> None:
    """A turn's return is what is not earned before it, compared within the turn."""
    spans = Span(0, 1, 0), Span(2, 3, 0), Span(3, 4, 1), Span(6, 7, 1)  # three turns, the second of two versions
    kinds = {"three": spans, "two": spans[:3], "one": spans[:1]}
    samples = tuple(Sample(0, i, 0, (5,) * 7, (0.0,) * 7, "stop", own) for i, own in enumerate(kinds.values()))
    rewards = Reward(3.0, turns=(1.0, 0.0, 2.0)), Reward(1.0, turns=(0.5,)), Reward(2.0)
    groups, reward = [Group(Prompt(0, (9,), "", "", "math"), 0, samples, rewards)], RewardConfig(weights="math=2")
    buffer, loss = SampleBuffer(1), LossConfig(credit="turn")
    episodes = group_advantages(groups, loss, reward, 24)
    put_groups(buffer, groups, episodes, loss, reward, 24)
    [[three, two, one]] = [batch for part in buffer.deal(1, 1) for batch in part]
    assert one.turn_advantages == (0.0,) and [e.advantage for e in (three, two, one)] == [2.0, -2.0, 0.0]
    assert two.turn_advantages == (-2.0, 2 * (0.5 - 1.25))
    assert three.turn_advantages == (2.0, 2 * (2.0 - 1.25), 0.0), "nobody else has a third turn"
    assert three.span_advantages == [2.0, 1.5, 1.5, 0.0]
    assert told_advantages(groups, episodes, loss, reward, 24) == [[e.turn_advantages for e in (three, two, one)]]
    assert told_advantages(groups, episodes, LossConfig(), reward, 24) == [[2.0, -2.0, 0.0]]
    plain = SampleBuffer(1)
    put_groups(plain, groups, episodes, LossConfig(), reward, 24)
    assert all(not e.turn_advantages for part in plain.deal(1, 1) for batch in part for e in batch)
