"""The model that the repository makes: any text has tokens, and the same inputs give the same bits once."""

import platform
import re
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ALONE, TINY
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import warm_start
from attention import PackedAttention
from checkpoint import WEIGHTS, check_model, load_model, load_tokenizer
from config import ConfigError
from tasks import TASKS, is_held_out
from trainer import Trainer
from warm_start import WarmStartConfig, byte_tokenizer, ensure_model, make_model, model_folder

FEW = replace(TINY, steps=3, batch_size=4, max_positions=1024)
TEXTS = [
    "",
    " ",
    "  two  spaces , and a comma . ",
    "3908=",
    "line\nline\r\n\ttab",
    "emoji 🙂👩‍👩‍👧 ünïcödé 中文 العربية",
    "\x00\x01\x07\x1b\x7f\x80\x9f\ufeff\ufffd\u2028",
    "".join(map(chr, range(256))),
    "e\u0301 and \u00e9 stay apart",
    "<s> [INST] <|im_start|> </s>",
    "".join(chr(c) for c in range(0x100, sys.maxunicode, 61) if unicodedata.category(chr(c)) != "Cs"),
]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def same(one: Path, two: Path) -> bool:
    first, second = tensors(one), tensors(two)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---- tokenizer


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_any_text_comes_back_from_its_tokens(text, tiny_folder):
    for tokenizer in (byte_tokenizer(), load_tokenizer(tiny_folder)):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_every_byte_is_one_token_and_none_is_special(text, tiny_folder):
    tokenizer = load_tokenizer(tiny_folder)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id}.isdisjoint(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_token_is_one_that_the_model_has(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder)
    size = load_file(tiny_folder / WEIGHTS)["model.embed_tokens.weight"].shape[0]
    assert len(tokenizer) == len(byte_tokenizer()) == size == 2 + 256
    ids = {i for text in TEXTS for i in tokenizer.encode(text)}
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 does not use
    assert len(ids) == 256 - len(never) and min(ids) >= 2 and max(ids) < size
    assert tokenizer.encode("a" + tokenizer.eos_token) == [*tokenizer.encode("a"), tokenizer.eos_token_id]
    assert max(tokenizer.encode("<|endoftext|><|im_end|><pad>")) < size


def test_the_chat_template_adds_nothing(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder)
    messages = [{"role": "user", "content": "3908="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode("3908=")


# ---- the folder


def test_two_makes_are_bit_equal_and_the_seed_matters(tmp_path):
    for name, config in {"a": FEW, "b": FEW, "c": replace(FEW, seed=1), "d": replace(FEW, steps=0)}.items():
        torch.manual_seed(ord(name))  # what happened before does not matter
        make_model(config, "hailstone", tmp_path / name, ALONE)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c") and not same(tmp_path / "a", tmp_path / "d")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]


def test_it_is_taught_true_solutions_of_numbers_that_are_not_held_out(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(warm_start, "SAY_SECONDS", 0.0)  # no terminal here, as in a log
    examples, accumulate = [], Trainer.accumulate
    monkeypatch.setattr(Trainer, "accumulate", lambda self, batch: examples.extend(batch) or accumulate(self, batch))
    make_model(replace(FEW, slip=0.0, steps=10), "reverse_add", tmp_path / "model", ALONE)
    said = capfd.readouterr().out.splitlines()
    assert len(said) == 10 and re.fullmatch(r"warm start: step 9 of 10, loss \d\.\d+, \d\d:\d\d left", said[8]), said
    tokenizer, task = load_tokenizer(tmp_path / "model"), TASKS["reverse_add"]
    numbers = {task.prompt(n): n for n in task.numbers()}
    taught = [numbers[tokenizer.decode(example.prompt_ids)] for example in examples]
    assert len(taught) == 40 and len(set(taught)) > 30 and not any(map(is_held_out, taught))
    for n, example in zip(taught, examples):
        *solution, end = example.token_ids
        assert tokenizer.decode(solution) == task.solution(n) and end == tokenizer.eos_token_id


@pytest.mark.slow
@torch.no_grad()
def test_training_lowers_the_surprise_at_held_out_solutions(tmp_path):
    task, surprise = TASKS["hailstone"], []
    for steps in (0, 40):
        folder = tmp_path / str(steps)
        with torch.enable_grad():
            make_model(replace(FEW, steps=steps, batch_size=16), "hailstone", folder, ALONE)
        model, tokenizer = load_model(folder, torch.device("cpu"), torch.float32), load_tokenizer(folder)
        numbers = [n for n in task.numbers() if is_held_out(n)][:20]
        texts = [tokenizer.encode(task.prompt(n) + task.solution(n)) for n in numbers]
        lengths = [len(ids) for ids in texts]
        positions = torch.cat([torch.arange(length) for length in lengths])
        ids = torch.tensor([i for text in texts for i in text])
        hidden = model(ids, positions, PackedAttention(lengths, torch.device("cpu")))
        surprise.append(torch.nn.functional.cross_entropy(model.logits(hidden)[:-1], ids[1:]).item())
    assert surprise[1] < 0.6 * surprise[0]


def test_the_folder_loads_in_transformers(tiny_folder):
    model, info = AutoModelForCausalLM.from_pretrained(tiny_folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert model.config.vocab_size == len(tokenizer)  # more would be tokens without an embedding
    assert model.config.eos_token_id == tokenizer.eos_token_id and model.config.pad_token_id == tokenizer.pad_token_id
    for name in TASKS:
        text = TASKS[name].prompt(97) + TASKS[name].solution(97)
        assert tokenizer.encode(text) == load_tokenizer(tiny_folder).encode(text)


# ---- reuse


@pytest.fixture
def made(monkeypatch) -> list[Path]:
    """Folders that ensure_model had made, in place of making them."""
    calls = []
    monkeypatch.setattr(warm_start, "make_model", lambda config, task, folder, world: calls.append(folder))
    return calls


def test_the_same_inputs_are_made_once(tmp_path):
    first = ensure_model(FEW, "hailstone", tmp_path, ALONE)
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert ensure_model(replace(FEW), "hailstone", tmp_path, ALONE) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written
    assert list(tmp_path.iterdir()) == [first]


CHANGES = {
    "steps": 4,
    "batch_size": 5,
    "lr": 1e-3,
    "slip": 0.5,
    "hidden_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "max_positions": 2048,
    "seed": 1,
    "task": "reverse_add",
}


def test_every_input_has_a_change_here():
    assert CHANGES.keys() == WarmStartConfig.__dataclass_fields__.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_another_input_makes_another_folder(name, tmp_path, made, monkeypatch):
    monkeypatch.setattr(warm_start, "_numbers", lambda task: [27])  # else the longest solution is sought among all
    base = model_folder(FEW, "hailstone", tmp_path)
    other = ensure_model(replace(FEW, **{name: CHANGES[name]}), "hailstone", tmp_path, ALONE)
    assert made == [other] and other != base and other.parent == tmp_path


@pytest.mark.slow
def test_the_task_is_an_input_however_it_is_named(tmp_path):
    assert model_folder(FEW, "reverse_add", tmp_path) != model_folder(FEW, "hailstone", tmp_path)
    named = replace(FEW, task="reverse_add")
    assert model_folder(named, "hailstone", tmp_path) == model_folder(named, "some/file.jsonl", tmp_path)
    assert model_folder(named, "hailstone", tmp_path) == model_folder(FEW, "reverse_add", tmp_path)


def test_other_code_makes_another_folder(tmp_path, monkeypatch):
    base = model_folder(FEW, "hailstone", tmp_path)
    read = Path.read_bytes
    for name in ("tasks.py", "warm_start.py"):
        monkeypatch.setattr(Path, "read_bytes", lambda path, n=name: read(path) + (b"#" if path.name == n else b""))
        assert model_folder(FEW, "hailstone", tmp_path) != base


def test_a_make_that_was_killed_is_made_again(tmp_path):
    folder = model_folder(FEW, "hailstone", tmp_path)
    part, elsewhere = (
        folder.with_name(f".part-{folder.name}-999999999@{node}") for node in (platform.node(), "other.machine")
    )
    for unfinished in (part, elsewhere):
        unfinished.mkdir()
        (unfinished / WEIGHTS).write_bytes(b"half")
    assert ensure_model(FEW, "hailstone", tmp_path, ALONE) == folder
    assert check_model(folder) and {*tmp_path.iterdir()} == {folder, elsewhere}


def _make_as_on_machines_of_their_own(world, folder: str) -> None:
    platform.node = lambda: f"odd/[name]{world.rank}"
    assert ensure_model(replace(FEW, steps=1), "hailstone", Path(folder), world).is_dir()


def test_ranks_on_several_machines_make_one_model(tmp_path, run_ranks):
    run_ranks(2, _make_as_on_machines_of_their_own, str(tmp_path))
    assert [path.name[0] for path in tmp_path.iterdir() if path.name[:5] != "store"] == ["h"]


# ---- refusals


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_context_shorter_than_the_longest_solution_is_refused(task, tmp_path):
    longest = max(len(TASKS[task].prompt(n) + TASKS[task].solution(n)) + 1 for n in TASKS[task].numbers())
    assert model_folder(replace(FEW, max_positions=longest), task, tmp_path)
    with pytest.raises(ConfigError, match=f"warm_start.max_positions = {longest - 1}"):
        model_folder(replace(FEW, max_positions=longest - 1), task, tmp_path)


def test_a_file_cannot_be_taught(tmp_path):
    with pytest.raises(ConfigError) as caught:
        model_folder(FEW, "some/file.jsonl", tmp_path)
    for word in ("model.path is empty", "hailstone, reverse_add", "'some/file.jsonl'", "warm_start.task"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 30}, {"num_heads": 3}, {"num_heads": 6}, {"num_kv_heads": 3}, {"hidden_size": 36}],
    ids=str,
)
def test_sizes_that_do_not_fit_together_are_refused(changes, tmp_path):
    with pytest.raises(ConfigError) as caught:
        model_folder(replace(FEW, **changes), "hailstone", tmp_path)
    [(name, value)] = changes.items()
    assert f"{name} {value}" in str(caught.value)
