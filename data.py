"""Prompts: files and built-in tasks, tokenised and checked before work starts; the cursor over them."""

import json
import pickle
import signal
import threading
import time
import zlib
from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol, TypeVar, get_args, get_origin

import numpy as np

from config import ConfigError, Dataclass, one_line, option, regular
from core import FINISH_REASONS, Group, ModelShape, Prompt, Reward, Sample, Span, Tokenizer, Visit, VisitId, turns_of
from environments import check_environment
from envs.games import ENVIRONMENTS
from policies.curriculum import Curriculum
from reward import by_grader, reward_number
from rewards.graders import GRADERS, TASK_OF_JUDGE, check_grader
from tasks import TASKS, is_held_out

TEMPLATE_SECONDS = 10.0  # the most time that a chat template may take for a row,
ROW_SECONDS = 0.05  # and the most that rows may take on average: 10000 rows of 10 s would take a day
TOKEN_CHARACTERS = 512  # no tokenizer has a longer token
DUMP = "step_{:06d}.jsonl"  # a step in the folder of dumped rollouts
LARGEST_WEIGHT = 1e6  # of a source
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"  # in a folder of Hugging Face's datasets
DEEPEST = 50  # lists and objects within each other in a row; copies and graders recurse into them

T = TypeVar("T", bound=Dataclass)


BUILT_IN = (*TASKS, *ENVIRONMENTS)


@dataclass(frozen=True)
class DataConfig:
    train: str = option("hailstone", f"training prompts: a built-in task ({', '.join(BUILT_IN)}) or a file")
    mix: str = option(
        "",
        "further sources of training prompts, and their weights, as reverse_add=0.5,more.jsonl=2; data.train has "
        "weight 1 unless it is listed",
    )
    eval: str = option(
        "",
        "held-out prompts: files and built-in tasks, separated by commas; empty: the built-in tasks' own, or at "
        "most a tenth of each file of data.train and data.mix",
    )
    eval_prompts: int = option(512, "prompts of an evaluation, at most; 0: no evaluation", min=0)
    skip_long: bool = option(False, "leave out prompts over rollout.max_prompt_tokens, which are refused otherwise")
    prompt_field: str = option("prompt", "field (column) of a file's rows that has the prompt")
    answer_field: str = option("answer", "field (column) of a file's rows that has the answer")
    task: str = option(
        "",
        "grader of rows without a task: match, math, code, judge, module:function, file.py:function, http://...; "
        "empty: env, which takes the rewards of data.env, or math without an environment",
    )
    graders: str = option(
        "", "your own graders that rows may name in addition to data.task, such as mine.py:f, separated by commas"
    )
    env: str = option(
        "",
        f"environment of rows of files: {', '.join(ENVIRONMENTS)}, module:function, file.py:function or http://...; "
        "empty: rows have one turn",
    )
    curriculum: str = option(
        "off",
        "pass_rate: a prompt whose responses all got one reward, as where all pass or none, rests for 1 epoch, then 2, "
        "4, ...; an epoch keeps at least a quarter of its prompts",
        choices=("off", "pass_rate"),
    )
    chat: bool = option(True, "wrap text prompts as a user message when the tokenizer has a chat template")
    chat_options: str = option(
        "",
        'what the chat template reads beside the messages, as a JSON object: {"enable_thinking": false} has Qwen3 '
        "answer at once",
    )
    system: str = option("", "system message before text prompts, for a tokenizer with a chat template")
    template: str = option(
        "{prompt}", "text put around a text prompt, before the chat template; {prompt} is the prompt"
    )

    @property
    def grader(self) -> str:
        """Of rows without a task."""
        return self.task or ("env" if self.env else "math")

    @property
    def options(self) -> dict[str, object]:
        """What the chat template reads beside the messages. Raises ConfigError."""
        return read_options(self.chat_options, "data.chat_options")

    def chat_for(self, tokenizer: Tokenizer) -> dict[str, object] | None:
        """Return the options of the chat template that text prompts go through; None: they go as they are."""
        return self.options if self.chat and tokenizer.chat_template else None

    @property
    def weights(self) -> dict[str, float]:
        """Of each source of training prompts. Raises ConfigError."""
        weights = {self.train: 1.0} | by_grader("data.mix", self.mix, "SOURCE")
        for name, weight in weights.items():
            if not 0 < weight <= LARGEST_WEIGHT:
                raise ConfigError(
                    f"data.mix: {name} = {weight:g} must be over 0 and at most {LARGEST_WEIGHT:g}; leave a source out "
                    "that is not wanted"
                )
        return weights


