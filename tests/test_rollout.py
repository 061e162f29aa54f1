"""The engine against a model that reads everything again for every token, without cache, pages or batches."""

import copy
import json
import pickle
import re
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import FusedEngine, thorough
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attention import PackedAttention
from checkpoint import load_tokenizer, save_model
from config import ConfigError
from core import Prompt, Sample, Span, Visit
from engine.cpu import BatchedPages, Packed
from engine.graphs import DecodeGraphs, row_bucket, row_counts
from engine.rows import stopped_by_text
from engine.sequence import Sequence
from engine.shard import Shard
from model import Model, parse_shape
from rewards.judge import background_stream
from rollout import Engine, RolloutConfig, cache_of, num_pages_for, sequence_for
from sampling import SamplingConfig, sample, sample_key, score

CPU = torch.device("cpu")
GREEDY = SamplingConfig(temperature=0.0)
NEVER = 999  # outside the vocabulary: an end token that is not drawn
LIMIT = 40  # response tokens


def sequences_for(visit: Visit, num_responses: int, seed: int, limit: int) -> list[Sequence]:
    return [sequence_for(visit, response, seed, limit) for response in range(num_responses)]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Model:
    """Large random weights: a model whose every token depends on the whole context, greedy ones included."""
    model = Model(parse_shape(json.loads((tiny_folder / "config.json").read_text()), "tiny"))
    generator = torch.Generator().manual_seed(1)
    for name, tensor, _ in model.hf_tensors():
        if not name.endswith("norm.weight"):
            tensor.normal_(0.0, 0.12 if "embed" in name else 0.4, generator=generator)
    return model


@pytest.fixture(scope="module")
def oracle(model: Model):
    """oracle(prompt_ids, key, sampling, count): the tokens that one full forward per token draws."""

    @cache
    def tokens(prompt_ids: tuple[int, ...], key: int, sampling: SamplingConfig, count: int = LIMIT) -> array:
        ids = list(prompt_ids)
        for i in range(count):
            logits = full_logits(model, ids)[-1:]
            ids.append(int(sample(logits, torch.tensor([key]), torch.tensor([i]), sampling)[0]))
        return array("i", ids[len(prompt_ids) :])

    return tokens


@torch.no_grad()
def full_logits(model: Model, ids: list[int]) -> Tensor:
    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention([len(ids)], CPU)))


def until(tokens: Iterable[int], eos: set[int]) -> array:
    """Cut after the first end token."""
    kept = []
    for token in tokens:
        kept.append(token)
        if token in eos:
            break
    return array("i", kept)


kinds = pytest.mark.parametrize("kind", [Engine, FusedEngine])


def make_engine(
    model: Model,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
    eos: Iterable[int] = (NEVER,),
    num_pages: int = 2000,
    kind: type[Engine] = Engine,
    **settings: int,
) -> Engine:
    config = RolloutConfig(
        **{"max_prompt_tokens": 24, "max_response_tokens": LIMIT, "max_running": 16, "page_size": 4, **settings}
    )
    page_bytes = cache_of(config, model.shape, torch.float32).page_bytes(1)
    config = replace(config, kv_gib=(num_pages + 0.5) * page_bytes / 2**30)
    return kind(model, config, sampling, eos)


def make_sequences(count: int, seed: int = 0, limit: int = LIMIT) -> list[Sequence]:
    rng = Random(seed)
    prompts = [tuple(rng.randrange(2, 256) for _ in range(rng.randint(1, 24))) for _ in range(count)]
    return [Sequence(i, 0, 0, ids, sample_key(seed, 0, i, 0), limit) for i, ids in enumerate(prompts)]


def drain(engine: Engine, check=lambda engine: None) -> dict[tuple, Sample]:
    samples: dict[tuple, Sample] = {}
    while not engine.is_idle:
        for done in engine.step():
            assert done.id not in samples
            samples[done.id] = done
        check(engine)
    assert engine.pages.used == 0
    return samples


def preempt(engine: Engine, sequence: Sequence) -> None:
    moved = engine.export([sequence.id])
    engine.batcher.waiting.extendleft(moved)


def generate(engine: Engine, sequences: Iterable[Sequence]) -> dict[tuple, Sample]:
    for sequence in sequences:
        engine.add(sequence)
    return drain(engine)


# ---- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_greedy_tokens_equal_the_oracle_and_transformers(model, oracle, tiny_folder, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(tmp_path, model, tiny_folder)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sequences = make_sequences(10)
    samples = generate(make_engine(model, GREEDY), sequences)
    assert len({token for s in samples.values() for token in s.token_ids}) > 50  # no test on one repeated token
    for s in sequences:
        ids = torch.tensor([s.prompt_ids])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=LIMIT,
            eos_token_id=NEVER,
            pad_token_id=0,
        )
        assert samples[s.id].token_ids == array("i", out[0, len(s.prompt_ids) :])
        assert samples[s.id].token_ids == oracle(s.prompt_ids, s.key, GREEDY)
        assert set(samples[s.id].logprobs) == {0.0}  # drawn from a point mass


