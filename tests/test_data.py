"""Prompts: rows become token ids or an error that names their line, and each epoch visits every prompt once."""

import json
import math
import os
import re
import sys
import time
from array import array
from collections import Counter
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.parquet
import pytest
from conftest import any_shape, thorough

import data
from config import ConfigError
from core import FINISH_REASONS, Group, Prompt, Reward, Sample, Span, VisitId
from data import (
    DataConfig,
    PromptCursor,
    dump_groups,
    load_groups,
    load_prompts,
    notes_on,
    open_cursor,
    read_rows,
    write_transcripts,
)
from tasks import TASKS, is_held_out
from warm_start import byte_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def plain():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
def chat():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture
def jsonl(tmp_path):
    """Write rows (dicts, or lines as they are) and return the path."""

    def write(*rows, name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write


def load(tokenizer, train: str, max_prompt_tokens: int = 1000, **options) -> tuple[list[Prompt], list[Prompt]]:
    return load_prompts(DataConfig(train=train, **options), tokenizer, max_prompt_tokens)


def rows(count: int) -> list[dict]:
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(count)]


# ---- rows become prompts


def test_text_rows_become_prompts_in_order(jsonl, plain):
    path = jsonl({"prompt": "1 + 1 =", "answer": "2"}, "", {"prompt": "ü🙂", "answer": ""}, "  ")
    prompts, held_out = load(plain, path)
    assert [(p.index, p.text, p.answer) for p in prompts] == [(0, "1 + 1 =", "2"), (1, "ü🙂", "")]
    assert [list(p.token_ids) for p in prompts] == [plain.encode("1 + 1 ="), plain.encode("ü🙂")]
    assert held_out == []


def test_problems_of_an_environment_are_told_apart_by_their_rows(jsonl, plain):
    path = jsonl(*({"prompt": "guess", "answer": str(i)} for i in range(20)))
    prompts, held_out = load(plain, path, env="guess", eval_prompts=2)
    answers = {p.extra["answer"] for p in prompts}
    assert len(prompts) == 18 and not answers & {p.extra["answer"] for p in held_out}
    assert load(plain, path, eval_prompts=2)[0] == [], "a question that is held out is not trained"


@pytest.mark.parametrize(
    ("options", "grader"),
    [
        ({}, "math"),
        ({"task": "match"}, "match"),
        ({"env": "guess"}, "env"),
        ({"env": "guess", "task": "env"}, "env"),
        ({"env": "guess", "task": "math"}, "math"),
    ],
)
def test_rows_are_graded_by_the_task_that_is_given_else_by_math_or_their_environment(jsonl, plain, options, grader):
    path = jsonl(*rows(4), {"prompt": "2", "answer": "2", "task": "match"})
    assert [prompt.task for prompt in load(plain, path, **options)[0]] == [grader] * 4 + ["match"]


def test_a_template_is_put_around_text_and_nothing_else_in_it_is_touched(jsonl, plain):
    path = jsonl({"prompt": "{answer} {prompt}", "answer": "2"})
    [prompt], _ = load(plain, path, template="Q: {prompt} {x}\nA:{prompt}")
    assert prompt.text == "Q: {answer} {prompt} {x}\nA:{answer} {prompt}"
    assert list(prompt.token_ids) == plain.encode(prompt.text)


def test_text_becomes_a_user_message_of_the_chat_template(jsonl, chat):
    path = jsonl({"prompt": "1 + 1 =", "answer": "2"})
    [prompt], _ = load(chat, path, template="[{prompt}]")
    assert prompt.text == "<user>[1 + 1 =]</user><assistant>"
    assert list(prompt.token_ids) == chat.encode(prompt.text)
    [raw], _ = load(chat, path, template="[{prompt}]", chat=False)
    assert raw.text == "[1 + 1 =]"


def test_a_chat_template_reads_the_options_that_are_given(jsonl, chat, plain):
    path = jsonl({"prompt": "1", "answer": "2"})
    chat.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    for options, end in (("", "<assistant>"), ('{"enable_thinking": false}', "<assistant><think></think>")):
        [prompt], _ = load(chat, path, chat_options=options)
        assert prompt.text == f"<user>1</user>{end}"
    for tokenizer, options, said in (
        (chat, "enable_thinking=false", "is no JSON object"),
        (chat, '{"enable_thinkin": false}', "changes nothing that the chat template writes of .*:1; correct"),
        (chat, '{"tokenize": true}', "sets tokenize"),
        (plain, '{"a": 1}', "has no effect: the tokenizer has no chat template"),
    ):
        with pytest.raises(ConfigError, match=f"data.chat_options .*{said}"):
            load(tokenizer, path, chat_options=options)
    with pytest.raises(ConfigError, match=r"no effect: with data.chat = false"):
        load(chat, path, chat_options='{"a": 1}', chat=False)


