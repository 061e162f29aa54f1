"""Chats of several turns are, token by token, what the family's template writes; a chat model that calls tools."""

import json
import re
import runpy
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from conftest import ROOT, steps_of, thorough
from test_model import MIXTURE, make_oracle
from test_turns import note_draws, note_trained
from test_updates import trained
from transformers import PreTrainedTokenizerFast

import train
from config import ConfigError
from core import Prompt, Span, turns_of
from data import DataConfig
from environments import EnvConfig, Episode, resolve
from envs.adapters import calls_in
from envs.chat import Reader, chat_glue
from model import FAMILIES
from rewards import user_files
from rollout import RolloutConfig
from sampling import sample_key
from settings import Config, ModelConfig, check_environments, open_end

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # its own also strips a message; what was sampled stays as it is
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
# Of models that do not think aloud.
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEMPLATES = {"qwen2": CHATML, "qwen3": CHATML, "qwen3_moe": CHATML, "llama": LLAMA, "mistral": MISTRAL, "phi3": PHI}
MARKS = {
    CHATML: ["<|im_start|>", "<|im_end|>"],
    LLAMA: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    MISTRAL: ["<s>", "[INST]", "[/INST]", "</s>"],
    PHI: ["<|user|>", "<|assistant|>", "<|end|>"],
}
MARKS[LLAMA] += ["<|eot_id|>"]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "own_tools.py"))
TEMPLATE = EXAMPLE["TEMPLATE"]
CALLS = [f"<calc>{i}*7</calc>" for i in range(20)]
CALLS += [f'<tool_call>{{"name": "calc", "arguments": {{"expression": "{i}/7"}}}}</tool_call>' for i in range(8)]


def chat_tokenizer(template: str) -> Any:
    """A token for each character, mark of the template and call; a turn ends with the last mark."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, *" \n"]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(characters)}, []))
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=MARKS[template][-1])
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[template]})
    tokenizer.add_tokens(CALLS)
    tokenizer.chat_template = template
    return tokenizer


# ---- templates ---------------------------------------------------------------------------------------------------


def test_every_family_has_a_template_here() -> None:
    assert TEMPLATES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("ends", [True, False], ids=["its end sampled", "stopped by a text"])
def test_a_chat_is_built_as_its_template_writes_it(family: str, ends: bool) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[family])
    reader, messages = Reader(tokenizer, 512, {}), [{"role": "user", "content": "Guess!"}]

    def written() -> list[int]:
        return tokenizer.apply_chat_template(messages, return_dict=False, add_generation_prompt=True)

    ids = written()
    assert reader.tokens("", None) == []
    for turn, reply in (("50", ">"), ("<calc>6*7</calc>\n7", "two\n\nlines"), ("a", "")):
        ids += tokenizer.encode(turn) + [tokenizer.eos_token_id] * ends
        ids += reader.tokens(reply, ids[-1])
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": reply}]
        assert ids == written()


def test_a_turn_that_ends_with_no_end_token_of_the_model_is_told(tmp_path: Path) -> None:
    """As in folders of base models, which name another end token than their template writes."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.eos_token, stopped = "a", RolloutConfig(stop=("<|im_end|>",))
    config = Config(model=ModelConfig(path=str(tmp_path)))
    assert open_end(config, tokenizer, 1000) == "<|im_end|>"
    assert open_end(replace(config, rollout=stopped), tokenizer, 1000) == ""
    assert open_end(replace(config, data=DataConfig(chat=False)), tokenizer, 1000) == ""
    assert open_end(config, chat_tokenizer(CHATML), 1000) == ""
    tokenizer.chat_template = THINKING
    assert open_end(config, tokenizer, 1000) == "<|im_end|>", "though it drops thoughts of earlier turns"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert open_end(config, tokenizer, 1000) == "", "responses have line breaks"
    tokenizer.chat_template = "{{ messages[-1].content }}"
    assert open_end(config, tokenizer, 1000) == "", "a template for one turn"


def test_messages_with_an_environment_stay_a_chat() -> None:
    row: dict = {"prompt": [{"role": "user", "content": "Guess!"}]}
    prompt = Prompt(0, (5,), "", "", "env", row, where="a:1", env="guess")
    config = Config(data=DataConfig(chat=False))
    with pytest.raises(ConfigError, match="a:1: the prompt is a list of messages, whose turns"):
        check_environments(config, [prompt], chat_tokenizer(CHATML), plays=False)
    check_environments(Config(), [prompt], chat_tokenizer(CHATML), plays=False)


THINKING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}")
REWRITING = {
    "drops earlier messages": "{{ messages[-1].content }}",
    "counts messages": "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",
    "drops earlier thinking, as that of Qwen3": THINKING,
    "shortens turns": CHATML.replace("m.content", "m.content[:8]"),
    "writes a reply twice": CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
}


@pytest.mark.parametrize("template", REWRITING.values(), ids=REWRITING)
def test_templates_that_do_not_only_append_are_refused(template: str) -> None:
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="chat template (rewrites|writes turns in different ways)"):
        chat_glue(tokenizer, {})


# ---- calls -------------------------------------------------------------------------------------------------------