SETTINGS = {
    "plain": {},
    "one row": {"max_running": 1},
    "few rows": {"max_running": 3},
    "pages of 1": {"page_size": 1},
    "pages of 7": {"page_size": 7},
    "pages longer than a sequence": {"page_size": 64},
    "prefill in chunks of 16 or less": {"step_tokens": 16},
    "prefill two or three": {"step_tokens": 40},
    "memory of two sequences": {"num_pages": 33},
    "memory of one sequence": {"num_pages": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_tokens_depend_on_nothing_but_the_sequence(model, oracle, name: str) -> None:
    sequences, sampling = make_sequences(12), SamplingConfig(temperature=0.9, top_p=0.95)
    Random(5).shuffle(sequences)
    engine = make_engine(model, sampling, **SETTINGS[name])
    samples = generate(engine, sequences)
    assert (engine.stats.preemptions > 0) == ("memory" in name)
    assert {i: s.token_ids for i, s in samples.items()} == {
        s.id: oracle(s.prompt_ids, s.key, sampling) for s in sequences
    }


@pytest.mark.slow
@kinds
def test_a_sample_may_have_a_sampling_of_its_own(model, oracle, kind) -> None:
    own = [GREEDY, SamplingConfig(temperature=0.7), SamplingConfig(top_p=0.5), SamplingConfig(1.5, 20, 0.9, 0.01), None]
    sequences = make_sequences(20)
    expected = [own[i % 5] or SamplingConfig(0.9) for i in range(20)]
    engine = make_engine(model, SamplingConfig(0.9), kind=kind, num_pages=100)  # some rows are preempted, all move
    engine.runner.rows.own = {s.id: kind for s, kind in zip(sequences, own * 4) if kind}
    samples = generate(engine, sequences)
    assert engine.stats.preemptions > 0
    for s, sampling in zip(sequences, expected):
        sample = samples[s.id]
        assert sample.token_ids == oracle(s.prompt_ids, s.key, sampling)
        logits = full_logits(model, [*s.prompt_ids, *sample.token_ids])[len(s.prompt_ids) - 1 : -1]
        wanted = (
            score(logits, torch.tensor(sample.token_ids), sampling)[0] if sampling.temperature else torch.zeros(LIMIT)
        )
        assert torch.tensor(sample.logprobs) == pytest.approx(wanted.numpy(), abs=1e-3)


@pytest.mark.slow
@kinds
def test_tokens_do_not_depend_on_when_a_sequence_joins(model, oracle, kind) -> None:
    sequences, engine = make_sequences(12), make_engine(model, kind=kind, max_running=5)
    samples: dict[tuple, Sample] = {}
    for s in sequences:
        engine.add(s)
        for _ in range(3):
            samples |= {done.id: done for done in engine.step()}
    samples |= drain(engine)
    assert {i: s.token_ids for i, s in samples.items()} == {
        s.id: oracle(s.prompt_ids, s.key, SamplingConfig()) for s in sequences
    }


def test_streams_of_a_group_differ_and_are_named_by_seed_epoch_prompt_and_response() -> None:
    prompt = Prompt(7, (5, 6), "", "", "match")
    keys = [s.key for seed in (0, 1) for epoch in (0, 1) for s in sequences_for(Visit(epoch, prompt), 4, seed, 8)]
    assert len(set(keys)) == 16
    assert [s.id for s in sequences_for(Visit(3, prompt), 2, 0, 8)] == [(3, 7, 0), (3, 7, 1)]
    assert [s.key for s in sequences_for(Visit(1, prompt), 6, 0, 8)][:4] == keys[4:8]  # not by the size of the group


# ---- log-probs ---------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("num_pages", [2000, 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6, thorough(1.7)])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), thorough(20, 1.0), thorough(0, 0.8), (50, 0.9)])
def test_logprobs_are_those_of_one_full_forward(model, temperature, top_k, top_p, num_pages, kind) -> None:
    sampling = SamplingConfig(temperature, top_k, top_p)
    sequences, engine = make_sequences(6, seed=3), make_engine(model, sampling, kind=kind, num_pages=num_pages)
    samples = generate(engine, sequences)
    assert (engine.stats.preemptions > 0) == (num_pages == 20)
    for s in sequences:
        done = samples[s.id]
        logits = full_logits(model, [*s.prompt_ids, *done.token_ids])[len(s.prompt_ids) - 1 : -1]
        expected, _ = score(logits, torch.tensor(done.token_ids), sampling)
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=1e-5, atol=1e-5)
        assert expected.std() > 0.1


@kinds
def test_a_bf16_model_decodes_as_it_reads(model, kind) -> None:
    half = copy.deepcopy(model).bfloat16()
    samples = generate(make_engine(half, kind=kind), make_sequences(6))
    for s in make_sequences(6):
        done = samples[s.id]
        logits = full_logits(half, [*s.prompt_ids, *done.token_ids])[len(s.prompt_ids) - 1 : -1]
        expected, _ = score(logits, torch.tensor(done.token_ids), SamplingConfig())
        assert (torch.tensor(done.logprobs) - expected).abs().mean() < 0.02


# ---- how a sample ends -------------------------------------------------------------------------------------------


def first_seen_at(tokens: tuple[int, ...], *wanted: int) -> list[int]:
    """Return tokens that occur for the first time at or after the wanted places."""
    return [next(t for i, t in enumerate(tokens) if i >= at and t not in tokens[:i]) for at in wanted]


@kinds
@pytest.mark.parametrize("places", [(0,), (1,), (6,), (30,), (9, 4), (20, 12, 25)])
@pytest.mark.parametrize("limit", [LIMIT, 8, 1])
def test_a_sample_ends_at_the_first_end_token_or_at_the_limit(model, oracle, places, limit, kind) -> None:
    sequences = make_sequences(4, seed=8, limit=limit)
    tokens = oracle(sequences[0].prompt_ids, sequences[0].key, SamplingConfig())
    eos = set(first_seen_at(tokens, *places))
    samples = generate(make_engine(model, kind=kind, eos=eos), sequences)
    for s in sequences:
        expected = until(oracle(s.prompt_ids, s.key, SamplingConfig())[:limit], eos)
        assert samples[s.id].token_ids == expected and len(samples[s.id].logprobs) == len(expected)
        assert samples[s.id].finish_reason == ("stop" if expected[-1] in eos else "length")
    if limit > max(places):
        assert samples[sequences[0].id].finish_reason == "stop"


@kinds
def test_an_end_token_at_the_limit_is_a_stop(model, oracle, kind) -> None:
    [s] = make_sequences(1)
    tokens = oracle(s.prompt_ids, s.key, SamplingConfig())
    [eos] = first_seen_at(tokens, 10)
    s.max_new_tokens = tokens.index(eos) + 1
    [done] = generate(make_engine(model, kind=kind, eos=[eos]), [s]).values()
    assert done.finish_reason == "stop" and len(done.token_ids) == s.max_new_tokens


def test_an_end_token_first_of_all_frees_the_row_for_the_next(model, oracle) -> None:
    sequences = make_sequences(6)
    eos = {oracle(s.prompt_ids, s.key, SamplingConfig())[0] for s in sequences}
    engine = make_engine(model, eos=eos, max_running=2)
    for s in sequences:
        engine.add(s)
    done = [sample for _ in range(3) for sample in engine.step()]  # each ends in its prefill: two a step
    assert {x.id for x in done} == {s.id for s in sequences} and engine.is_idle and engine.pages.used == 0
    assert all(len(x.token_ids) == 1 and x.finish_reason == "stop" for x in done)
    assert engine.stats.decoded_tokens == 0


@kinds
def test_a_sample_is_one_span_of_the_weights_that_sampled_it(model, kind) -> None:
    engine = make_engine(model, kind=kind)
    assert all(s.spans == (Span(0, 3, 0),) for s in generate(engine, make_sequences(2, limit=3)).values())
    engine.load_weights(model, 5)
    assert all(s.spans == (Span(0, 3, 5),) for s in generate(engine, make_sequences(2, limit=3)).values())
    engine.add(make_sequences(1)[0])
    with pytest.raises(AssertionError):
        engine.load_weights(model, 6)


# ---- abort -------------------------------------------------------------------------------------------------------


@kinds
def test_abort_frees_running_sequences_at_once_and_counts_their_tokens(model, oracle, kind) -> None:
    sequences, engine = make_sequences(10), make_engine(model, kind=kind, page_size=2)
    for s in sequences:
        engine.add(s)
    for _ in range(9):
        engine.step()
    victims = [sequences[i] for i in (0, 3, 4, 9)]
    held, used = sum(len(s.pages) for s in victims), engine.pages.used
    begun = {s.id: oracle(s.prompt_ids, s.key, SamplingConfig())[:9] for s in victims}  # one of the prefill, eight more
    assert engine.abort([s.id for s in victims]) == begun
    assert engine.pages.used == used - held and len(engine.batcher.running) == 6
    check_invariants(engine)
    assert engine.abort([s.id for s in victims]) == {} == engine.abort([])
    samples = drain(engine)
    assert {i: s.token_ids for i, s in samples.items()} == {
        s.id: oracle(s.prompt_ids, s.key, SamplingConfig()) for s in sequences if s not in victims
    }


@kinds
def test_abort_drops_waiting_sequences_and_counts_the_tokens_of_preempted_ones(model, oracle, kind) -> None:
    sequences, engine = make_sequences(6), make_engine(model, kind=kind, max_running=3)
    for s in sequences:
        engine.add(s)
    for _ in range(5):
        engine.step()
    preempt(engine, sequences[1])
    used = engine.pages.used
    begun = oracle(sequences[1].prompt_ids, sequences[1].key, SamplingConfig())[:5]
    assert engine.abort([sequences[1].id, sequences[4].id]) == {sequences[1].id: begun, sequences[4].id: ()}
    assert engine.pages.used == used and len(engine.batcher.waiting) == 2
    samples = drain(engine)
    assert {i: s.token_ids for i, s in samples.items()} == {
        s.id: oracle(s.prompt_ids, s.key, SamplingConfig()) for i, s in enumerate(sequences) if i not in (1, 4)
    }


@pytest.mark.parametrize("pages", ["own", "shared"])
def test_followers_outlive_a_leader_that_is_aborted_in_its_prefill(model, oracle, pages: str) -> None:
    prompt = Prompt(0, tuple(range(20, 44)), "", "", "match")
    group = sequences_for(Visit(0, prompt), 4, 0, LIMIT)
    kind = FusedEngine if pages == "shared" else Engine
    engine = make_engine(model, kind=kind, step_tokens=16, max_running=4)
    other = make_sequences(1, seed=9)[0]
    other.prompt_index = 1
    for s in [*group, other]:
        engine.add(s)
    engine.step()
    assert [p.cached for p in engine.batcher.prefills.values()] == [16]
    assert engine.abort([group[0].id]) == {group[0].id: ()}
    check_invariants(engine)
    assert (
        list(engine.batcher.waiting) == [*group[1:], other] and engine.pages.used == 0
    )  # in their order, ahead of newer ones
    samples = drain(engine, check_invariants)
    assert {i: s.token_ids for i, s in samples.items()} == {
        s.id: oracle(s.prompt_ids, s.key, SamplingConfig()) for s in [*group[1:], other]
    }


# ---- what goes in ------------------------------------------------------------------------------------------------


def test_add_refuses_what_cannot_fit(model) -> None:
    engine = make_engine(model)  # 24 + 40 tokens
    engine.add(Sequence(0, 0, 0, (5,) * 24, 1, LIMIT))
    with pytest.raises(ValueError, match=r"\(0, 1, 0\) has 25 prompt tokens"):
        engine.add(Sequence(1, 0, 0, (5,) * 25, 1, LIMIT))
    with pytest.raises(ValueError, match="may grow to 300 tokens"):  # the model has 256 positions
        make_engine(model, max_response_tokens=400).add(Sequence(1, 0, 0, (5,) * 20, 1, 280))
    for refused in (
        Sequence(1, 0, 0, (), 1, LIMIT),
        Sequence(1, 0, 0, (5, 258), 1, LIMIT),
        Sequence(1, 0, 0, (-1,), 1, LIMIT),
        Sequence(1, 0, 0, (5,), 1, LIMIT, token_ids=[6]),
        Sequence(1, 0, 0, (5,), 1, LIMIT, stop="END"),
        Sequence(1, 0, 0, (5,), 1, LIMIT, stop=("",)),
        engine.batcher.waiting[0],
    ):
        with pytest.raises(ValueError, match=r"\(0, 1, 0\)|stop|is in an engine"):
            engine.add(refused)
    assert len(drain(engine)) == 1


@pytest.mark.parametrize(
    "config, sampling",
    [(dict(max_running=0), {}), (dict(page_size=2048), {}), ({}, dict(top_p=1e-40)), ({}, dict(temperature=-1.0))],
)
def test_settings_are_checked_wherever_they_come_from(model, config: dict, sampling: dict) -> None:
    with pytest.raises(ConfigError, match="|".join((*config, *sampling))):
        Engine(model, RolloutConfig(**config), SamplingConfig(**sampling), [NEVER])


@pytest.mark.parametrize("limit, given", [(LIMIT + 1, 0), (LIMIT, LIMIT), (3, 3), (0, 0)])
def test_add_refuses_a_response_longer_than_the_engine_records_or_with_nothing_left(model, limit, given) -> None:
    with pytest.raises(ValueError, match=r"\(0, 0, 0\)"):
        make_engine(model).add(Sequence(0, 0, 0, (5,), 1, limit, token_ids=[6] * given, logprobs=[-1.0] * given))


@pytest.mark.slow
def test_equal_contexts_are_prefilled_once(model, oracle) -> None:
    prompts = [Prompt(i, ids, "", "", "match") for i, ids in enumerate([(9,) * 11, (7, 8), (9,) * 10])]
    group = [s for prompt in prompts for s in sequences_for(Visit(0, prompt), 5, 0, LIMIT)]
    engine = make_engine(model)
    samples = generate(engine, group)
    assert engine.stats.prefilled_tokens == 11 + 2 + 10
    assert all(samples[s.id].token_ids == oracle(s.prompt_ids, s.key, SamplingConfig()) for s in group)
    assert len({tuple(s.token_ids) for s in samples.values()}) == 15
    rows_of_three = make_engine(model, max_running=3)
    generate(rows_of_three, sequences_for(Visit(0, prompts[0]), 3, 0, LIMIT))
    assert rows_of_three.stats.prefilled_tokens == 11


@pytest.mark.parametrize("budget, page", [(16, 2), (21, 64), (60, 2)])
def test_a_forward_keeps_its_token_budget(model, monkeypatch, budget: int, page: int) -> None:
    engine, sizes = make_engine(model, step_tokens=budget, page_size=page), list[int]()

    def counted(forward: Callable) -> Callable:
        def count(shard: Shard, token_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
            sizes.append(int((positions >= 0).sum()))
            return forward(shard, token_ids, positions, *rest)

        return count

    for way in ("__call__", "decode"):  # without and with a compiler
        monkeypatch.setattr(Shard, way, counted(getattr(Shard, way)))
    lengths = [len(s.prompt_ids) for s in make_sequences(12)]
    for s in make_sequences(12):
        engine.add(s)
    while engine.batcher.prefills or engine.batcher.waiting:
        engine.step()
    assert engine.stats.prefilled_tokens == sum(lengths) == sum(sizes) - engine.stats.decoded_tokens
    assert max(sizes) <= budget and len(sizes) <= 2 * sum(lengths) // (budget - 12) + 2


@kinds
@pytest.mark.parametrize("length", [1, 8, 13])  # 8 is a whole page
def test_a_late_sibling_takes_the_prompt_over_and_prefills_nothing(model, oracle, kind, length) -> None:
    prompt = Prompt(0, tuple(range(20, 20 + length)), "", "", "match")
    group = sequences_for(Visit(0, prompt), 6, 0, LIMIT)
    for i, s in enumerate(group):
        s.max_new_tokens = 10 + 3 * i  # they end, and make room, one by one
    engine = make_engine(model, max_running=2, page_size=8, kind=kind)
    samples = generate(engine, group)
    assert engine.stats.prefilled_tokens == length and engine.stats.shared_tokens == length + 4 * (length - 1)
    assert engine.stats.decoded_tokens == sum(s.max_new_tokens for s in group) - 2  # two were there for the prefill
    for s in group:
        assert samples[s.id].token_ids == oracle(s.prompt_ids, s.key, SamplingConfig(), s.max_new_tokens)


@pytest.mark.slow
def test_a_late_response_is_not_stopped_by_what_its_row_held_before(model, tiny_folder) -> None:
    prompt, texts = tuple(range(20, 27)), (*map(chr, range(33, 127)), "\0", "\ufffd")
    sizes = {"max_prompt_tokens": 7, "max_response_tokens": 12, "max_running": 8}
    for pages in range(10, 30, 4):  # some are so few that a step is settled before the late one has drawn anything
        for delay in range(2, 9):
            engine = make_engine(model, kind=FusedEngine, num_pages=pages, **sizes)
            engine.tokenizer = engine.flights.tokenizer = load_tokenizer(tiny_folder)
            for r in range(5):
                engine.add(Sequence(0, r, 0, prompt, sample_key(0, 0, 0, r), 12))
            early = [sample for _ in range(delay) for sample in engine.step()]
            engine.add(Sequence(0, 7, 0, prompt, sample_key(0, 0, 0, 7), 12, stop=texts))
            assert all(sample.token_ids for sample in [*early, *drain(engine).values()]), (pages, delay)


@kinds
def test_a_resumed_response_is_not_taken_for_a_sibling_of_an_equal_prompt(model, kind) -> None:
    prompt, key = tuple(range(20, 30)), sample_key(0, 0, 0, 0)
    engine = make_engine(model, kind=kind)
    whole = generate(engine, [Sequence(0, 0, 0, prompt, key, 20)])[0, 0, 0]
    longer = (*prompt, *whole.token_ids[:3])  # another prompt, which runs already
    engine.add(Sequence(1, 0, 0, longer, sample_key(0, 0, 1, 0), 20))
    engine.step(), engine.step()
    given = list(whole.token_ids[:3]), list(whole.logprobs[:3])
    resumed = Sequence(0, 0, 0, prompt, key, 20, token_ids=given[0], logprobs=given[1])
    assert generate(engine, [resumed])[resumed.id].token_ids == whole.token_ids


@kinds
def test_a_sequence_moves_to_another_engine_and_goes_on_as_before(model, oracle, kind) -> None:
    sequences, here, there = (
        make_sequences(8),
        make_engine(model, kind=kind),
        make_engine(model, kind=kind, page_size=7, max_running=3),
    )
    for s in sequences:
        here.add(s)
    for _ in range(7):
        here.step()
    moved = pickle.loads(pickle.dumps(here.export([s.id for s in sequences[::2]])))
    assert len(moved) == 4 and all(len(s.token_ids) == 7 for s in moved)
    check_invariants(here)
    samples = generate(there, moved) | drain(here)
    assert {i: s.token_ids for i, s in samples.items()} == {
        s.id: oracle(s.prompt_ids, s.key, SamplingConfig()) for s in sequences
    }


@kinds
def test_a_given_length_ignores_the_end_token(model, kind) -> None:
    sequences = make_sequences(6)
    for i, s in enumerate(sequences):
        s.ignore_eos, s.max_new_tokens = i % 2 == 0, 11 + i
    samples = generate(make_engine(model, kind=kind, eos=range(256)), sequences)
    assert [len(samples[s.id].token_ids) for s in sequences] == [11, 1, 13, 1, 15, 1]
    assert samples[sequences[0].id].finish_reason == "length"


def test_prepacked_weights_draw_the_same_tokens_and_follow_the_model(model, oracle, monkeypatch) -> None:
    monkeypatch.setattr(Packed, "MIN_WORK", 0)
    monkeypatch.setattr(Packed, "SMALL", 0)
    sequences, changed = make_sequences(8), copy.deepcopy(model)
    engine = make_engine(changed)
    assert all(
        isinstance(w, Packed) for layer in engine.runner.weights.layers for w in (layer.qkv, layer.out, layer.down)
    )
    assert isinstance(engine.runner.weights.head, Packed)
    expected = {s.id: oracle(s.prompt_ids, s.key, SamplingConfig()) for s in sequences}
    assert {i: s.token_ids for i, s in generate(engine, sequences).items()} == expected
    for tensor in (changed.layers[0].down_proj.weight, changed.embed.weight):  # the embedding is the head too
        tensor.data.mul_(-0.7)
        engine.load_weights(changed, 1)  # packs again
        tokens = {i: s.token_ids for i, s in generate(engine, make_sequences(8)).items()}
        fresh = {i: s.token_ids for i, s in generate(make_engine(changed), make_sequences(8)).items()}
        assert tokens == fresh != expected


def test_generate_takes_text_or_tokens_and_keeps_their_order(model, oracle, tiny_folder) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    engine = Engine(model, RolloutConfig(max_prompt_tokens=24, max_running=3), SamplingConfig(), [NEVER], tokenizer)
    texts = ["one", "two and two"]
    samples = engine.generate(texts, num_responses=3, seed=4, max_new_tokens=9)
    assert samples == engine.generate([tokenizer.encode(text) for text in texts], 3, 4, max_new_tokens=9)
    for i, text in enumerate(texts):
        for r in range(3):
            ids = tuple(tokenizer.encode(text))
            assert samples[i][r].token_ids == oracle(ids, sample_key(4, 0, i, r), SamplingConfig(), 9)


@kinds
def test_a_stop_text_ends_the_response_that_asked_for_it(model, oracle, kind) -> None:
    sequences = make_sequences(4)
    tokens = oracle(sequences[0].prompt_ids, sequences[0].key, SamplingConfig())
    engine = make_engine(model, kind=kind)
    with pytest.raises(ValueError, match="tokenizer"):
        engine.add(replace(sequences[0], stop=("x",)))

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(f"<{i}>" for i in ids)

    engine.tokenizer = engine.flights.tokenizer = SimpleNamespace(decode=decode, all_special_tokens=[])
    sequences[0].stop = ("never", f"<{tokens[19]}><{tokens[20]}>")
    first = oracle(sequences[1].prompt_ids, sequences[1].key, SamplingConfig())
    sequences[1].stop = (f"<{first[0]}>",)  # from the prefill
    last = oracle(sequences[2].prompt_ids, sequences[2].key, SamplingConfig())
    sequences[2].stop, sequences[2].max_new_tokens = (f"<{last[7]}>",), last.index(last[7]) + 1  # at the limit
    samples = generate(engine, sequences)
    assert samples[sequences[1].id].token_ids == first[:1]
    assert samples[sequences[2].id].finish_reason == "stop"
    assert samples[sequences[0].id].token_ids == tokens[:21] and samples[sequences[0].id].finish_reason == "stop"
    assert len(samples[sequences[3].id].token_ids) == LIMIT


def test_a_stop_text_keeps_no_step_waiting(model, oracle) -> None:
    """On a GPU the next step runs while the host looks at texts; the token that it draws is dropped."""
    engine, sequences = make_engine(model, kind=FusedEngine), make_sequences(4)
    reads = SimpleNamespace(decode=lambda ids, **_: "".join(f"<{i}>" for i in ids), all_special_tokens=[])
    engine.tokenizer = engine.flights.tokenizer = reads
    tokens = oracle(sequences[0].prompt_ids, sequences[0].key, SamplingConfig())
    sequences[0].stop = (f"<{tokens[8]}>",)
    for s in sequences:
        engine.add(s)
    done: dict = {}
    while sequences[0].id not in done:
        done |= {sample.id: sample for sample in engine.step()}
        assert len(engine.flights.launched) == 1
    ended = done[sequences[0].id]
    assert ended.token_ids == tokens[: tokens.index(tokens[8]) + 1] and ended.finish_reason == "stop"
    assert len(ended.logprobs) == len(ended.token_ids)
    for s in sequences[1:]:
        done |= drain(engine)
        assert done[s.id].token_ids == oracle(s.prompt_ids, s.key, SamplingConfig(), LIMIT)


def test_a_stop_text_is_not_found_in_the_name_of_a_special_token(model, tiny_folder) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    text = tokenizer.decode([tokenizer.eos_token_id or 0])
    letters = tokenizer.encode(text[2], add_special_tokens=False)
    asking = [Sequence(i, 0, 0, (5,), 0, LIMIT, stop=(text[2],), row=i) for i in (0, 1)]
    drawn = torch.tensor([[letters[0]] * 2, [tokenizer.eos_token_id] * 2])
    assert stopped_by_text([(s, 2) for s in asking], drawn, tokenizer, {}) == {asking[0]: 2}
    asking[0].stop = asking[1].stop = (text, "never")  # a stop text that names it
    assert stopped_by_text([(s, 2) for s in asking], drawn, tokenizer, {}) == {asking[1]: 2}


def test_only_texts_whose_newest_token_may_end_a_stop_text_are_looked_at(tiny_folder, monkeypatch) -> None:
    tokenizer, looked, rng = load_tokenizer(tiny_folder), list[int](), Random(0)
    decode = tokenizer.decode

    def count(ids, **options):
        looked.append(len(ids))
        return decode(ids, **options)

    texts = ["a\u00e9 b\u20ac", "\U0001f600!", "ab ab", "42 \n", "</answer> x"]
    drawn = [
        [5] * 40 + tokenizer.encode("".join(rng.choices(texts, k=3)), add_special_tokens=False) for _ in range(300)
    ]
    drawn = [ids[: rng.randrange(41, len(ids) + 1)][-40:] for ids in drawn]
    asking = [
        (Sequence(i, 0, 0, (5,), 0, 99, stop=("\u00e9", "\u20ac", " ab", "r>", "\n"), row=i), 40) for i in range(300)
    ]
    monkeypatch.setattr(tokenizer, "decode", count)
    found = stopped_by_text(asking, torch.tensor(drawn), tokenizer, {})
    filtered = len([*filter(lambda n: n > 2, looked)])
    looked.clear()
    newest = {s: count for (s, count), ids in zip(asking, drawn, strict=True) if ends_now(ids, s.stop, decode)}
    assert {s: found[s] for s in newest} == newest and 20 < len(newest)
    assert stopped_by_text(asking, torch.tensor(drawn), tokenizer, Everything()).keys() >= found.keys()
    assert filtered < len(looked)


class Everything(dict):
    """Knows of each token that it may end each stop text."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> bool:
        return True


def ends_now(ids: list[int], stops: tuple[str, ...], decode: Callable) -> bool:
    """Whether the newest token completes a stop text that was not there before it."""
    before, now = (decode(part, skip_special_tokens=True) for part in (ids[:-1], ids))
    return any(stop in now and now.count(stop) > before.count(stop) for stop in stops)


@pytest.mark.parametrize("num_pages", [16, 40])
def test_preemption_lets_no_newcomer_overtake(model, num_pages: int) -> None:
    engine, finished = make_engine(model, num_pages=num_pages), []
    for s in make_sequences(12):
        engine.add(s)
    while not engine.is_idle:
        finished += sorted(s.prompt_index for s in engine.step())
    assert engine.stats.preemptions > 0 and finished == sorted(finished)


def test_counters_count(model) -> None:
    engine = make_engine(model, page_size=8)
    generate(engine, make_sequences(5))
    assert engine.stats.decode_steps == LIMIT - 1 and engine.stats.decoded_tokens == 5 * (LIMIT - 1)
    lengths = [len(s.prompt_ids) + LIMIT - 1 for s in make_sequences(5)]  # the last token never enters the cache
    assert engine.stats.peak_pages == sum(-(-length // 8) for length in lengths)


@kinds
@pytest.mark.parametrize("given", [1, 3, 17, LIMIT - 1])
def test_a_continued_sequence_ends_as_if_it_had_not_been_interrupted(model, given: int, kind) -> None:
    whole = generate(make_engine(model, kind=kind), make_sequences(5))
    halves = make_sequences(5)
    for s in halves[::2]:
        s.token_ids = list(whole[s.id].token_ids[:given])
        s.logprobs = list(whole[s.id].logprobs[:given])
    continued = generate(make_engine(model, kind=kind), halves)
    for i, s in whole.items():
        assert continued[i].token_ids == s.token_ids
        torch.testing.assert_close(torch.tensor(continued[i].logprobs), torch.tensor(s.logprobs), rtol=0, atol=1e-5)


def test_a_prompt_that_generate_refuses_leaves_nothing_behind(model) -> None:
    engine = make_engine(model)
    refused: tuple[Any, ...] = ([[5, 6], [7] * 50], "text", ["text"], [[5, 999]], [[]])
    for prompts in refused:
        with pytest.raises(ValueError, match="prompt|token ids"):
            engine.generate(prompts, num_responses=2)
        assert engine.is_idle
    with patch.object(engine.runner.weights, "logits", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        engine.generate([[5, 6], [7, 8]])
    assert engine.is_idle and engine.pages.used == 0
    assert len(engine.generate([[5, 6]])[0][0].token_ids) == LIMIT


# ---- as on a GPU -------------------------------------------------------------------------------------------------


def test_what_has_ended_makes_room_before_anybody_is_preempted(model) -> None:
    """The host learns one step late that a row has ended, and must not preempt another for a page that it holds."""
    first, second = make_sequences(2)
    first.prompt_ids, second.prompt_ids = tuple(range(2, 10)), tuple(range(12, 20))
    first.max_new_tokens, second.max_new_tokens = 9, 16  # the first ends where both have filled two pages of two
    sizes = {"page_size": 8, "max_prompt_tokens": 8, "max_response_tokens": 16}
    engine = make_engine(model, num_pages=4, kind=FusedEngine, **sizes)
    samples = generate(engine, [first, second])
    assert engine.stats.preemptions == 0 and len(samples) == 2


def test_samples_come_one_step_late_and_nothing_is_drawn_after_their_end(model) -> None:
    engine = make_engine(model, kind=FusedEngine)
    short, long = make_sequences(2)
    short.max_new_tokens, long.max_new_tokens = 3, 6
    engine.add(short)
    engine.add(long)
    done = [[sample.id for sample in engine.step()] for _ in range(7)]
    assert done == [[], [], [], [short.id], [], [], [long.id]] and engine.is_idle


def test_what_ended_before_an_abort_is_dropped_with_it_and_kept_without(model) -> None:
    engine = make_engine(model, kind=FusedEngine)
    gone, kept, other = make_sequences(3)
    gone.max_new_tokens = kept.max_new_tokens = 3
    for s in (gone, kept, other):
        engine.add(s)
    for _ in range(3):
        engine.step()  # two have ended; the host has not heard
    assert {id: len(tokens) for id, tokens in engine.abort([gone.id]).items()} == {gone.id: 3}
    assert engine.pages.used == len(other.pages)
    assert set(drain(engine)) == {kept.id, other.id}


@pytest.mark.parametrize("family, count, limit", [("qwen3", 6, LIMIT), ("llama", 6, LIMIT), ("qwen3", 3, 5)])
def test_other_families_draw_the_same_tokens_by_fused_kernels(tiny_folder, family: str, count: int, limit: int) -> None:
    """The short case also runs with the Triton kernels themselves, from `test_kernels_in_the_interpreter`."""
    config = json.loads((tiny_folder / "config.json").read_text()) | {"model_type": family, "head_dim": 16}
    other = Model(parse_shape({**config, "tie_word_embeddings": False, "attention_bias": family == "llama"}, family))
    generator = torch.Generator().manual_seed(1)
    for _, tensor, _ in other.hf_tensors():
        tensor.normal_(0.0, 0.3, generator=generator)
    ours = generate(make_engine(other), make_sequences(count, limit=limit))
    fused = generate(make_engine(other, kind=FusedEngine), make_sequences(count, limit=limit))
    assert {i: s.token_ids for i, s in ours.items()} == {i: s.token_ids for i, s in fused.items()}
    assert len({token for s in ours.values() for token in s.token_ids}) > count * limit / 5


def test_counters_leave_out_what_an_ended_row_does_not_draw(model) -> None:
    engine = make_engine(model, kind=FusedEngine)
    generate(engine, make_sequences(5))
    assert engine.stats.decoded_tokens == 5 * (LIMIT - 1)


def test_a_page_each_but_in_another_order_than_the_rows(model, oracle) -> None:
    group = sequences_for(Visit(0, Prompt(0, (5, 6, 7), "", "", "match")), 2, 0, LIMIT)
    [other] = make_sequences(1, seed=9)
    other.prompt_index = 1
    samples = generate(make_engine(model, page_size=64), [group[0], other, group[1]])
    assert {i: s.token_ids for i, s in samples.items()} == {
        s.id: oracle(s.prompt_ids, s.key, SamplingConfig()) for s in (*group, other)
    }


def test_changed_weights_are_read_in_place(model) -> None:
    changed = copy.deepcopy(model)
    engine = make_engine(changed, kind=FusedEngine, prepack=False)
    places = [w.data_ptr() for layer in engine.runner.weights.layers for w in layer if w is not None]
    expected = {i: s.token_ids for i, s in generate(engine, make_sequences(8)).items()}
    changed.layers[0].down_proj.weight.data.neg_()
    engine.load_weights(changed, 1)
    assert {i: s.token_ids for i, s in generate(engine, make_sequences(8)).items()} != expected
    assert places == [w.data_ptr() for layer in engine.runner.weights.layers for w in layer if w is not None]


@pytest.mark.parametrize("n, rows", [(1, 1), (3, 4), (8, 8), (9, 16), (64, 64), (65, 80), (256, 256), (257, 288)])
def test_graphs_have_few_sizes_and_room_for_all_rows(n: int, rows: int) -> None:
    assert row_bucket(n) == rows


def test_a_layout_captures_its_graphs_when_it_is_first_used_and_the_largest_first(monkeypatch) -> None:
    captured, replayed = [], []

    def capture(step, rows: int) -> SimpleNamespace:
        captured.append(rows)
        return SimpleNamespace(replay=lambda: replayed.append(rows))

    graphs = DecodeGraphs(torch.zeros(20, dtype=torch.int32), max_rows=20, max_width=4)
    graphs.captures = True
    monkeypatch.setattr(graphs, "_capture", capture)
    for n in (3, 20, 1):
        graphs.run(lambda rows: None, n)
    assert captured == [20, 16, 8, 4, 2, 1] and replayed == [4, 20, 1]
    graphs.layout = 2
    graphs.run(lambda rows: None, 1)
    graphs.layout = 1
    graphs.run(lambda rows: None, 2)
    assert len(captured) == 12
    graphs.clear()
    graphs.run(lambda rows: None, 2)
    assert len(captured) == 18 and len(row_counts(256)) == 23


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_sharing_pages_changes_no_token(model, oracle, name: str) -> None:
    prompts = [Prompt(i, s.prompt_ids, "", "", "match") for i, s in enumerate(make_sequences(4))]
    group = [s for prompt in prompts for s in sequences_for(Visit(0, prompt), 5, 0, LIMIT)]
    engine = make_engine(model, kind=FusedEngine, **SETTINGS[name])
    samples: dict = {}
    for i in range(0, len(group), 3):  # siblings arrive together, during the prefill and late
        for s in group[i : i + 3]:
            engine.add(s)
        samples |= {done.id: done for done in engine.step()}
    samples |= drain(engine)
    assert {i: s.token_ids for i, s in samples.items()} == {
        s.id: oracle(s.prompt_ids, s.key, SamplingConfig()) for s in group
    }
    assert (engine.stats.preemptions > 0) == ("memory" in name)


@pytest.mark.parametrize("length, page", [(16, 4), (17, 4), (3, 4), (24, 8)])
def test_a_group_shares_the_pages_of_its_prompt(model, length: int, page: int) -> None:
    engine = make_engine(model, kind=FusedEngine, page_size=page)
    for s in sequences_for(Visit(0, Prompt(0, tuple(range(2, 2 + length)), "", "", "match")), 6, 0, LIMIT):
        engine.add(s)
    engine.step()
    assert engine.pages.used == length // page + 6 * (length % page > 0) and engine.stats.prefilled_tokens == length


# ---- pages -------------------------------------------------------------------------------------------------------


def check_invariants(engine: Engine) -> None:
    """The host's books agree with each other and with the device's."""
    page, n, rows = engine.config.page_size, len(engine.batcher.running), engine.runner.rows
    owned = [p for s in engine.batcher.admitted for p in s.pages]
    if isinstance(engine.pages, BatchedPages):
        assert sorted(owned) == list(range(engine.pages.used))
        for s in engine.batcher.running:
            assert engine.pages.row[s.pages].tolist() == [s.row] * len(s.pages)
            assert engine.pages.start[s.pages].tolist() == [i * page for i in range(len(s.pages))]
    assert len(set(owned)) == engine.pages.used <= engine.pages.size
    assert n <= engine.config.max_running
    assert all(s.row == -1 and not s.pages for s in engine.batcher.waiting)
    for row, s in enumerate(engine.batcher.running):
        assert s.row == row
        assert engine.batcher.num_pages[row] == len(s.pages)
        assert engine.batcher.table[row, : len(s.pages)].tolist() == s.pages
        length = int(engine.batcher.length[row])
        if rows.ended[row]:
            continue  # the host does not know yet
        assert int(rows.length[row]) == length == len(s.prompt_ids) + int(rows.count[row]) - 1
        assert -(-length // page) <= len(s.pages) <= length // page + 1
        assert (int(rows.key[row]), int(rows.limit[row])) == (s.key, s.max_new_tokens)
        assert int(rows.last_token[row]) == int(rows.tokens[row, rows.count[row] - 1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Engine, FusedEngine])
@pytest.mark.parametrize("seed", [0, 1, *map(thorough, range(2, 5))])
def test_books_stay_in_order_through_random_operations(model, oracle, seed: int, kind: type[Engine]) -> None:
    rng = Random(seed)
    page, sampling = rng.choice((1, 3, 4, 16)), SamplingConfig(1.0, 0, rng.choice((1.0, 0.9)))
    needed = -(-64 // page)
    eos = set(range(2, 14))  # a response has about 20 tokens
    rows, budget = rng.choice((3, 8)), rng.choice((16, 8192))
    pages = needed * rng.choice((1, 2, 4))
    engine = make_engine(model, sampling, eos, pages, kind, page_size=page, max_running=rows, step_tokens=budget)
    fresh = make_sequences(32, seed)
    for i, s in enumerate(fresh):
        if seed % 2:  # groups of four with one prompt
            s.prompt_ids = fresh[i // 4 * 4].prompt_ids
        s.max_new_tokens = rng.randint(1, LIMIT)
    added: list[Sequence] = []
    samples: dict[tuple, Sample] = {}
    aborted, preempted = set(), 0
    for _ in range(150):
        operation = rng.choices(("add", "step", "abort", "preempt"), (3, 9, 1, 1))[0]
        if operation == "add" and fresh:
            added.append(fresh.pop())
            engine.add(added[-1])
        elif operation == "step":
            samples |= {s.id: s for s in engine.step()}
        elif operation == "abort" and added:
            ids = {s.id for s in rng.sample(added, min(len(added), 2))}
            aborted |= ids - samples.keys()
            engine.abort(ids)
        elif operation == "preempt" and engine.batcher.running:
            preempt(engine, rng.choice(engine.batcher.running))
            preempted += 1
        check_invariants(engine)
    samples |= drain(engine, check_invariants)
    assert {s.id for s in added} == samples.keys() | aborted and not samples.keys() & aborted
    for s in added:
        if s.id in samples:
            expected = oracle(s.prompt_ids, s.key, sampling, s.max_new_tokens)
            assert samples[s.id].token_ids == until(expected, eos)
    assert len(samples) > 10 and aborted and preempted


# ---- memory for pages --------------------------------------------------------------------------------------------


def refusal(config: RolloutConfig, model: Model) -> str:
    with pytest.raises(ConfigError) as caught:
        num_pages_for(config, model.shape, torch.float32, CPU)
    return str(caught.value)


def test_too_few_pages_are_refused_with_key_value_and_remedy(model) -> None:
    config = RolloutConfig(max_prompt_tokens=100, max_response_tokens=156, page_size=32, kv_gib=1e-5)
    text = refusal(config, model)
    needed = 8
    for part in ("rollout.kv_gib = 1e-05", "max_prompt_tokens + rollout.max_response_tokens = 256", f"needs {needed}"):
        assert part in text
    assert "lower rollout.max_response_tokens" in text
    exact = needed * cache_of(config, model.shape, torch.float32).page_bytes(1) / 2**30
    assert num_pages_for(replace(config, kv_gib=exact), model.shape, torch.float32, CPU) == needed
    assert "holds 7 pages" in refusal(replace(config, kv_gib=exact * 0.999), model)
    assert num_pages_for(replace(config, kv_gib=0.0), model.shape, torch.float32, CPU) == 256 * needed  # all of use


def test_the_remedy_of_a_refusal_is_enough(model) -> None:
    for longest in range(40, 4000, 97):
        config = RolloutConfig(max_prompt_tokens=8, max_response_tokens=longest, kv_gib=1e-7)
        [remedy] = re.findall(r"kv_gib to at least ([\d.e-]+\d)", refusal(config, model))
        num_pages_for(replace(config, kv_gib=float(remedy)), model.shape, torch.float32, CPU)


def test_there_are_no_more_pages_than_the_rows_can_use(model) -> None:
    config = RolloutConfig(max_prompt_tokens=10, max_response_tokens=20, page_size=8, max_running=3, kv_gib=1.0)
    assert num_pages_for(config, model.shape, torch.float32, CPU) == 3 * 4


def test_a_gpu_decodes_ahead_of_its_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded calls: the lower number goes first, and kernels of a graph keep the priority of its capture."""
    priorities = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: priorities.append(priority))
    with FakeTensorMode():
        DecodeGraphs(torch.zeros(4, device="cuda"), 4, 8)
    background_stream(torch.device("cuda"), sm_share=0.0)
    decode, judge = priorities
    assert decode < judge


@kinds
def test_a_released_engine_takes_its_memory_again(model, kind) -> None:
    engine, sequences = make_engine(model, kind=kind), partial(make_sequences, 4)
    before, captured = generate(engine, sequences()), SimpleNamespace()
    if graphs := engine.runner.graphs:
        graphs.graphs[1, 1] = captured
    for sequence in sequences():
        engine.add(sequence)
    with pytest.raises(AssertionError, match="have their pages"):
        engine.release()
    engine.abort([sequence.id for sequence in sequences()])
    engine.release()
    assert engine.runner.memory.whole is None and not (graphs and graphs.graphs), "a graph holds the address"
    with pytest.raises(AssertionError, match="take it back"):
        engine.step()
    engine.take_back()
    assert generate(engine, sequences()) == before
