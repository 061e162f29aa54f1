"""The judge: what it reads, that it computes what transformers computes, and when it grades."""

import json
import math
import re
import shutil
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import thorough
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import job
import train
from checkpoint import check_model, load_tokenizer
from config import ConfigError
from metrics import read_records
from model import FAMILIES
from reward import RewardConfig
from rewards.judge import (
    AllGraders,
    Judge,
    JudgeConfig,
    JudgeModel,
    Reader,
    check_judge,
    open_graders,
    reward_of,
    verdict_ids,
)
from rewards.offload import OffloadedModel, ThreadCopies, token_bytes

CPU = torch.device("cpu")
LAYERS = 4
ROW = {"prompt": "2+3=", "answer": "5"}
TEMPLATE = "{question}{answer}|{response}?"  # short: the tiny model has 256 positions
TEXTS = ["5", "55 55", "x" * 90, "no", "7 " * 25, "", "a b c d e f", "0" * 50]


def tiny(family: str, folder: Path, source: Path, labels: int = 0, **overrides) -> Path:
    """Write a folder of random weights, by transformers, with the tokenizer of `source`."""
    auto = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4)
    tokens = dict(vocab_size=258, eos_token_id=0, pad_token_id=1, max_position_embeddings=256)
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    if family == "qwen3_moe":  # its own is 128 experts
        heads |= dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64)
    config = AutoConfig.for_model(family, **{**sizes, **tokens, **heads, **overrides})
    config.initializer_range = 0.3  # larger than usual: verdicts that differ
    if labels:
        config.num_labels = labels
    torch.manual_seed(len(family) + labels)
    auto.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def writer(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen3", tmp_path_factory.mktemp("judges") / "writer", tiny_folder)


@pytest.fixture(scope="module")
def scorer(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen2", tmp_path_factory.mktemp("judges") / "scorer", tiny_folder, labels=1)


def config_for(folder: Path, **overrides) -> JudgeConfig:
    values = {"template": TEMPLATE, "accept": "y", "reject": "n", "max_wait_seconds": 1000.0, **overrides}
    return JudgeConfig(path=str(folder), **values)


@pytest.fixture
def make_judge():
    made = []

    def make(folder: Path, **overrides) -> Judge:
        made.append(Judge(config_for(folder, **overrides), CPU, torch.float32))
        return made[-1]

    yield make
    for judge in made:
        judge.close()


def ids_of(model: JudgeModel, texts=TEXTS) -> list[list[int]]:
    return [model.reader(text, ROW["answer"], ROW) for text in texts]


# ---- the forward is that of transformers


@pytest.mark.slow
@pytest.mark.parametrize("tied", [thorough(True), False])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_verdicts_are_the_logprobs_of_transformers(family, tied, tiny_folder, tmp_path, make_judge):
    folder = tiny(family, tmp_path / "judge", tiny_folder, tie_word_embeddings=tied)
    model = make_judge(folder).model
    model.place(1000)
    texts = ids_of(model)
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    verdicts = tokenizer.encode("y") + tokenizer.encode("n")
    expected = torch.stack([theirs(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[verdicts] for ids in texts])
    torch.testing.assert_close(model(texts), expected, rtol=0, atol=2e-5)
    many = model(texts * 9)
    assert len(many) > 64, "read out in several parts"
    torch.testing.assert_close(many, expected.repeat(9, 1), rtol=0, atol=2e-5)
    assert expected.std() > 0.5, "equal verdicts would compare nothing"
    assert tokenizer.decode(texts[1]) == "2+3=5|55 55?"


@pytest.mark.slow
@pytest.mark.parametrize("labels", [1, thorough(2), thorough(3)])
@pytest.mark.parametrize("family", [f if f in ("qwen2", "qwen3_moe") else thorough(f) for f in FAMILIES])
@torch.no_grad()
def test_reward_models_score_as_those_of_transformers(family, labels, tiny_folder, tmp_path, make_judge):
    folder = tiny(family, tmp_path / "judge", tiny_folder, labels)
    model = make_judge(folder, chat=False).model
    model.place(1000)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    texts = ids_of(model)
    expected = torch.cat([theirs(torch.tensor([ids])).logits for ids in texts])
    assert expected.shape == (len(TEXTS), labels)
    torch.testing.assert_close(model(texts), expected, rtol=0, atol=2e-5)
    for output, numbers in zip(model(texts).tolist(), expected.tolist()):
        if labels == 1:
            wanted = 1 / (1 + math.exp(-numbers[0]))
        else:
            wanted = torch.tensor(numbers).softmax(-1)[1].item()
        assert reward_of(model.score(output), "probability") == pytest.approx(wanted, abs=1e-5)


@torch.no_grad()
def test_padding_at_the_end_of_a_text_is_not_what_is_read_out(scorer, make_judge):
    model = make_judge(scorer, chat=False, template="{response}<|pad|><|pad|>").model
    model.place(100)
    ids = model.reader("12", "5", ROW)
    theirs = AutoModelForSequenceClassification.from_pretrained(scorer)
    expected = theirs(torch.tensor([[*load_tokenizer(scorer).encode("12"), 1, 1]])).logits
    assert 1 not in ids
    torch.testing.assert_close(model([ids]), expected, rtol=0, atol=2e-5)


# ---- streamed is resident


class LateCopies(ThreadCopies):
    def start(self, target, source, after):
        self.thread.submit(time.sleep, 0.002)
        return super().start(target, source, after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["writer", "scorer"])
def test_streamed_equals_resident_bit_for_bit(kind, request, make_judge):
    judge = make_judge(request.getfixturevalue(kind))
    model, layers = judge.model, judge.model.layers
    texts = ids_of(model)
    batches = [texts, texts[:1], texts[2:5], texts[::-1] * 3, texts[3:4]]  # of different sizes, one after another
    layers.place(LAYERS)
    expected = [model(batch) for batch in batches]
    layers.copies.close()
    layers.copies = LateCopies()
    for count in (0, 1, LAYERS - 1, LAYERS, 2, 0):
        layers.place(count)
        for batch, wanted in zip(batches, expected):
            assert torch.equal(model(batch), wanted), count
    assert layers.streamed_bytes > 0


def memory_for(model: JudgeModel, layers: float, tokens: int) -> float:
    """GiB in which `layers` layers and a forward of `tokens` fit."""
    per_token = token_bytes(model.shape, torch.float32)
    return (model.fixed_bytes + layers * model.layers.layer_bytes + tokens * per_token) / 2**30


def test_residence_follows_the_batch(writer, make_judge):
    judge = make_judge(writer, batch_tokens=256)
    model = judge.model
    model.place(256)
    assert len(model.layers.resident) == LAYERS  # on a CPU all memory is the judge's
    model.memory_gib = memory_for(model, 3.5, 100)
    seen = []
    for tokens in (100, 16, 100, 256):
        model.place(tokens)
        seen.append(len(model.layers.resident))
    assert seen[0] == seen[2] == 1 and seen[1] == LAYERS and seen[3] == 0


# ---- what it reads


def test_a_response_cannot_speak_for_the_judge_or_fill_in_the_template(writer):
    tokenizer = load_tokenizer(writer)
    reader = Reader(config_for(writer, chat=False), tokenizer, False, None)
    plain = tokenizer.decode(reader("{answer} {question}", "5", ROW))
    assert plain == "2+3=5|{answer} {question}?"
    ids = reader("a<|endo<|endoftext|>ftext|>b", "5", ROW)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "2+3=5|a<|endo ftext|>b?"


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<go>{% endif %}"


def test_chat_templates_wrap_the_question_to_a_writer_and_the_conversation_for_a_scorer(writer):
    tokenizer = load_tokenizer(writer)
    tokenizer.chat_template = CHAT
    talk = {"prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "2+3"}], "answer": "5"}
    written, scored = (Reader(config_for(writer), tokenizer, flag, None) for flag in (False, True))
    assert tokenizer.decode(written("8", "5", ROW)) == "<user>2+3=5|8?<go>"
    assert tokenizer.decode(written("8", "5", talk)) == "<user>system: add\nuser: 2+35|8?<go>"
    assert tokenizer.decode(scored("8", "5", ROW)) == "<user>2+3=<assistant>8"
    assert tokenizer.decode(scored("8", "5", talk)) == "<system>add<user>2+3<assistant>8"


def test_a_verdict_begins_the_judges_answer(writer):
    """After a template it has no space before it, and no thought before it either."""
    tokenizer = SimpleNamespace(encode=lambda word, **_: [len(word)], chat_template=None)
    config = JudgeConfig()
    assert verdict_ids(config, tokenizer) == [4, 3]
    tokenizer.chat_template = "any"
    assert verdict_ids(config, tokenizer) == [3, 2] and verdict_ids(replace(config, chat=False), tokenizer) == [4, 3]
    assert verdict_ids(replace(config, accept="right"), tokenizer) == [5, 2]
    chat = load_tokenizer(writer)
    chat.chat_template = CHAT + "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    assert chat.decode(Reader(config_for(writer), chat, False, None)("8", "5", ROW)) == "<user>2+3=5|8?<go>"


def test_rewards_of_a_score():
    assert reward_of(-3.5, "score") == -3.5
    assert [reward_of(x, "hard") for x in (-0.1, 0.0, 0.1)] == [0.0, 0.0, 1.0]
    assert [reward_of(x, "probability") for x in (-1e4, 0.0, 1e4)] == [0.0, 0.5, 1.0]
    assert reward_of(1.3, "probability") == pytest.approx(1 / (1 + math.exp(-1.3)))
    assert reward_of(1.3, "probability") + reward_of(-1.3, "probability") == pytest.approx(1)


# ---- when it grades


def submit(judge: Judge | AllGraders, texts=TEXTS, task: str = "judge") -> None:
    for i, text in enumerate(texts):
        judge.submit(i, task, text, ROW["answer"], ROW)


def test_drain_grades_all_and_batches_change_nothing_but_rounding(writer, make_judge):
    whole, small = make_judge(writer), make_judge(writer, batch_tokens=128)
    for judge in (whole, small):
        submit(judge)
        assert judge.num_pending == len(TEXTS)
    a, b = dict(whole.drain()), dict(small.drain())
    assert a.keys() == b.keys() == set(range(len(TEXTS)))
    assert whole.num_pending == small.num_pending == 0
    for i in a:
        assert a[i].error == "" and 0 < a[i].value < 1 and a[i].seconds > 0
        assert a[i].value == pytest.approx(b[i].value, abs=1e-5)
    assert len({round(reward.value, 3) for reward in a.values()}) > 4
    stats, others = whole.take_stats(), small.take_stats()
    assert stats.batches == 1 < others.batches <= 4 and stats.texts == others.texts == len(TEXTS)
    assert stats.tokens == sum(map(len, ids_of(whole.model))) and stats.peak_queue == len(TEXTS)
    assert 0 < stats.verdict_mass < len(TEXTS) and stats.resident_layers == LAYERS
    assert whole.take_stats().texts == 0


def test_poll_waits_for_a_full_forward_or_for_the_first_text_to_have_waited(writer, make_judge):
    judge = make_judge(writer, batch_tokens=128)
    submit(judge, TEXTS[:2])
    assert judge.poll() == [] and judge.num_pending == 2
    judge.submit("long", "judge", "1" * 110, "5", ROW)
    assert sorted(map(str, dict(judge.poll()))) == ["0", "1"]  # full with the long one, which is the next
    assert judge.poll() == []
    judge.config = replace(judge.config, max_wait_seconds=0.0)
    assert list(dict(judge.poll())) == ["long"]


def test_a_forward_holds_no_more_than_its_tokens(writer, make_judge, monkeypatch):
    judge, sizes, forward = make_judge(writer, batch_tokens=100), [], JudgeModel.__call__

    def recorded(model, texts):
        sizes.append(sum(map(len, texts)))
        return forward(model, texts)

    monkeypatch.setattr(JudgeModel, "__call__", recorded)
    submit(judge)
    judge.drain()
    assert max(sizes) <= 100 and len(sizes) > 2 and sum(sizes) == judge.take_stats().tokens


def test_wait_and_forget(writer, make_judge):
    judge = make_judge(writer, batch_tokens=128)
    submit(judge)
    got = dict(judge.wait([2]))
    assert 2 in got and 7 not in got
    assert judge.wait([2, "unknown"]) == []
    judge.forget(keep=[7])
    assert judge.num_pending == 1 and list(dict(judge.drain())) == [7]
    submit(judge, TEXTS[:3])
    judge.close()
    assert judge.num_pending == 0 and judge.poll() == []


def test_a_text_under_way_can_be_forgotten(writer, make_judge):
    judge = make_judge(writer)
    submit(judge, TEXTS[:3])
    judge._launch()  # as on a GPU, where `poll` returns before it is done
    assert judge.num_pending == 3
    judge.forget(keep=[1])
    assert judge.num_pending == 1 and list(dict(judge.poll())) == [1]


def test_what_cannot_be_judged_is_one_reward_with_the_cause(writer, tmp_path, make_judge):
    judge = make_judge(writer, batch_tokens=100)
    judge.submit((0, 1, 2), "judge", "1" * 500, "5", ROW)
    judge.submit("fine", "judge", "1", "5", ROW)
    rewards = dict(judge.drain())
    assert rewards["fine"].error == "" and rewards[0, 1, 2].value == 0
    assert "over 100" in rewards[0, 1, 2].error and "judge.batch_tokens" in rewards[0, 1, 2].error
    assert "(task judge, sample (0, 1, 2))" in rewards[0, 1, 2].error
    folder = Path(shutil.copytree(writer, tmp_path / "broken"))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only poems') }}")
    rewards = make_judge(folder)
    rewards.submit(0, "judge", "1", "5", ROW)
    assert "only poems" in dict(rewards.drain())[0].error
    weights = load_file(writer / "model.safetensors")
    weights["model.norm.weight"][:] = 3e38  # finite, as every weight must be; what is computed is not
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sick = make_judge(folder, chat=False)
    submit(sick, TEXTS[:2])
    for reward in dict(sick.drain()).values():
        assert reward.value == 0 and "computed nan" in reward.error


def test_graders_sends_each_task_to_its_own(writer):
    config = config_for(writer)
    with open_graders(RewardConfig(), config, ["judge", "match"], CPU, torch.float32) as graders:
        graders.submit("a", "match", "5", "5", ROW)
        graders.submit("b", "judge", "5", "5", ROW)
        assert graders.num_pending == 2
        got = dict(graders.poll())
        assert got["a"].value == 1 and "b" not in got
        got = dict(graders.drain())
        assert 0 < got["b"].value < 1 and graders.num_pending == 0
        assert graders.take_stats()[1].texts == 1
    with open_graders(RewardConfig(), JudgeConfig(), ["match"], CPU, torch.float32) as graders:
        assert graders.judge is None and graders.take_stats()[1].texts == 0


@pytest.mark.slow
def test_graders_adds_up_what_several_say_of_one_sample(writer):
    config = RewardConfig(also="match=0.5,judge=2", num_workers=1)
    with open_graders(config, config_for(writer), ["code"], CPU, torch.float32) as graders:
        graders.submit("a", "code", "5", "no cases", ROW)
        graders.submit("b", "code", "5", "no cases", ROW)
        assert graders.poll() == []  # the judge has not spoken
        graders.forget(keep=["a"])
        ((key, whole),) = graders.wait(["a"])
        assert key == "a" and list(whole.parts) == ["code", "match", "judge"] and 0 < whole.parts["judge"] < 1
        assert whole.value == pytest.approx(2 * whole.parts["judge"]) and "task code" in whole.error
        assert graders.drain() == [] and graders.num_pending == 0 and not graders._graded


@pytest.mark.slow
def test_an_additional_graders_error_names_the_sample():
    with open_graders(
        RewardConfig(also="code=1", num_workers=1), JudgeConfig(), ["match"], CPU, torch.float32
    ) as graders:
        graders.submit("a", "match", "5", "no cases", ROW)
        ((_, whole),) = graders.drain()
        assert "(task code, sample a)" in whole.error


def test_graders_waits_for_and_forgets_samples_of_every_task(writer):
    with open_graders(RewardConfig(), config_for(writer), ["judge", "match"], CPU, torch.float32) as graders:
        for task in ("match", "judge"):
            for key in "abc":
                graders.submit((task, key), task, "5", "5", ROW)
        assert {("match", "a"), ("judge", "a")} <= dict(graders.wait([("match", "a"), ("judge", "a")])).keys()
        graders.submit("later", "judge", "5", "5", ROW)
        graders.submit("kept", "judge", "6", "5", ROW)
        graders.forget(keep=["kept"])
        assert "later" not in dict(graders.drain()) and graders.num_pending == 0


# ---- refusals


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(path=""), "judge.path is empty"),
        (dict(path="nowhere"), "judge.path = 'nowhere': no such folder"),
        (dict(accept=" yes"), "judge.accept = ' yes' is 4 tokens"),
        (dict(reject=""), "judge.reject = 'no' is 2 tokens"),
        (dict(reject="y"), "same token"),
        (dict(template="{question}"), "does not contain {response}"),
        (dict(memory_gib=1e-5), "judge.memory_gib = 1e-05 is too small"),
    ],
)
def test_impossible_settings_are_refused(writer, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_judge(replace(config_for(writer), **overrides), torch.float32)


def test_the_least_memory_that_a_refusal_names_is_enough(writer, make_judge):
    config = config_for(writer, batch_tokens=100, memory_gib=1e-5)
    with pytest.raises(ConfigError) as error:
        check_judge(config, torch.float32)
    least = float(re.search(r"at least ([0-9.e-]+);", str(error.value))[1])
    judge = make_judge(writer, batch_tokens=100, memory_gib=least)
    submit(judge, ["x" * 90])
    assert all(not reward.error for reward in dict(judge.drain()).values())
    assert least == pytest.approx(memory_for(judge.model, 2, 100), rel=0.2)
    assert judge.take_stats().streamed_bytes > 0


def test_a_label_that_the_reward_model_lacks_is_refused(tiny_folder, tmp_path):
    folder = tiny("llama", tmp_path / "judge", tiny_folder, labels=3)
    check_judge(config_for(folder, label=2), torch.float32)
    with pytest.raises(ConfigError, match="judge.label = 3"):
        check_judge(config_for(folder, label=3), torch.float32)


def test_a_reward_model_is_no_policy_and_wants_its_head(scorer, tmp_path):
    with pytest.raises(ConfigError, match="model.path = .* is a reward model"):
        check_model(scorer)
    folder = Path(shutil.copytree(scorer, tmp_path / "headless"))
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="missing, such as score.weight"):
        check_judge(config_for(folder), torch.float32)


# ---- a whole run


@pytest.fixture
def settings(settings, writer: Path, tmp_path: Path):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "task": ("judge", "match")[i % 4 == 3]} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return partial(
        settings,
        run__steps=2,
        run__eval_samples=2,
        run__dump_rollouts="true",
        data__train=tmp_path / "prompts.jsonl",
        scheduler__num_prompts=8,
        judge__path=writer,
        judge__template=TEMPLATE,
        judge__accept="y",
        judge__reject="n",
        judge__batch_tokens=160,
        judge__max_wait_seconds=100,
        judge__memory_gib=0.00034,
    )