def test_calls_are_found_as_by_an_expression_but_in_time_that_grows_with_the_text() -> None:
    rng, plain = Random(0), re.compile(r"<(\w+)>(.*?)</\1>", re.DOTALL)
    pieces = ["<a>", "</a>", "<b>", "</b>", "<a", "/b>", "\n", "x", "<ab>", "</ab>"]
    for _ in range(500):
        text = "".join(rng.choices(pieces, k=rng.randrange(20)))
        assert calls_in(text) == plain.findall(text), text
    assert calls_in("<a>" * 10**5 + "<b>1</b>") == [("b", "1")]  # minutes, if each tag is looked for to the end


# ---- tools -------------------------------------------------------------------------------------------------------


def test_the_calculator_computes_and_refuses_what_is_no_expression() -> None:
    calc = EXAMPLE["calc"]
    assert [calc(text) for text in (" 6*7\n", "(1+2)*3/4", "0.1 + 0.2", "-7 / 7")] == ["42", "9/4", "3/10", "-1"]
    for text in (
        "2**99",
        "__import__('os')",
        "'a'*9",
        "1e999",
        "1/0",
        "(" * 9999,
        "1+" * 9999 + "1",
        "\0",
        "",
        "'1e999999999'",
    ):
        with pytest.raises(Exception, match=".?"):
            calc(text)


@pytest.fixture
def trained_with_tools(settings, tmp_path: Path, monkeypatch) -> Callable[[Any, str], list[dict]]:
    """Train a random model of a family and this tokenizer by configs/qwen_math.toml; return the trained groups.

    What is trained is what was sampled.
    """

    def run(tokenizer: Any, family: str) -> list[dict]:
        tokenizer.save_pretrained(tmp_path / "model")
        ids = {
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "max_position_embeddings": 1024,
            "head_dim": 8,
        }
        ids |= MIXTURE if family == "qwen3_moe" else {}  # its own is 128 experts
        make_oracle({"model_type": family, **ids}, tmp_path / "model")
        rows = [{"prompt": f"What is {i} times 7?", "answer": f"{7 * i}"} for i in range(8)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = settings(
            model__path=tmp_path / "model",
            data__train=tmp_path / "rows.jsonl",
            data__eval_prompts=0,
            data__env=f"{ROOT}/examples/own_tools.py:calculator",
            reward__also=f"math=1,{ROOT}/tests/graders.py:share_of_digits=1",
            data__template=TEMPLATE,
            run__steps=1,
            run__seed=3,  # calls of every kind are drawn
            run__eval_every=0,
            run__dump_rollouts="true",
            scheduler__policy="synchronous",
            rollout__stop=json.dumps(["</tool_call>", "!"]),  # others go on, to their end
            rollout__max_prompt_tokens=400,
            rollout__max_response_tokens=400,
            env__max_turns=6,
            scheduler__num_prompts=8,
            rollout__kv_gib=0.05,
            loss__tis_cap=0,
        )
        drawn = note_draws(monkeypatch)
        seen = note_trained(monkeypatch, lambda id: sample_key(3, *id))
        assert train.main(["--config", f"{ROOT}/configs/qwen_math.toml", *own]) == 0
        assert seen == drawn and max(seen.values()) == 1
        [record] = steps_of(tmp_path / "run")
        assert record["train"]["logprob_diff_max"] < 1e-4 and record["train"]["trained_tokens"] == seen.total()
        [groups] = trained(tmp_path / "run")
        return groups

    return run


@pytest.mark.parametrize(
    "family", ["mistral", *map(thorough, sorted(TEMPLATES.keys() - {"qwen2", "qwen3", "mistral"}))]
)
@pytest.mark.slow
def test_a_chat_with_tools_is_as_its_template_writes_it(trained_with_tools, family: str) -> None:
    """Random models, some of whose tokens are calls."""
    tokenizer = chat_tokenizer(TEMPLATES[family])
    ends, replies, calculator = set(), set(), resolve(f"{ROOT}/examples/own_tools.py:calculator")
    user_files.enter("")
    for row in trained_with_tools(tokenizer, family):
        for sample in row["samples"]:
            question = TEMPLATE.replace("{prompt}", row["prompt"]["extra"]["prompt"])
            messages = [{"role": "user", "content": question}]
            episode = Episode(calculator, row["prompt"]["extra"], 0, EnvConfig.max_turns)
            *answered, last = turns_of([Span(*span.values()) for span in sample["spans"]])
            for turn in answered:
                sampled = sample["token_ids"][turn.start : turn.stop]
                ends.add(is_ended := sampled[-1] == tokenizer.eos_token_id)
                text = tokenizer.decode(sampled[: len(sampled) - is_ended])  # with marks that were drawn within
                episode.act(tokenizer.decode(sampled, skip_special_tokens=True))
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": episode.texts[-1]}]
            replies.update(episode.texts)
            whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert [*row["prompt"]["token_ids"], *sample["token_ids"][: last.start]] == whole
    assert ends == {True, False} and {"42", "<tool_response>\n3/7\n</tool_response>"} <= replies


@pytest.mark.slow
def test_tokens_are_trained_as_they_were_sampled_not_as_the_tokenizer_writes_their_text(trained_with_tools) -> None:
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.add_tokens([a + b for a in "abcdefghij" for b in "abcdefghij"])
    turns = [
        sample["token_ids"][span["start"] : span["end"]]
        for row in trained_with_tools(tokenizer, "qwen2")
        for sample in row["samples"]
        for span in sample["spans"]
    ]
    others = [tokenizer.encode(tokenizer.decode(ids)) != ids for ids in turns]
    assert sum(others) > 10