def test_prompts_are_encoded_once_for_a_run_and_anew_where_anything_differs(jsonl, chat, monkeypatch):
    written = []
    monkeypatch.setattr(data, "converse", lambda *a, write=data.converse: written.append(a) or write(*a))
    path = jsonl(*rows(30))
    first, others = load(chat, path, eval_prompts=3)
    again, held_out = load(chat, path, eval_prompts=3)
    assert len(written) == 30 and again == first and held_out == others
    assert all(a is b for a, b in zip(first + others, again + held_out, strict=True)) and again is not first
    chat.chat_template = chat.chat_template + "!"
    assert load(chat, path, eval_prompts=3)[0][0].text == first[0].text + "!"
    jsonl(*rows(31))
    assert len(load(chat, path, eval_prompts=0)[0]) == 31
    with pytest.raises(ConfigError, match="raise it, or leave such rows out with data.skip_long"):
        load(chat, path, max_prompt_tokens=2, eval_prompts=0)
    assert len(load(chat, path, eval_prompts=0)[0]) == 31


@pytest.mark.parametrize("as_text", [True, False])
def test_messages_go_through_the_chat_template_as_they_are(jsonl, chat, as_text):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1 ="}]
    path = jsonl({"prompt": messages, "answer": "2"}, {"prompt": "a text", "answer": ""})
    [prompt, _], _ = load(chat, path, chat=as_text, template="[{prompt}]")
    assert prompt.text == "<system>be brief</system><user>1 + 1 =</user><assistant>"
    assert prompt.extra["prompt"] == messages


def test_a_row_names_its_grader_or_takes_the_default(jsonl, plain):
    path = jsonl({"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b", "task": "match"})
    prompts, _ = load(plain, path, task="package.module:grade")
    assert [p.task for p in prompts] == ["package.module:grade", "match"]


OWN = ["package.module:grade", "http://host:8000/score?a=1"]


@pytest.mark.parametrize("task", ["timeit:timeit", "os:system", "http://elsewhere/", "package.module:other", "", *OWN])
@pytest.mark.parametrize("option", ["train", "eval"])
def test_rows_name_built_in_graders_and_what_the_config_names_and_nothing_else(task, option, jsonl, plain):
    row, good = {"prompt": "a", "answer": "b"}, jsonl({"prompt": "a", "answer": "b"}, name="good.jsonl")
    paths = {"train": good, "eval": good, option: jsonl(*({**row, "task": t} for t in ["math", "judge", *OWN, task]))}
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:3: task = 'package.module:grade' is not a grader .*data.graders"
    ):
        load(plain, **paths)
    if task in OWN:
        prompts, held_out = load(plain, **paths, graders=", ".join(OWN))
        named = [p.task for p in (prompts if option == "train" else held_out)]
        assert named == ["math", "judge", *OWN, task]
        assert load(plain, **paths, task=OWN[0], graders=OWN[1])[0]
    else:
        with pytest.raises(ConfigError, match=r"rows.jsonl:5: task = .* is not a grader that a row may name \(match, "):
            load(plain, **paths, graders=", ".join(OWN))


def test_graders_that_the_config_names_are_looked_at_whether_rows_name_them_or_not(jsonl, plain):
    for graders in ("mathematics", "nowhere.py:f", "http://", "match,package.module:"):
        with pytest.raises(ConfigError, match="^data.graders: grader "):
            load(plain, jsonl(GOOD), graders=graders)
    with pytest.raises(ConfigError, match="data.graders = 'match' has no effect: the built-in task hailstone"):
        load(plain, "hailstone", graders="match")


def test_every_field_of_a_row_reaches_the_grader(jsonl, plain):
    # "where", "held_out" and "number" are also names that data.py uses itself.
    fields = {"id": 7, "tags": ["x", {"y": None}], "where": "here", "held_out": False, "number": 1.5, "index": 3}
    [prompt], _ = load(plain, jsonl({"prompt": "a", "answer": "b", "task": "match", **fields}))
    assert prompt.extra == {"prompt": "a", "answer": "b", "task": "match", **fields}


# ---- bad rows

GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    "line, words",
    [
        ("{'prompt': 'a'}", ["not JSON", "column 2"]),
        ('{"prompt": "a", "answer": "b"', ["not JSON"]),
        ('{"prompt": "a", "answer": "b"} {}', ["not JSON", "Extra data"]),
        ("hello", ["not JSON", "one JSON object"]),
        ("[" * 100_000, ["not JSON"]),
        ('{"prompt": "a", "answer": "b", "n": 1' + 5000 * "0" + "}", ["not JSON"]),
        ('["a", "b"]', ["a list, not an object"]),
        ('"text"', ["a str, not an object"]),
        ("null", ["not an object"]),
        ("{}", ["no field 'prompt'", "nothing"]),
        ('{"answer": "b", "id": 1}', ["no field 'prompt'", "answer, id"]),
        ('{"prompt": "a"}', ["no field 'answer'"]),
        ('{"prompt": "", "answer": "b"}', ["prompt = ''", "must be text or a list"]),
        ('{"prompt": 5, "answer": "b"}', ["prompt = 5", "must be text or a list"]),
        ('{"prompt": null, "answer": "b"}', ["prompt = None", "must be text or a list"]),
        ('{"prompt": [], "answer": "b"}', ["prompt = []", "must be text or a list"]),
        ('{"prompt": ["a"], "answer": "b"}', ["prompt = ['a']", "must be text or a list"]),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', ["prompt = [{'role': 'user'}]", "content"]),
        ('{"prompt": [{"role": 1, "content": "a"}], "answer": "b"}', ["prompt = [{'role': 1", "role"]),
        ('{"prompt": "a", "answer": 5}', ["answer = 5", "quotes"]),
        ('{"prompt": "a", "answer": null}', ["answer = None", "must be text"]),
        ('{"prompt": "a", "answer": ["b"]}', ["answer = ['b']", "must be text"]),
        ('{"prompt": "a", "answer": "b", "task": 1}', ["task = 1", "must be text"]),
        ('{"prompt": "a", "answer": "b", "task": null}', ["task = None", "must be text"]),
        ('{"prompt": "' + 50 * "long " + '", "answer": "b"}', ["250 tokens", "rollout.max_prompt_tokens = 200"]),
        ('{"prompt": "\\ud800", "answer": "b"}', ["surrogate"]),
        ('{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}', ["no chat template", "as text"]),
    ],
)
@pytest.mark.parametrize("option", ["train", "eval"])
def test_a_bad_line_is_refused_with_file_and_line_number(line, words, option, jsonl, plain):
    bad = jsonl(GOOD, "", GOOD, line, GOOD)
    good = jsonl(GOOD, name="good.jsonl")
    with pytest.raises(ConfigError) as caught:
        load(plain, **{"train": good, "eval": good, "max_prompt_tokens": 200, option: bad})
    text = str(caught.value)
    assert text.startswith(f"{bad}:4: ") and len(text) < 500
    assert [word for word in words if word not in text] == []


def test_a_long_value_is_shown_short(jsonl, plain):
    with pytest.raises(ConfigError) as caught:
        load(plain, jsonl({"prompt": "a", "answer": ["b" * 10_000]}))
    assert len(str(caught.value)) < 300


def test_a_message_that_the_chat_template_refuses_is_named(jsonl, chat):
    chat.chat_template = "{{ raise_exception('only users may speak') }}"
    path = jsonl(GOOD)
    with pytest.raises(ConfigError) as caught:
        load(chat, path)
    assert f"{path}:1: " in str(caught.value) and "only users may speak" in str(caught.value)


@pytest.mark.slow
def test_a_chat_template_that_is_slow_on_every_row_is_refused_with_the_row(jsonl, chat, monkeypatch):
    def slow(tokenizer, messages, **_):
        rendered.append(messages)
        time.sleep(0.02)
        return "text"

    rendered: list = []
    monkeypatch.setattr(type(chat), "apply_chat_template", slow)
    monkeypatch.setattr(data, "TEMPLATE_SECONDS", 0.1)
    monkeypatch.setattr(data, "ROW_SECONDS", 0.001)
    path = jsonl(*rows(100))
    with pytest.raises(ConfigError, match=f"{path}:[1-6]: the tokenizer's chat template .* 0.1 s .* 0.001 s"):
        load(chat, path, eval_prompts=0)
    assert len(rendered) <= 6
    monkeypatch.setattr(data, "ROW_SECONDS", 1e3)
    monkeypatch.setattr(data, "TEMPLATE_SECONDS", 1e3)
    assert len(load(chat, path, eval_prompts=0)[0]) == 100


def test_a_prompt_as_long_as_allowed_is_taken(jsonl, plain):
    [prompt], _ = load(plain, jsonl({"prompt": "x" * 20, "answer": "b"}), max_prompt_tokens=20)
    assert len(prompt.token_ids) == 20


def test_a_template_without_its_prompt_is_refused(jsonl, plain):
    with pytest.raises(ConfigError, match=r"data.template = 'Q: \{question\}'"):
        load(plain, jsonl(GOOD), template="Q: {question}")