def read_options(text: str, key: str) -> dict[str, object]:
    """Return what a chat template reads beside the messages, from JSON. Raises ConfigError naming the `key`."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f'{key} = {text!r:.60} is no JSON object; write such as {{"enable_thinking": false}}')
    return checked_options(found, key)


def checked_options(options: dict[str, object], key: str) -> dict[str, object]:
    """Return options of a chat template. Raises ConfigError on those that every template gets."""
    if own := options.keys() & {"tokenize", "add_generation_prompt", "conversation"}:
        raise ConfigError(f"{key} sets {min(own)}, which is given to every template; leave it out")
    return options


class Words(NamedTuple):
    """What errors call the parts of a file, and their remedies."""

    field: str
    rows: str
    missing: str
    as_text: str


OF_LINES = Words("field", "write one JSON object with prompt and answer on each line", "add it", "write it in quotes")
OF_TABLES = Words(
    "value in column", "write a table with a row for each prompt", "fill it in, drop the row", "cast its column to text"
)


@dataclass(frozen=True)
class _Row:
    """A problem before it has tokens."""

    fields: dict  # for its grader
    where: str  # for messages: file and line
    source: str
    held_out: bool = False
    env: str = ""

    @property
    def told(self) -> str:
        """What tells it from others: a file may repeat a prompt, and in an environment problems may have the same."""
        return repr(self.fields if self.env else self.fields["prompt"])


def load_prompts(config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return training and held-out prompts. Raises ConfigError naming file, line, value and remedy."""
    if "{prompt}" not in config.template:
        raise ConfigError(f"data.template = {config.template!r} does not contain {{prompt}}")
    weights, own = config.weights, [name for name in map(str.strip, config.eval.split(",")) if name]
    if {*weights, *own} <= {*BUILT_IN}:
        for key in ("task", "graders", "env"):
            if (value := getattr(config, key)) != getattr(DataConfig, key):
                raise ConfigError(
                    f"data.{key} = {value!r} has no effect: the built-in task {config.train} names its grader; remove "
                    "it, or give your own rows as data.train"
                )
    if (options := config.options) and not tokenizer.chat_template:
        raise ConfigError("data.chat_options has no effect: the tokenizer has no chat template; leave it out")
    train, held_out = list[_Row](), list[_Row]()
    for name, count in zip(weights, _shares(config.eval_prompts, weights.values()), strict=True):
        mine, rest = _divided(name, config, 0 if own else count)
        train += mine
        held_out += rest
    chosen = {row.told for row in held_out if row.source not in BUILT_IN}  # a file may repeat a prompt
    train = [row for row in train if row.source in BUILT_IN or row.told not in chosen]
    for name, count in zip(own, _shares(config.eval_prompts, [1.0] * len(own)), strict=True):
        mine = _divided(name, config, count)[1] if name in BUILT_IN else read_rows(name, "data.eval", config)
        held_out += _spread(mine, count)
    if config.system and not (config.chat and tokenizer.chat_template):
        raise ConfigError("data.system has no effect without data.chat and a chat template; write it into the prompts")
    are_texts = [isinstance(row.fields["prompt"], str) for row in train + held_out]
    for key in ("template", "system") if not any(are_texts) else ():
        if (value := getattr(config, key)) != getattr(DataConfig, key):
            raise ConfigError(f"data.{key} = {value!r:.60} has no effect: all prompts are messages; put it into them")
    if options and not config.chat and all(are_texts):
        raise ConfigError(
            "data.chat_options has no effect: with data.chat = false no prompt is a message; leave it out"
        )
    if empty := weights.keys() - {row.source for row in train} if len(weights) > 1 else ():
        raise ConfigError(f"data.mix: {min(empty)} has no row to train; leave it out")
    told = train, held_out, config, max_prompt_tokens, pickle.dumps(tokenizer)
    if not _encoded or _encoded[0][0] != told:
        encoder = _Encoder(config, tokenizer, max_prompt_tokens)
        _encoded[:] = [(told, (encoder.prompts(train), encoder.prompts(held_out)))]
    prompts, others = _encoded[0][1]
    if lost := weights.keys() - {prompt.source for prompt in prompts} if config.skip_long else ():
        raise ConfigError(
            f"data.skip_long leaves out all prompts of {min(lost)}: they are over rollout.max_prompt_tokens = "
            f"{max_prompt_tokens}; raise it"
        )
    return [*prompts], [*others]