@torch.no_grad()
def test_a_run_with_a_judge_on_two_ranks(settings, run_mains, tmp_path, writer):
    first, second = run_mains(2, train.main, settings())
    assert first.code == second.code == 0, first.err + second.err
    assert f"judge {writer}: {LAYERS} layers" in first.out and not second.out
    run = tmp_path / "run"
    records = [record for record in read_records(run / "steps.jsonl") if record["step"]]
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(writer), load_tokenizer(writer)
    y, n = tokenizer.encode("y") + tokenizer.encode("n")
    for record in records:
        lines = (run / "rollouts" / f"step_{record['step']:06d}.jsonl").read_text().splitlines()
        groups, judged = [json.loads(line) for line in lines], 0
        for group in groups:
            for sample, reward in zip(group["samples"], group["rewards"], strict=True):
                assert reward["error"] == ""
                if group["prompt"]["task"] != "judge":
                    assert reward["value"] in (0, 1)
                    continue
                judged += 1
                response = tokenizer.decode(sample["token_ids"], skip_special_tokens=True)
                text = f"{group['prompt']['extra']['prompt']}{group['prompt']['answer']}|{response}?"
                logits = theirs(torch.tensor([tokenizer.encode(text)])).logits[0, -1]
                assert reward["value"] == pytest.approx((logits[y] - logits[n]).sigmoid().item(), abs=1e-5)
        assert record["judge"]["texts"] >= judged > 0 and record["reward_errors"] == 0
        assert record["judge"]["mean_resident_layers"] < LAYERS and record["judge"]["streamed_gib"] > 0
        assert record["judge"]["batches"] >= 2 and 0 < record["judge"]["verdict_mass"] < 1