@pytest.mark.parametrize("option", ["train", "eval"])
def test_files_that_cannot_be_read_are_refused_by_key_and_name(option, jsonl, plain, tmp_path):
    good, empty = jsonl(GOOD, name="good.jsonl"), jsonl("", "  ", name="empty.jsonl")
    rows = '{"prompt": "a", "answer": "b"}\n' * 2000 + '{"prompt": "é"}'
    (tmp_path / "latin.jsonl").write_bytes(rows.encode("latin-1"))
    for path, words in {
        "hailstones": "No such file",
        str(tmp_path): "Is a directory",
        empty: "no rows",
        str(tmp_path / "latin.jsonl"): "not UTF-8 text (invalid continuation byte at byte 13 of line 2001)",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load(plain, **{"train": good, "eval": good, option: path})
        assert f"data.{option} = {path!r}" in str(caught.value) and words in str(caught.value)
        assert ("hailstone, " in str(caught.value)) == (option == "train" and "cannot read" in str(caught.value))


# ---- held-out prompts


def texts(prompts: list[Prompt]) -> set[str]:
    return {prompt.text for prompt in prompts}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("count", [0, thorough(1), thorough(100), 10**6])
def test_a_task_holds_the_same_numbers_out_whatever_is_evaluated(task, count, plain):
    prompts, held_out = load(plain, task, eval_prompts=count)
    numbers = TASKS[task].numbers()
    assert [p.extra["number"] for p in prompts] == [n for n in numbers if not is_held_out(n)]
    assert texts(prompts).isdisjoint(texts(held_out)) and len(texts(held_out)) == len(held_out)
    assert len(held_out) == min(count, sum(map(is_held_out, numbers)))
    assert {p.task for p in prompts + held_out} == {TASKS[task].grader}
    for p in prompts[::500] + held_out[::50]:
        assert (p.text, p.answer) == (TASKS[task].prompt(p.extra["number"]), TASKS[task].answer(p.extra["number"]))


@pytest.mark.parametrize(
    "total, asked, held",
    [(100, 512, 10), (100, 7, 7), (100, 0, 0), (25, 512, 2), (9, 512, 0), (1, 1, 0)],
)
def test_a_file_holds_out_a_tenth_at_most_and_loses_no_row(total, asked, held, jsonl, plain):
    path = jsonl(*rows(total))
    prompts, held_out = load(plain, path, eval_prompts=asked)
    assert len(held_out) == held and len(prompts) == total - held
    assert texts(prompts).isdisjoint(texts(held_out))
    assert texts(prompts) | texts(held_out) == {row["prompt"] for row in rows(total)}
    for part in (prompts, held_out):
        assert [p.index for p in part] == list(range(len(part)))
    assert load(plain, path, eval_prompts=asked) == (prompts, held_out)


def test_held_out_rows_come_from_all_over_the_file(jsonl, plain):
    _, held_out = load(plain, jsonl(*rows(100)), eval_prompts=5)
    assert [p.text for p in held_out] == [f"{i} + 1 =" for i in (0, 20, 40, 60, 80)]


def test_a_prompt_that_a_file_repeats_is_not_in_both_parts(jsonl, plain):
    prompts, held_out = load(plain, jsonl(*(9 * rows(7))), eval_prompts=6)
    assert held_out and texts(prompts).isdisjoint(texts(held_out))


def test_an_evaluation_file_takes_nothing_from_training(jsonl, plain):
    train, own = jsonl(*rows(50)), jsonl(*({"prompt": f"e{i}", "answer": ""} for i in range(9)), name="eval.jsonl")
    prompts, held_out = load(plain, train, eval=own, eval_prompts=4)
    assert len(prompts) == 50 and [p.text for p in held_out] == ["e0", "e2", "e4", "e6"], "from all over the file"
    prompts, held_out = load(plain, "hailstone", eval=own)
    assert [p.text for p in held_out] == [f"e{i}" for i in range(9)]
    assert not any(is_held_out(p.extra["number"]) for p in prompts)


def test_long_prompts_are_left_out_where_that_is_asked_for(jsonl, plain) -> None:
    path = jsonl(*({"prompt": n * "x", "answer": str(n)} for n in (3, 50, 4, 10**6)))
    with pytest.raises(ConfigError, match="50 tokens.*leave such rows out with data.skip_long"):
        load(plain, jsonl({"prompt": 50 * "x", "answer": ""}, name="long.jsonl"), max_prompt_tokens=20)
    config = DataConfig(train=path, skip_long=True, eval_prompts=0)
    prompts, held_out = load_prompts(config, plain, 20)
    assert [(p.index, p.answer) for p in prompts] == [(0, "3"), (1, "4")]
    [note] = notes_on(config, prompts, held_out)
    assert note == "2 prompts are over rollout.max_prompt_tokens and left out (data.skip_long)"
    with pytest.raises(ConfigError, match="data.skip_long leaves out all prompts of .*_tokens = 2; raise it"):
        load_prompts(config, plain, 2)


def test_held_out_prompts_that_are_trained_are_told(jsonl, plain) -> None:
    train, own = jsonl(*rows(50)), jsonl(*rows(60)[48:], name="eval.jsonl")
    config = DataConfig(train=train, eval=own)
    [note] = notes_on(config, *load_prompts(config, plain, 1000))
    assert note.startswith("WARNING: 2 of 12 held-out prompts are trained too")
    config = DataConfig(train=train)
    assert not [*notes_on(config, *load_prompts(config, plain, 1000))], "rows held out of the file are not trained"


def test_a_system_message_comes_before_text_prompts(jsonl, chat, plain) -> None:
    path = jsonl({"prompt": "x", "answer": ""}, {"prompt": [{"role": "user", "content": "y"}], "answer": ""})
    prompts, _ = load(chat, path, system="Be short.")
    assert ["Be short." in p.text for p in prompts] == [True, False]
    with pytest.raises(ConfigError, match="data.system has no effect without data.chat and a chat template"):
        load(plain, path, system="Be short.")
    messages = jsonl({"prompt": [{"role": "user", "content": "y"}], "answer": ""}, name="messages.jsonl")
    with pytest.raises(ConfigError, match="data.system = 'Be short.' has no effect: all prompts are messages"):
        load(chat, messages, system="Be short.")


def test_a_prompt_that_holds_its_answer_is_refused(jsonl, chat) -> None:
    said = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(ConfigError, match="rows.jsonl:1: the last message of the prompt is the assistant's"):
        load(chat, jsonl({"prompt": said, "answer": "2"}))


# ---- rollouts on disk


SAMPLE = {
    "prompt_index": 0,
    "response_index": 0,
    "epoch": 0,
    "token_ids": [1, 2],
    "logprobs": [-0.5, -1.0],
    "finish_reason": "stop",
    "spans": [{"start": 0, "end": 2, "version": 0}],
}
LONG = SAMPLE | {"logprobs": [-0.5] * 4, "spans": [{"start": 0, "end": 4, "version": 0}]}
DAMAGE = {
    "no prompt": ("prompt", {}),
    "a huge token of a prompt": ("prompt", "token_ids", [10**9]),
    "no tokens of a prompt": ("prompt", "token_ids", []),
    "a token that is a truth": ("prompt", "token_ids", [True]),
    "a grader that is a list": ("prompt", "task", ["match"]),
    "an index that is a text": ("prompt", "index", "0"),
    "fields that are a list": ("prompt", "extra", []),
    "an epoch that is a text": ("epoch", "0"),
    "no samples": ("samples", []),
    "samples that are none": ("samples", [3]),
    "fewer samples than rewards": ("rewards", [{"value": 0.5}] * 2),
    "rewards that are none": ("rewards", [3]),
    "a reward that is not a number": ("rewards", 0, "value", float("nan")),
    "a part that is no number": ("rewards", 0, "parts", {"a": "b"}),
    "seconds that are a text": ("rewards", 0, "seconds", "1"),
    "an error that is a number": ("rewards", 0, "error", 1),
    "a huge token": ("samples", 0, "token_ids", [1, 10**9]),
    "a token outside the vocabulary": ("samples", 0, "token_ids", [1, 50]),
    "a token below 0": ("samples", 0, "token_ids", [1, -1]),
    "tokens that are texts": ("samples", 0, "token_ids", ["1", "2"]),
    "tokens that are one text": ("samples", 0, "token_ids", "12"),
    "tokens that are fractions": ("samples", 0, "token_ids", [1.0, 2.0]),
    "a context that no position is left for": ("samples", 0, {**LONG, "token_ids": [1, 2, 3, 4]}),
    "experts of a mixture": ("samples", 0, "experts", [0, 1, 0, 1]),
    "no tokens": ("samples", 0, {**SAMPLE, "token_ids": [], "logprobs": []}),
    "short logprobs": ("samples", 0, "logprobs", [-0.5]),
    "logprobs that are texts": ("samples", 0, "logprobs", ["-0.5", "-1"]),
    "logprobs that are nan": ("samples", 0, "logprobs", [-0.5, float("nan")]),
    "logprobs that are infinite": ("samples", 0, "logprobs", [-0.5, float("-inf")]),
    "an end that is none": ("samples", 0, "finish_reason", ["stop"]),
    "a version that is a text": ("samples", 0, "spans", 0, "version", "0"),
    "no spans": ("samples", 0, "spans", []),
    "an older dump": ("samples", 0, {k: v for k, v in SAMPLE.items() if k != "spans"} | {"weights_version": 0}),
    "a span beyond the tokens": ("samples", 0, "spans", 0, "end", 3),
    "an empty span": ("samples", 0, "spans", 0, "end", 0),
    "a span that ends before it begins": ("samples", 0, "spans", 0, {"start": 2, "end": 1, "version": 0}),
    "spans that overlap": ("samples", 0, "spans", [{"start": 0, "end": 2, "version": 0}] * 2),
}


def test_a_dump_is_read_back_as_it_was(tmp_path):
    spans = Span(0, 1, 3), Span(2, 3, 4)
    packed = array("i", [1, 49, 7]), array("f", [-0.1, 0.0, -2.5])
    samples = tuple(Sample(0, i, 2, *packed, reason, spans) for i, reason in enumerate(FINISH_REASONS))
    prompt = Prompt(0, (1,), "é\n", "", "code", {"tests": [1, {"a": None}]}, "rows.jsonl:1")
    rewards = (
        Reward(0.5, 0.25, "", ((0.1, True, False), (2.0, False, True)), {"a": 1.0}, (0.5, 0.0)),
        *[Reward(0, error="died")] * 3,
    )
    groups = [Group(prompt, 2, samples, rewards)]
    dump_groups(tmp_path, 7, groups, [[0.0, 0.0]])
    assert load_groups(tmp_path, 7, any_shape(50)) == groups


def test_transcripts_show_some_prompts_with_reward_and_cause_of_failure(plain, tmp_path):
    text, logprobs, spans = plain.encode("abc"), (0.0,) * 3, (Span(0, 3, 0),)
    groups = [
        Group(
            Prompt(i, (1,), f"question {i}: ", "abc", "match"),
            -1,
            (Sample(i, 0, -1, text, logprobs, "stop", spans),),
            (Reward(1.0) if i else Reward(0.0, error="TimeoutError: 2 s"),),
        )
        for i in range(40)
    ]
    write_transcripts(tmp_path / "new" / "step.txt", groups, plain)
    text = (tmp_path / "new" / "step.txt").read_text()
    assert text.count("--- prompt") == 16 and text.count("error: TimeoutError: 2 s") == 1
    assert "--- prompt 2 | reward 1 | 3 tokens, stop\nquestion 2: abc\nanswer: abc\n" in text


def test_transcripts_tell_given_texts_from_sampled_ones(plain, tmp_path):
    text = plain.encode("map\n..left<|endoftext|>?!right")
    spans = Span(6, 8, 0), Span(8, 11, 1), Span(13, 18, 1)  # an update came in the first turn
    sample = Sample(0, 0, -1, array("i", text), array("f", [0.0] * 18), "stop", spans)
    prompt = Prompt(0, (1,), "lake", "", "env", env="lake")
    write_transcripts(tmp_path / "step.txt", [Group(prompt, -1, (sample,), (Reward(1.0),))], plain)
    assert (tmp_path / "step.txt").read_text().splitlines()[1:-1] == [
        "prompt  | lake",
        "given   | map",
        "        | ..",
        "turn 1  | left",
        "given   | ?!",
        "turn 2  | right",
    ]


def test_a_dump_that_is_none_is_refused_by_name(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    row = {"prompt": asdict(PROMPTS[0]), "epoch": 0, "samples": [SAMPLE], "rewards": [{"value": 0.5}]}
    texts = {text: text for text in ("", "{", "[" * 10**5, "[]", "3", "{}")}
    for name, (*keys, last, value) in DAMAGE.items():
        damaged = inner = json.loads(json.dumps(row))
        for key in keys:
            inner = inner[key]
        inner[last] = value
        texts[name] = json.dumps(damaged)
    texts["groups of two sizes"] = (
        json.dumps(row) + "\n" + json.dumps(row | {k: 2 * row[k] for k in ("samples", "rewards")})
    )
    texts["a group twice"] = json.dumps(row) + "\n" + json.dumps(row)
    for name, text in texts.items():
        path.write_text(text + "\n" * bool(text))
        with pytest.raises(ConfigError, match=r"^run.replay: .*step_000001.jsonl .*dump the step again") as caught:
            load_groups(tmp_path, 1, any_shape(50, 4))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400, name
    path.write_text(json.dumps(row))
    [group] = load_groups(tmp_path, 1, any_shape(50, 4))
    mixture, choices = any_shape(50, 4, experts=3), [0, 1, 2, 1, 0, 2, 1, 0]  # of 2 of 3 tokens, in 2 layers
    for experts, problem in ((choices, ""), (choices[:-1], "7 choices"), ([*choices[:-1], 3], "not 8 below 3")):
        path.write_text(json.dumps(row | {"samples": [{**SAMPLE, "experts": experts}]}))
        with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
            load_groups(tmp_path, 1, mixture)
    path.write_text(json.dumps(row))
    assert group.rewards[0].value == 0.5 and list(group.samples[0].token_ids) == [1, 2]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_groups(tmp_path, 1, any_shape(50, 4))


# ---- tables


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow")


def saved(pyarrow, folder: Path, *tables) -> str:
    """Write a folder as `save_to_disk` of Hugging Face's datasets does, a table to a file."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize("prompt, answer", [("text", "prompt"), ("answer", "prompt"), ("answer", "answer")])
def test_prompt_and_answer_may_have_each_others_names(prompt: str, answer: str, plain, jsonl):
    rows = [{"prompt": f"p{i}", "answer": f"a{i}", "text": f"t{i}"} for i in range(20)]
    found = [p for part in load(plain, jsonl(*rows), prompt_field=prompt, answer_field=answer) for p in part]
    assert sorted((p.text, p.answer) for p in found) == sorted((row[prompt], row[answer]) for row in rows)


def test_a_table_has_the_prompts_that_lines_have(arrow, jsonl, plain, chat, tmp_path):
    some = [{"question": f"{i}?", "solution": str(i), "level": i, "tags": ["a", None]} for i in range(30)]
    talk = [{"question": [{"role": "user", "content": f"{i}?"}], "solution": "x", "task": None} for i in range(9)]
    for tokenizer, given in ((plain, some), (chat, talk)):
        table = arrow.Table.from_pylist(given)
        path, folder = tmp_path / f"{len(given)}.parquet", tmp_path / f"saved{len(given)}"
        pyarrow.parquet.write_table(table, path, row_group_size=4)
        lines = jsonl(*({k: v for k, v in row.items() if v is not None} for row in given))
        fields = dict(prompt_field="question", answer_field="solution", task="match")
        expected = load(tokenizer, lines, **fields)
        for other in (str(path), saved(arrow, folder, table.slice(0, 5), table.slice(5))):
            for mine, theirs in zip(load(tokenizer, other, **fields), expected, strict=True):
                assert [(p.text, p.answer, p.task, p.extra) for p in mine] == [
                    (p.text, p.answer, p.task, p.extra) for p in theirs
                ]
            assert load(tokenizer, other, **fields)[0][-1].where == f"{other} row {len(given)}"


def test_a_table_that_cannot_be_used_is_refused_in_one_line(arrow, plain, tmp_path, monkeypatch):
    good = arrow.table({"prompt": ["a"], "answer": ["b"]})
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    broken = Path(saved(arrow, tmp_path / "broken", good))
    (broken / "data-00000-of-00001.arrow").write_bytes(b"no")
    tables = {
        "numbers": arrow.table({"prompt": ["a", "b"], "answer": [1, 2]}),
        "null": arrow.table({"prompt": ["a", None], "answer": ["1", "2"]}),
        "bytes": arrow.table({"prompt": ["a"], "answer": ["1"], "image": [b"x"]}),
        "latin": arrow.table({"prompt": ["a", "b"], "answer": arrow.array([b"1", b"\xe9"]).view("string")}),
        "none": good.slice(0, 0),
    }
    for name, table in tables.items():
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    for name, words in {
        "splits": ["holds several splits", "splits/train"],
        "bad.parquet": ["cannot be read as a table", "write it again"],
        "broken": ["cannot be read as a table"],
        "numbers.parquet": ["numbers.parquet row 1: answer = 1 must be text; cast its column"],
        "null.parquet": ["null.parquet row 2: no value in column 'prompt'", "fill it in", "data.prompt_field"],
        "bytes.parquet": ["bytes.parquet row 1: column 'image' = b'x' (bytes)", "convert or drop the column"],
        "latin.parquet": ["latin.parquet row 2: column 'answer'", "string", "correct or drop the row"],
        "none.parquet": ["no rows; write a table"],
        "missing.parquet": ["missing.parquet", "No such file"],
    }.items():
        with pytest.raises(ConfigError) as caught:
            load(plain, str(tmp_path / name))
        said = str(caught.value)
        assert [word for word in words if word not in said] == [] and "\n" not in said and len(said) < 500, said
        assert not re.search(r"JSON|lines?\b|quotes", said), said
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="numbers.parquet: .* pip install pyarrow"):
        load(plain, str(tmp_path / "numbers.parquet"))


# ---- several sources


@pytest.mark.slow
def test_sources_are_drawn_by_their_weights_and_held_out_by_them_too(jsonl, plain):
    a, b = (
        jsonl(*rows(400), name="a.jsonl"),
        jsonl(*({"prompt": f"b{i}", "answer": ""} for i in range(50)), name="b.jsonl"),
    )
    config = DataConfig(train="hailstone", mix=f"{a}=0.5, {b}=2.5", eval_prompts=40)
    prompts, held_out = load_prompts(config, plain, 1000)
    assert [p.index for p in prompts] == list(range(len(prompts)))
    assert Counter(p.source for p in held_out) == {"hailstone": 10, a: 5, b: 5}  # of b a tenth at most
    assert texts(prompts).isdisjoint(texts(held_out))
    cursor = open_cursor(config, prompts, 3)
    drawn = cursor.take(800)
    assert Counter(v.prompt.source for v in drawn[:400]) == pytest.approx({"hailstone": 100, a: 50, b: 250}, abs=2)
    assert len({v.id for v in drawn}) == 800, "each visit is drawn once"
    for start in range(0, 800, 32):  # and each batch has the shares
        assert Counter(v.prompt.source for v in drawn[start : start + 32])[b] == pytest.approx(20, abs=2)
    assert drawn == open_cursor(config, prompts, 3).take(800) != open_cursor(config, prompts, 4).take(800)
    hail = [v.id for v in drawn if v.prompt.source == "hailstone"]
    alone, _ = load(plain, "hailstone")
    assert hail == [v.id for v in PromptCursor(alone, 3).take(len(hail))], "its order is that of a run on it alone"


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 5, 333])
def test_a_saved_mixture_goes_on_where_it_was_and_a_copy_looks_ahead(stop, jsonl, plain):
    config = DataConfig(train=jsonl(*rows(20)), mix="reverse_add=0.3", eval_prompts=0)
    prompts, _ = load_prompts(config, plain, 1000)
    one, other = (open_cursor(config, prompts, 1) for _ in range(2))
    one.take(stop)
    state = json.loads(json.dumps(one.state_dict()))
    ahead = copy(one).take(50)
    assert json.loads(json.dumps(one.state_dict())) == state
    other.take(9)
    other.load_state_dict(state)
    assert other.take(50) == ahead == one.take(50)
    with pytest.raises(ConfigError, match="training prompts, data.train now has 20"):
        PromptCursor(prompts[:20], 1).load_state_dict(state)


def test_an_evaluation_may_have_several_files_and_tasks(jsonl, plain):
    a, b = jsonl(*rows(50), name="a.jsonl"), jsonl(*rows(9), name="b.jsonl")
    _, held_out = load(plain, "hailstone", eval=f"{a}, reverse_add,{b}", eval_prompts=30)
    assert Counter(p.source for p in held_out) == {a: 10, "reverse_add": 10, b: 9}
    assert [p.index for p in held_out] == list(range(29))


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("reverse_add", ["data.mix", "'reverse_add'", "SOURCE=NUMBER"]),
        ("reverse_add=much", ["data.mix", "SOURCE=NUMBER"]),
        ("reverse_add=0", ["data.mix: reverse_add = 0", "over 0"]),
        ("reverse_add=-1", ["data.mix: reverse_add = -1"]),
        ("hailstone=nan", ["data.mix", "SOURCE=NUMBER"]),
        ("nowhere.jsonl=1", ["data.mix = 'nowhere.jsonl'", "No such file", "hailstone, "]),
        ("{bad}=1", ["bad.jsonl:2: no field 'answer'"]),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_one_line(mix, words, jsonl, plain):
    bad = jsonl(GOOD, {"prompt": "a"}, name="bad.jsonl")
    with pytest.raises(ConfigError) as caught:
        load(plain, "hailstone", mix=mix.format(bad=bad))
    assert [word for word in words if word not in str(caught.value)] == [] and "\n" not in str(caught.value)


# ---- the cursor

NUM = 7
PROMPTS = [Prompt(i, (i,), str(i), "", "match") for i in range(NUM)]


def ids(cursor: PromptCursor, count: int) -> list[VisitId]:
    return [visit.id for visit in cursor.take(count)]


@pytest.mark.parametrize("count", [1, 2, 3, NUM - 1, NUM, NUM + 1, 3 * NUM])
def test_every_epoch_visits_every_prompt_once_whatever_is_taken_at_a_time(count):
    cursor = PromptCursor(PROMPTS, seed=1)
    taken = [id for _ in range(4 * NUM // count + 1) for id in ids(cursor, count)][: 4 * NUM]
    assert [id.epoch for id in taken] == [epoch for epoch in range(4) for _ in range(NUM)]
    assert len(set(taken)) == 4 * NUM
    assert taken == ids(PromptCursor(PROMPTS, seed=1), 4 * NUM)


def test_epochs_and_seeds_differ_and_are_not_sorted():
    orders = set()
    for seed in (0, 1, 2):
        cursor = PromptCursor(PROMPTS, seed)
        orders |= {tuple(id.prompt for id in ids(cursor, NUM)) for _ in range(5)}
    assert len(orders) == 15 and tuple(range(NUM)) not in orders


def test_other_rows_of_the_same_number_are_refused():
    one, two = ([Prompt(i, (i,), "", str(i + k), "match") for i in range(4)] for k in (0, 9))
    state = PromptCursor(one, 0).state_dict()
    PromptCursor([replace(prompt, token_ids=(7, 8)) for prompt in one], 0).load_state_dict(state)  # another date
    for others in (two, one[::-1]):
        with pytest.raises(ConfigError, match="other rows .* same data"):
            PromptCursor(others, 0).load_state_dict(state)
    del state["rows"]  # of an earlier version
    PromptCursor(two, 0).load_state_dict(state)


def test_a_number_that_json_does_not_know_is_refused(jsonl, tmp_path):
    for number, said in (("NaN", "NaN"), ("1e999", "Out of range float")):
        Path(path := str(tmp_path / "x.jsonl")).write_text(f'{{"prompt": "a", "answer": "b", "x": {number}}}\n')
        with pytest.raises(ConfigError, match=f":1: not JSON that Python can read .*{said}"):
            read_rows(path, "data.train", DataConfig())
    table = pyarrow.table({"prompt": ["a"], "answer": ["b"], "x": [math.inf]})
    pyarrow.parquet.write_table(table, path := str(tmp_path / "x.parquet"))
    with pytest.raises(ConfigError, match="row 1: column 'x' has Infinity"):
        read_rows(path, "data.train", DataConfig())


def test_a_date_out_of_range_is_named(tmp_path):
    at = pyarrow.array([2**62]).view(pyarrow.timestamp("us"))
    table = pyarrow.table({"prompt": ["a"], "answer": ["b"], "at": at})
    pyarrow.parquet.write_table(table, path := str(tmp_path / "x.parquet"))
    with pytest.raises(ConfigError, match="row 1: column 'at'"):
        read_rows(path, "data.train", DataConfig())


def test_a_new_cursor_starts_with_the_first_epoch():
    state = PromptCursor(PROMPTS, 0).state_dict()
    assert state == {"epoch": 0, "position": 0, "num_prompts": NUM, "rows": PromptCursor(PROMPTS, 1).rows}
    assert PromptCursor(PROMPTS, 0).take(0) == []


@pytest.mark.parametrize("position", range(2 * NUM + 2))
def test_a_saved_cursor_goes_on_where_it_was(position):
    cursor = PromptCursor(PROMPTS, seed=4)
    cursor.take(position)
    state = json.loads(json.dumps(cursor.state_dict()))
    other = PromptCursor(PROMPTS, seed=4)
    other.take(3)
    other.load_state_dict(state)
    assert ids(other, 3 * NUM) == ids(cursor, 3 * NUM)
    assert other.state_dict() == cursor.state_dict()


def test_a_cursor_over_other_data_is_refused():
    state = PromptCursor(PROMPTS, 0).state_dict()
    with pytest.raises(ConfigError, match="7 training prompts, data.train now has 6"):
        PromptCursor(PROMPTS[:6], 0).load_state_dict(state)