# The last prompts, after what they were made of: the check of a run, the run, ranks that change sides want the same.
_encoded: list[tuple[tuple[list[_Row], list[_Row], object, object, object], tuple[list[Prompt], list[Prompt]]]] = []


def notes_on(config: DataConfig, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> Iterator[str]:
    """Yield what a user should know of the prompts that `load_prompts` has just returned."""
    (train, rows, *_), _ = _encoded[0]
    if left_out := len(train) + len(rows) - len(prompts) - len(held_out):
        yield f"{left_out} prompts are over rollout.max_prompt_tokens and left out (data.skip_long)"
    own = {name.strip() for name in config.eval.split(",")} - {*BUILT_IN}
    trained, there = {row.told for row in train}, {prompt.where for prompt in held_out}
    if common := sum(row.told in trained for row in rows if row.source in own and row.where in there):
        yield f"WARNING: {common} of {len(held_out)} held-out prompts are trained too: training files have them as well"


def _divided(name: str, config: DataConfig, count: int) -> tuple[list[_Row], list[_Row]]:
    """Return a source's rows to train, and `count` to hold out: of a file a tenth at most, which are in both."""
    if name not in BUILT_IN:
        rows = read_rows(name, "data.train" if name == config.train else "data.mix", config)
        return rows, _spread(rows, min(count, len(rows) // 10))
    rows = _task_rows(name) if name in TASKS else _game_rows(name)
    train, held_out = ([row for row in rows if row.held_out == flag] for flag in (False, True))
    return train, _spread(held_out, count)


def _shares(total: int, weights: Iterable[float]) -> list[int]:
    """Divide a total by weights, into whole numbers with that sum."""
    sums = list(accumulate(weights, initial=0.0))
    ends = [round(total * part / sums[-1]) for part in sums] if sums[-1] else [0]
    return [end - start for start, end in zip(ends, ends[1:])]


def _spread(rows: list[_Row], count: int) -> list[_Row]:
    """Return `count` rows at even distances."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def _task_rows(name: str) -> list[_Row]:
    task = TASKS[name]
    return [
        _Row(
            {"prompt": task.prompt(n), "answer": task.answer(n), "task": task.grader, "number": n, **task.fields},
            f"{name} {n}",
            name,
            is_held_out(n),
        )
        for n in task.numbers()
    ]


def _game_rows(name: str) -> list[_Row]:
    game = ENVIRONMENTS[name]
    return [
        _Row({**game.row(n), "task": "env", "number": n}, f"{name} {n}", name, is_held_out(n), name)
        for n in game.numbers()
    ]


def read_rows(path: str, key: str, config: DataConfig) -> list[_Row]:
    """Return the rows of a file. Raises ConfigError naming the `key`, file, line, value and remedy."""
    graders, is_stored = _graders(config), is_table(path)
    words = OF_TABLES if is_stored else OF_LINES
    try:
        found = _stored(path) if is_stored else _lines(path)
        rows = [_row(fields, where, path, words, config, graders) for where, fields in found]
    except OSError as error:
        built_in = "" if key == "data.eval" else f", and no built-in task has that name ({', '.join(BUILT_IN)})"
        raise ConfigError(f"{key} = {path!r}: cannot read this file ({error.strerror or error}){built_in}") from None
    except UnicodeDecodeError as error:  # its place is one in a block of the file
        raise ConfigError(f"{key} = {path!r}: not UTF-8 text ({_not_text(path, error)}); convert the file") from None
    if not rows:
        raise ConfigError(f"{key} = {path!r}: no rows; {words.rows}")
    return rows


def _not_text(path: str, found: UnicodeDecodeError) -> str:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{error.reason} at byte {error.start + 1} of line {number}"
    return found.reason


def _lines(path: str) -> Iterator[tuple[str, dict]]:
    """Yield the place and the fields of each line that is not blank. Raises ConfigError."""
    with open(regular(path), encoding="utf-8-sig") as file:  # skips a byte order mark
        for number, line in enumerate(file, 1):
            if line.strip():
                yield (where := f"{path}:{number}"), _parsed(line, where)


def is_table(path: str) -> bool:
    """Whether a path is a parquet file, or a folder that `save_to_disk` of Hugging Face's datasets has written."""
    return path.endswith(".parquet") or any((Path(path) / name).is_file() for name in (SAVED, SAVED_SPLITS))


def _stored(path: str) -> Iterator[tuple[str, dict]]:
    """Yield the place and the fields of each row of a table, without what is null. Raises ConfigError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path}: tables need a package that is not installed: pip install pyarrow") from None
    regular(path)
    if (Path(path) / SAVED_SPLITS).is_file():
        raise ConfigError(
            f"{path}: holds several splits; name the folder of one of them, such as {Path(path, 'train')}"
        )
    try:
        if path.endswith(".parquet"):
            tables = [pyarrow.parquet.ParquetFile(path).read()]
        else:
            files = [file["filename"] for file in json.loads((Path(path) / SAVED).read_text())["_data_files"]]
            tables = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(Path(path) / file))).read_all() for file in files]
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read as a table ({one_line(error, 200)}); write it again") from None
    rows = (zip(*batch.columns, strict=True) for table in tables for batch in table.to_batches())
    for number, row in enumerate(chain.from_iterable(rows), 1):
        where = f"{path} row {number}"
        fields = {name: _cell(cell, f"{where}: column {name!r}") for name, cell in zip(tables[0].column_names, row)}
        yield where, {name: value for name, value in fields.items() if value is not None}


class Cell(Protocol):
    """A cell of a table, as pyarrow has it."""

    type: object

    def as_py(self) -> object: ...


def _cell(cell: Cell, where: str) -> object:
    """Return the value of a table's cell, as JSON would have it. Raises ConfigError."""
    try:
        value = cell.as_py()
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date out of range
        raise ConfigError(f"{where} has a {cell.type} that cannot be read ({error}); correct or drop the row") from None
    try:
        return json.loads(json.dumps(value), parse_constant=_no_number)
    except ValueError as error:
        raise ConfigError(f"{where} has {error}; correct or drop the row") from None
    except TypeError:
        kind = type(value).__name__
        raise ConfigError(
            f"{where} = {value!r:.60} ({kind}) is not text, a number or a list of them; convert or drop the column"
        ) from None


def _graders(config: DataConfig) -> list[str]:
    """Return the graders that rows may name. The user lists them: data must not choose code that runs."""
    own = [name for name in map(str.strip, config.graders.split(",")) if name]
    for key, name in (("task", config.grader), *(("graders", name) for name in own)):
        try:
            if name != TASK_OF_JUDGE:
                check_grader(name)
        except ConfigError as error:
            raise ConfigError(f"data.{key}: {error}") from None
    if config.env:
        check_environment(config.env, "data.env: environment")
    built_in = [name for name in GRADERS if name != "env" or config.env]
    return list(dict.fromkeys([*built_in, TASK_OF_JUDGE, config.grader, *own]))


def _no_number(text: str) -> None:
    raise ValueError(f"{text}, which is no number of JSON: services could not read it")


def _parsed(line: str, where: str) -> dict:
    try:
        row = json.loads(line, parse_constant=_no_number)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        said = f"{error.msg} at column {error.colno}"
        raise ConfigError(f"{where}: not JSON ({said}); write one JSON object on each line") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: holds half a character (a lone surrogate, such as \\ud800); remove it") from None
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise ConfigError(f"{where}: not JSON that Python can read ({error}); correct or shorten it") from None
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: a {type(row).__name__}, not an object; write {{"prompt": ..., "answer": ...}}')
    return row


def _row(row: dict, where: str, source: str, words: Words, config: DataConfig, graders: list[str]) -> _Row:
    if _is_deep(row, DEEPEST):
        raise ConfigError(f"{where}: lists and objects nest over {DEEPEST} deep; flatten the row")
    for field, own in (("prompt", config.prompt_field), ("answer", config.answer_field)):
        if own not in row:
            has = f"it has: {', '.join(row) or 'nothing'}"
            raise ConfigError(f"{where}: no {words.field} {own!r} ({has}); {words.missing}, or set data.{field}_field")
    row |= {"prompt": row[config.prompt_field], "answer": row[config.answer_field]}  # either may have the other's name
    prompt = row["prompt"]
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in prompt
    )
    if not prompt or not (is_chat or isinstance(prompt, str)):
        raise ConfigError(f'{where}: prompt = {prompt!r:.60} must be text or a list of {{"role", "content"}} messages')
    if is_chat and prompt[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the last message of the prompt is the assistant's, which the model is to write; remove it"
        )
    for field in ("answer", "task"):
        if not isinstance(row.get(field, ""), str):
            raise ConfigError(f"{where}: {field} = {row[field]!r:.60} must be text; {words.as_text}")
    if "task" in row and row["task"] not in graders:
        raise ConfigError(
            f"{where}: task = {row['task']!r:.60} is not a grader that a row may name ({', '.join(graders)}); "
            "correct it, or list your own grader in data.graders"
        )
    return _Row({"task": config.grader, **row}, where, source, env=config.env)


def _is_deep(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (not levels or any(_is_deep(item, levels - 1) for item in inner))


class _Encoder:
    """Turns rows into prompts. Limits the time that a chat template takes for them."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, max_tokens: int):
        self.config, self.tokenizer, self.max_tokens = config, tokenizer, max_tokens
        self.reads_options = False  # the chat template, as a first prompt has shown
        self.seconds_left = TEMPLATE_SECONDS  # for the next row: each row adds some, and unused seconds are kept

    def prompts(self, rows: Sequence[_Row]) -> list[Prompt]:
        prompts, most, skips = list[Prompt](), self.max_tokens, self.config.skip_long
        for row in rows:
            prompt = self._prompt(len(prompts), row)
            if prompt and not (skips and len(prompt.token_ids) > most):
                prompts.append(prompt)
        if empty := next((p for p in prompts if not p.token_ids), None):
            raise ConfigError(f"{empty.where}: the prompt has no tokens")
        if long := [p for p in prompts if len(p.token_ids) > most]:
            longest = max(len(p.token_ids) for p in long)
            raise ConfigError(
                f"{long[0].where}: the prompt has {len(long[0].token_ids)} tokens, over rollout.max_prompt_tokens = "
                f"{most}; raise it, or leave such rows out with data.skip_long ({len(long)} are too long, the longest "
                f"has {longest})"
            )
        return prompts

    def _prompt(self, index: int, row: _Row) -> Prompt | None:
        """Return the row with its tokens; None: it is far too long, and may be left out."""
        where, tokenizer = row.where, self.tokenizer
        prompt, answer, task = (row.fields[name] for name in ("prompt", "answer", "task"))
        try:
            is_chat = not isinstance(prompt, str) or (self.config.chat and bool(tokenizer.chat_template))
            text = self._written(prompt, where) if is_chat else self.config.template.replace("{prompt}", prompt)
            if len(text) > TOKEN_CHARACTERS * self.max_tokens:  # to make its tokens could take minutes
                if self.config.skip_long:
                    return None
                raise ConfigError(
                    f"{where}: the prompt has {len(text)} characters, far too many for rollout.max_prompt_tokens = "
                    f"{self.max_tokens}; raise it, or leave such rows out with data.skip_long"
                )
            text.encode()  # the tokenizer's message about half a character would not name the cause
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=not is_chat))  # a chat template writes them
            text = tokenizer.decode(token_ids) if is_chat else text
        except ConfigError:
            raise
        except Exception as error:  # a template is a program of the model's author and may raise anything
            said = one_line(error)
            raise ConfigError(f"{where}: the tokenizer or its chat template refuses this prompt: {said}") from None
        return Prompt(index, token_ids, text, answer, task, row.fields, where, row.env, row.source)

    def _written(self, prompt: str | list[dict], where: str) -> str:
        """Return the prompt as the chat template writes it."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": self.config.template.replace("{prompt}", prompt)}]
            prompt = [{"role": "system", "content": self.config.system}] * bool(self.config.system) + prompt
        elif not self.tokenizer.chat_template:
            raise ConfigError(
                f"{where}: prompt is a list of messages, but the tokenizer has no chat template; write it as text"
            )
        options, start = self.config.options, time.monotonic()
        try:
            text = converse(self.tokenizer, prompt, True, self.seconds_left, options)
            if options and not self.reads_options:
                if converse(self.tokenizer, prompt, True, self.seconds_left) == text:
                    raise ConfigError(
                        f"data.chat_options = {self.config.chat_options!r:.60} changes nothing that the chat template "
                        f"writes of {where}; correct the names, or leave it out"
                    )
                self.reads_options = True
        except TimeoutError:
            raise ConfigError(
                f"{where}: the tokenizer's chat template takes too long: it may take {TEMPLATE_SECONDS:g} s for a row, "
                f"and {ROW_SECONDS:g} s on average; correct it"
            ) from None
        left = max(self.seconds_left - (time.monotonic() - start), 0.0)
        self.seconds_left = min(left + ROW_SECONDS, TEMPLATE_SECONDS)
        return text


def converse(
    tokenizer: Tokenizer,
    messages: list[dict],
    add_generation_prompt: bool,
    seconds: float = TEMPLATE_SECONDS,
    options: Mapping[str, object] = {},
) -> str:
    """Return the messages as the chat template writes them, which reads `options`. Raises the template's own errors.

    In the main thread it raises TimeoutError after `seconds`; in others, as a server's, nothing ends it.
    """

    def ring(*_: object) -> None:
        raise TimeoutError(f"it does not end within {seconds:g} s")

    kind: dict = {**options, "tokenize": False, "add_generation_prompt": add_generation_prompt}
    write = partial(tokenizer.apply_chat_template, messages, **kind)
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        return write()
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return write()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def checksum(prompts: Iterable[Prompt]) -> int:
    """A checksum of prompts and answers as the data has them: a chat template may write another date each day."""
    return zlib.crc32(repr([(prompt.extra.get("prompt"), prompt.answer) for prompt in prompts]).encode())


class PromptCursor:
    """The cursor over the training prompts: each epoch is a seeded permutation, every prompt once.

    With a curriculum, prompts that rest are skipped. `lane`: which of several cursors with one seed it is.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, curriculum: Curriculum | None = None, lane: int = 0):
        self.prompts, self.seed, self.lane, self.curriculum = prompts, seed, lane, curriculum
        self._move(0, 0)

    def _move(self, epoch: int, position: int, skipped: int = 0) -> None:
        self.epoch, self.position, self.skipped = epoch, position, skipped
        seeds = self.seed, epoch, *[self.lane] * (self.lane > 0)
        self._order = np.random.default_rng(seeds).permutation(len(self.prompts))

    def take(self, count: int) -> list[Visit]:
        """Return the next `count` visits; an epoch that ends is followed by the next."""
        taken = list[Visit]()
        while len(taken) < count:
            if self.position == len(self.prompts):
                self._move(self.epoch + 1, 0)
            prompt = self.prompts[self._order[self.position]]
            self.position += 1
            if self.curriculum and self.curriculum.skips(self.epoch, prompt.index, self.skipped, len(self.prompts)):
                self.skipped += 1
            else:
                taken.append(Visit(self.epoch, prompt))
        return taken

    def observe(self, visits: Mapping[VisitId, bool]) -> dict[str, dict]:
        """Tell the curriculum of visits, and whether their rewards differ; return its section of a record."""
        if not self.curriculum:
            return {}
        for id, varies in visits.items():
            self.curriculum.observe(*id, varies)
        resting = self.curriculum.resting(self.epoch)
        return {"curriculum": {"resting": resting, "skipped": self.skipped, "epoch": self.epoch}}

    def state_dict(self) -> dict:
        state = {"epoch": self.epoch, "position": self.position, "num_prompts": len(self.prompts), "rows": self.rows}
        own = {"skipped": self.skipped, "curriculum": self.curriculum.state_dict()} if self.curriculum else {}
        return state | own

    @cached_property
    def rows(self) -> int:
        return checksum(self.prompts)

    def load_state_dict(self, state: dict) -> None:
        check_prompts(state, self.prompts)
        if state.get("rows", self.rows) != self.rows:
            raise ConfigError(
                "the checkpoint was written with other rows of data.train, or with the same in another order; resume "
                "with the same data"
            )
        self._move(state["epoch"], state["position"], state.get("skipped", 0))
        if self.curriculum:
            self.curriculum.load_state_dict(state["curriculum"])


class Mixture:
    """A cursor over several sources: each has a cursor of its own, and each visit comes from one of them, by weight.

    Which one is a function of the seed and the number of visits before: points that lie ever denser and evenly between
    0 and 1 (Weyl's sequence of the golden ratio) fall into parts as long as the weights. So any stretch of visits has
    the shares of the weights, up to a few visits.
    """

    STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio

    def __init__(self, cursors: Sequence[PromptCursor], weights: Sequence[float], seed: int):
        self.cursors, self.drawn = list(cursors), 0
        self.prompts = [prompt for cursor in cursors for prompt in cursor.prompts]
        self._lanes = {prompt.index: i for i, cursor in enumerate(cursors) for prompt in cursor.prompts}
        *self._bounds, self._total = accumulate(weights)
        self._start = Random(f"mixture {seed}").getrandbits(64)

    def __copy__(self) -> "Mixture":
        other = object.__new__(Mixture)
        vars(other).update(vars(self), cursors=[copy(cursor) for cursor in self.cursors])
        return other

    def take(self, count: int) -> list[Visit]:
        """Return the next `count` visits."""
        taken = list[Visit]()
        for _ in range(count):
            point = (self._start + self.drawn * self.STEP) % 2**64 / 2**64
            taken += self.cursors[bisect(self._bounds, point * self._total)].take(1)
            self.drawn += 1
        return taken

    def observe(self, visits: Mapping[VisitId, bool]) -> dict[str, dict]:
        """Tell each source's curriculum of its visits (see `PromptCursor.observe`)."""
        own: list[dict[VisitId, bool]] = [{} for _ in self.cursors]
        for id, varies in visits.items():
            own[self._lanes[id.prompt]][id] = varies
        records = {c.prompts[0].source: c.observe(mine) for c, mine in zip(self.cursors, own, strict=True)}
        told = {source: record["curriculum"] for source, record in records.items() if record}
        return {"curriculum": told} if told else {}

    def state_dict(self) -> dict:
        sources = [cursor.state_dict() for cursor in self.cursors]
        return {"drawn": self.drawn, "num_prompts": len(self.prompts), "sources": sources}

    def load_state_dict(self, state: dict) -> None:
        check_prompts(state, self.prompts)
        self.drawn = state["drawn"]
        for cursor, own in zip(self.cursors, state["sources"], strict=True):
            cursor.load_state_dict(own)


Cursor = PromptCursor | Mixture


def open_cursor(config: DataConfig, prompts: Sequence[Prompt], seed: int) -> Cursor:
    """Return the cursor over training prompts that the settings ask for."""
    cursors = []
    for lane, source in enumerate(config.weights):
        own = [prompt for prompt in prompts if prompt.source == source]
        cursors.append(PromptCursor(own, seed, Curriculum() if config.curriculum == "pass_rate" else None, lane))
    return Mixture(cursors, list(config.weights.values()), seed) if len(cursors) > 1 else cursors[0]


def check_prompts(state: dict, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if a cursor's state is of another number of prompts."""
    if state["num_prompts"] != len(prompts):
        raise ConfigError(
            f"the checkpoint was written with {state['num_prompts']} training prompts, data.train now has "
            f"{len(prompts)}; resume with the same data"
        )


# ---- rollouts on disk --------------------------------------------------------------------------------------------


def dump_groups(
    folder: Path, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | tuple[float, ...]]]
) -> None:
    """Write a step's groups, one JSON line each: prompt, samples (tokens, log-probs), rewards, advantages [P][R].

    An advantage is a number, or a tuple with one of each turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / DUMP.format(step)
    part = path.with_suffix(".part")
    with open(part, "w", encoding="utf-8") as file:
        for group, row in zip(groups, advantages, strict=True):
            file.write(json.dumps({**asdict(group), "advantages": row}, default=list) + "\n")  # arrays as lists
    part.replace(path)


def labelled(label: str, text: str) -> str:
    """Return the lines of a text behind a label: a prompt, a given text or a turn."""
    return f"{label:<8}| " + f"\n{'':<8}| ".join(text.splitlines())


def transcript(prompt: Prompt, sample: Sample, tokenizer: Tokenizer) -> str:
    """Return prompt and response as a person reads them: of several turns, with given and sampled texts apart."""
    texts, end = [labelled("prompt", prompt.text)], 0
    for number, turn in enumerate(turns_of(sample.spans), 1):
        for label, places in (("given", slice(end, turn.start)), (f"turn {number}", slice(turn.start, turn.stop))):
            if ids := sample.token_ids[places]:
                texts.append(labelled(label, tokenizer.decode(ids, skip_special_tokens=True)))
        end = turn.stop
    return (
        "\n".join(texts) if prompt.env else prompt.text + tokenizer.decode(sample.token_ids, skip_special_tokens=True)
    )


def write_transcripts(path: Path, groups: Sequence[Group], tokenizer: Tokenizer, count: int = 16) -> None:
    """Write the first response to some held-out prompts, for a person to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for group in groups[:: max(len(groups) // max(count, 1), 1)][:count]:
        sample, reward = group.samples[0], group.rewards[0]
        cost = f"{len(sample.token_ids)} tokens, {sample.finish_reason}"
        head = f"--- prompt {group.prompt.index} | reward {reward.value:g} | {cost}"
        error = f"error: {reward.error}\n" if reward.error else ""
        text = transcript(group.prompt, sample, tokenizer)
        parts.append(f"{head}\n{text}\nanswer: {group.prompt.answer}\n{error}")
    path.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")


def load_groups(folder: Path, step: int, shape: ModelShape) -> list[Group]:
    """Read a step that `dump_groups` wrote. Raises ConfigError if it is missing, damaged or of another model."""
    path = folder / DUMP.format(step)
    try:
        rows = [json.loads(line) for line in regular(path).read_text(encoding="utf-8").splitlines()]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"run.replay: {path} is cut short or damaged ({error}); dump the step again") from None
    except OSError as error:
        raise ConfigError(
            f"run.replay: cannot read {path} ({error.strerror}); lower run.steps to the number of dumped steps"
        ) from None
    if not rows:
        raise ConfigError(f"run.replay: {path} is empty; dump the step again, or lower run.steps")
    try:
        groups = [_group(row, shape) for row in rows]
        if len(sizes := {len(group.samples) for group in groups}) > 1:
            raise ValueError(f"groups of {min(sizes)} and of {max(sizes)} samples")
        if (twice := Counter(sample.id for group in groups for sample in group.samples).most_common(1)[0])[1] > 1:
            raise ValueError(f"the sample {twice[0]} is there {twice[1]} times")
        return groups
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = one_line(error, 200)
        raise ConfigError(f"run.replay: {path} holds no groups of this model ({said}); dump the step again") from None


def _group(row: dict, shape: ModelShape) -> Group:
    samples = tuple(_read(Sample, s | {"spans": [_read(Span, x) for x in s["spans"]]}) for s in row["samples"])
    rewards = tuple(_read(Reward, r) for r in row["rewards"])
    prompt = _read(Prompt, row["prompt"])
    group = _read(Group, {"prompt": prompt, "epoch": row["epoch"], "samples": samples, "rewards": rewards})
    if not group.samples or len(group.samples) != len(group.rewards):
        raise ValueError(f"{len(group.samples)} samples with {len(group.rewards)} rewards")
    for ids in (prompt.token_ids, *(sample.token_ids for sample in samples)):
        if not ids or max(ids) >= shape.vocab_size:
            raise ValueError(f"token_ids = {ids!r:.60} must be tokens below {shape.vocab_size}")
    for sample in group.samples:
        if (length := len(prompt.token_ids) + len(sample.token_ids)) > shape.max_positions:
            raise ValueError(f"{length} tokens, of at most {shape.max_positions}")
        choices = (length - 1) * shape.num_layers * shape.experts_per_token
        if sample.experts and (len(sample.experts) != choices or max(sample.experts) >= shape.num_experts):
            raise ValueError(f"{len(sample.experts)} choices among experts, not {choices} below {shape.num_experts}")
        if len(sample.logprobs) != len(sample.token_ids):
            raise ValueError(f"{len(sample.logprobs)} logprobs of {len(sample.token_ids)} tokens")
        places = [*(place for span in sample.spans for place in (span.start, span.end)), len(sample.token_ids)]
        if not sample.spans or not all(map(len, sample.spans)) or places != sorted(places):
            raise ValueError(f"spans = {sample.spans!r:.60} of {len(sample.token_ids)} tokens")
        if sample.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason = {sample.finish_reason!r:.60}")
    arrays = [replace(s, token_ids=array("i", s.token_ids), logprobs=array("f", s.logprobs)) for s in samples]
    return replace(group, samples=tuple(arrays))


def _read(kind: type[T], values: dict) -> T:
    """Return a `kind` of core.py from JSON. Raises ValueError for a wrong type or a number out of range."""
    made = kind(**{name: _tuples(value) for name, value in values.items()})
    for field in fields(kind):
        if not _fits(value := getattr(made, field.name), field.type):
            raise ValueError(f"{kind.__name__}.{field.name} = {value!r:.60}")
    return made


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fits(value: object, kind: object) -> bool:
    if (outer := get_origin(kind)) in (tuple, Sequence):
        inner = get_args(kind)
        if isinstance(value, tuple) and (outer is Sequence or inner[-1] is Ellipsis):
            inner = inner[:1] * len(value)
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if outer is dict:
        return isinstance(value, dict) and all(_fits(v, get_args(kind)[1]) for v in value.values())
    if kind is float:
        return type(value) in (int, float) and reward_number(value) is not None
    return type(value) is kind and (not isinstance(value, int) or 0 <= value < 2**63)