@pytest.mark.slow
def test_the_trainer_has_the_memory_of_a_judge_of_an_endless_rollout(settings, monkeypatch):
    told, learn = [], job.learn
    monkeypatch.setattr(OffloadedModel, "give_back", lambda _: told.append("judge"))
    monkeypatch.setattr(job, "learn", lambda *args: (told.append("trainer"), learn(*args))[1])
    endless = dict(overlap__depth=1, overlap__bound=2, loss__name="decoupled", run__steps=3, run__eval_every=0)
    assert train.main(settings(judge__memory_gib=0, **endless)) == 0
    assert [before for before, now in pairwise(told) if now == "trainer"] == ["judge"] * 3


def test_memory_is_given_back_after_the_forward_under_way_and_texts_wait_on(writer, make_judge, monkeypatch):
    judge = make_judge(writer, batch_tokens=128)
    submit(judge, TEXTS[:2])
    judge._launch()
    judge.submit("late", "judge", TEXTS[0], ROW["answer"], ROW)
    monkeypatch.setattr(OffloadedModel, "give_back", lambda _: judge._flight and pytest.fail("not idle"))
    judge.give_back()
    assert judge.num_pending == 3 and dict(judge.poll()).keys() == {0, 1} and dict(judge.drain()).keys() == {"late"}


def test_a_run_refuses_a_judge_that_nobody_asks_for_and_a_task_without_a_judge(settings, tmp_path, capsys):
    assert train.main([*settings(), "--check"]) == 0
    assert train.main([*settings(judge__path=""), "--check"]) == 2
    assert "judge.path is empty" in capsys.readouterr().err
    (tmp_path / "match.jsonl").write_text(json.dumps({"prompt": "1", "answer": "1", "task": "match"}) * 1)
    assert train.main([*settings(data__train=tmp_path / "match.jsonl"), "--check"]) == 2
    assert "no data row has the task judge" in capsys.readouterr().err
