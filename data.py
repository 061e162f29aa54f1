"""Prompts: JSONL files and built-in tasks, tokenised and checked before work starts; the cursor over them."""

import json
import signal
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args, get_origin

import numpy as np

from config import ConfigError, Dataclass, option, regular
from core import FINISH_REASONS, Group, Prompt, Reward, Sample, Span, Tokenizer, Visit, turns_of
from environments import check_environment
from envs.games import ENVIRONMENTS
from reward import reward_number
from rewards.graders import GRADERS, TASK_OF_JUDGE, check_grader
from tasks import TASKS, is_held_out

TEMPLATE_SECONDS = 10.0  # the most time that a chat template may take for a row,
ROW_SECONDS = 0.05  # and the most that rows may take on average: 10000 rows of 10 s would take a day
TOKEN_CHARACTERS = 512  # no tokenizer has a longer token
DUMP = "step_{:06d}.jsonl"  # a step in the folder of dumped rollouts
DEEPEST = 50  # lists and objects within each other in a row; copies and graders recurse into them

T = TypeVar("T", bound=Dataclass)


BUILT_IN = (*TASKS, *ENVIRONMENTS)


@dataclass(frozen=True)
class DataConfig:
    train: str = option("hailstone", f"training prompts: a built-in task ({', '.join(BUILT_IN)}) or a JSONL file")
    eval: str = option(
        "", "held-out prompts: a JSONL file; empty: the built-in task's own, or at most a tenth of data.train"
    )
    eval_prompts: int = option(512, "prompts of an evaluation, at most; 0: no evaluation", min=0)
    task: str = option(
        "",
        "grader of JSONL rows without a task: match, math, code, judge, module:function, file.py:function, http://...; "
        "empty: env, which takes the rewards of data.env, or math without an environment",
    )
    graders: str = option(
        "", "your own graders that rows may name in addition to data.task, such as mine.py:f, separated by commas"
    )
    env: str = option(
        "",
        f"environment of JSONL rows: {', '.join(ENVIRONMENTS)}, module:function, file.py:function or http://...; "
        "empty: rows have one turn",
    )
    chat: bool = option(True, "wrap text prompts as a user message when the tokenizer has a chat template")
    template: str = option(
        "{prompt}", "text put around a text prompt, before the chat template; {prompt} is the prompt"
    )

    @property
    def grader(self) -> str:
        """Of rows without a task."""
        return self.task or ("env" if self.env else "math")


@dataclass(frozen=True)
class _Row:
    """A problem before it has tokens."""

    fields: dict  # for its grader
    where: str  # for messages: file and line
    held_out: bool = False
    env: str = ""


def load_prompts(config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return training and held-out prompts. Raises ConfigError naming file, line, value and remedy."""
    if "{prompt}" not in config.template:
        raise ConfigError(f"data.template = {config.template!r} does not contain {{prompt}}")
    held_out: list[_Row] = []
    if config.train in BUILT_IN:
        for key in ("task", "graders", "env"):
            value = getattr(config, key)
            if value != getattr(DataConfig, key) and not config.eval:
                raise ConfigError(
                    f"data.{key} = {value!r} has no effect: the built-in task {config.train} names its grader; remove "
                    "it, or give your own rows as data.train"
                )
        rows = _task_rows(config.train) if config.train in TASKS else _game_rows(config.train)
        train, held_out = ([row for row in rows if row.held_out == flag] for flag in (False, True))
        held_out = _spread(held_out, config.eval_prompts)
    else:
        train = read_jsonl(config.train, "data.train", config)
        if not config.eval and config.eval_prompts:
            held_out = _spread(train, min(config.eval_prompts, len(train) // 10))
            # By content, for a file may repeat a prompt; in an environment problems may have the same one.
            told = (lambda row: repr(row.fields)) if config.env else (lambda row: repr(row.fields["prompt"]))
            chosen = {told(row) for row in held_out}
            train = [row for row in train if told(row) not in chosen]
    if config.eval:
        held_out = read_jsonl(config.eval, "data.eval", config)[: config.eval_prompts]
    encoder = _Encoder(config, tokenizer, max_prompt_tokens)
    return encoder.prompts(train), encoder.prompts(held_out)


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
            is_held_out(n),
        )
        for n in task.numbers()
    ]


def _game_rows(name: str) -> list[_Row]:
    game = ENVIRONMENTS[name]
    return [
        _Row({**game.row(n), "task": "env", "number": n}, f"{name} {n}", is_held_out(n), name) for n in game.numbers()
    ]


def read_jsonl(path: str, key: str, config: DataConfig) -> list[_Row]:
    graders = _graders(config)
    try:
        with open(regular(path), encoding="utf-8-sig") as file:  # skips a byte order mark
            lines = ((f"{path}:{number}", line) for number, line in enumerate(file, 1) if line.strip())
            rows = [_row(line, where, config, graders) for where, line in lines]
    except OSError as error:
        built_in = f", and no built-in task has that name ({', '.join(BUILT_IN)})" if key == "data.train" else ""
        raise ConfigError(f"{key} = {path!r}: cannot read this file ({error.strerror}){built_in}") from None
    except UnicodeDecodeError as error:
        said = f"{error.reason} at byte {error.start}"
        raise ConfigError(f"{key} = {path!r}: not UTF-8 text ({said}); convert the file") from None
    if not rows:
        raise ConfigError(f"{key} = {path!r}: no rows; write one JSON object with prompt and answer on each line")
    return rows


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


def _row(line: str, where: str, config: DataConfig, graders: list[str]) -> _Row:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        said = f"{error.msg} at column {error.colno}"
        raise ConfigError(f"{where}: not JSON ({said}); write one JSON object on each line") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: holds half a character (a lone surrogate, such as \\ud800); remove it") from None
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise ConfigError(f"{where}: not JSON that Python can read ({error}); shorten it") from None
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: a {type(row).__name__}, not an object; write {{"prompt": ..., "answer": ...}}')
    if _is_deep(row, DEEPEST):
        raise ConfigError(f"{where}: lists and objects nest over {DEEPEST} deep; flatten the row")
    for field in ("prompt", "answer"):
        if field not in row:
            raise ConfigError(f"{where}: no field {field!r} (it has: {', '.join(row) or 'nothing'})")
    prompt = row["prompt"]
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in prompt
    )
    if not prompt or not (is_chat or isinstance(prompt, str)):
        raise ConfigError(f'{where}: prompt = {prompt!r:.60} must be text or a list of {{"role", "content"}} messages')
    for field in ("answer", "task"):
        if not isinstance(row.get(field, ""), str):
            raise ConfigError(f"{where}: {field} = {row[field]!r:.60} must be text; write it in quotes")
    if "task" in row and row["task"] not in graders:
        raise ConfigError(
            f"{where}: task = {row['task']!r:.60} is not a grader that a row may name ({', '.join(graders)}); "
            "correct it, or list your own grader in data.graders"
        )
    return _Row({"task": config.grader, **row}, where, env=config.env)


def _is_deep(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (not levels or any(_is_deep(item, levels - 1) for item in inner))


class _Encoder:
    """Turns rows into prompts. Limits the time that a chat template takes for them."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, max_tokens: int):
        self.config, self.tokenizer, self.max_tokens = config, tokenizer, max_tokens
        self.seconds_left = TEMPLATE_SECONDS  # for the next row: each row adds some, and unused seconds are kept

    def prompts(self, rows: Sequence[_Row]) -> list[Prompt]:
        prompts, most = [self._prompt(i, row) for i, row in enumerate(rows)], self.max_tokens
        if empty := next((p for p in prompts if not p.token_ids), None):
            raise ConfigError(f"{empty.where}: the prompt has no tokens")
        if long := [p for p in prompts if len(p.token_ids) > most]:
            longest = max(len(p.token_ids) for p in long)
            raise ConfigError(
                f"{long[0].where}: the prompt has {len(long[0].token_ids)} tokens, over rollout.max_prompt_tokens = "
                f"{most}; raise it, or remove the row ({len(long)} are too long, the longest has {longest})"
            )
        return prompts

    def _prompt(self, index: int, row: _Row) -> Prompt:
        where, tokenizer = row.where, self.tokenizer
        prompt, answer, task = (row.fields[name] for name in ("prompt", "answer", "task"))
        try:
            is_chat = not isinstance(prompt, str) or (self.config.chat and bool(tokenizer.chat_template))
            text = self._written(prompt, where) if is_chat else self.config.template.replace("{prompt}", prompt)
            if len(text) > TOKEN_CHARACTERS * self.max_tokens:  # to make its tokens could take minutes
                raise ConfigError(
                    f"{where}: the prompt has {len(text)} characters, far too many for rollout.max_prompt_tokens = "
                    f"{self.max_tokens}; raise it, or remove the row"
                )
            text.encode()  # the tokenizer's message about half a character would not name the cause
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=not is_chat))  # a chat template writes them
            text = tokenizer.decode(token_ids) if is_chat else text
        except ConfigError:
            raise
        except Exception as error:  # a template is a program of the model's author and may raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{where}: the tokenizer or its chat template refuses this prompt: {said}") from None
        return Prompt(index, token_ids, text, answer, task, row.fields, where, row.env)

    def _written(self, prompt: str | list[dict], where: str) -> str:
        """Return the prompt as the chat template writes it."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": self.config.template.replace("{prompt}", prompt)}]
        elif not self.tokenizer.chat_template:
            raise ConfigError(
                f"{where}: prompt is a list of messages, but the tokenizer has no chat template; write it as text"
            )
        start = time.monotonic()
        try:
            text = converse(self.tokenizer, prompt, True, self.seconds_left)
        except TimeoutError:
            raise ConfigError(
                f"{where}: the tokenizer's chat template takes too long: it may take {TEMPLATE_SECONDS:g} s for a row, "
                f"and {ROW_SECONDS:g} s on average; correct it"
            ) from None
        left = max(self.seconds_left - (time.monotonic() - start), 0.0)
        self.seconds_left = min(left + ROW_SECONDS, TEMPLATE_SECONDS)
        return text


def converse(
    tokenizer: Tokenizer, messages: list[dict], add_generation_prompt: bool, seconds: float = TEMPLATE_SECONDS
) -> str:
    """Return the messages as the chat template writes them. Raises the template's own errors, and TimeoutError."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"it does not end within {seconds:g} s")

    kind = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
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


class PromptCursor:
    """The cursor over the training prompts: each epoch is a seeded permutation, every prompt once."""

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        self.prompts, self.seed = prompts, seed
        self._move(0, 0)

    def _move(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))

    def take(self, count: int) -> list[Visit]:
        """Return the next `count` visits; an epoch that ends is followed by the next."""
        taken = []
        for _ in range(count):
            if self.position == len(self.prompts):
                self._move(self.epoch + 1, 0)
            taken.append(Visit(self.epoch, self.prompts[self._order[self.position]]))
            self.position += 1
        return taken

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "num_prompts": len(self.prompts)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["num_prompts"] != len(self.prompts):
            raise ConfigError(
                f"the checkpoint was written with {state['num_prompts']} training prompts, data.train now has "
                f"{len(self.prompts)}; resume with the same data"
            )
        self._move(state["epoch"], state["position"])


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
    for group in groups[:: max(len(groups) // count, 1)][:count]:
        sample, reward = group.samples[0], group.rewards[0]
        cost = f"{len(sample.token_ids)} tokens, {sample.finish_reason}"
        head = f"--- prompt {group.prompt.index} | reward {reward.value:g} | {cost}"
        error = f"error: {reward.error}\n" if reward.error else ""
        text = transcript(group.prompt, sample, tokenizer)
        parts.append(f"{head}\n{text}\nanswer: {group.prompt.answer}\n{error}")
    path.write_text("\n".join(parts), encoding="utf-8")


def load_groups(folder: Path, step: int, vocabulary: int) -> list[Group]:
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
        groups = [_group(row, vocabulary) for row in rows]
        if len(sizes := {len(group.samples) for group in groups}) > 1:
            raise ValueError(f"groups of {min(sizes)} and of {max(sizes)} samples")
        if (twice := Counter(sample.id for group in groups for sample in group.samples).most_common(1)[0])[1] > 1:
            raise ValueError(f"the sample {twice[0]} is there {twice[1]} times")
        return groups
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(f"run.replay: {path} holds no groups of this model ({said}); dump the step again") from None


def _group(row: dict, vocabulary: int) -> Group:
    samples = tuple(_read(Sample, s | {"spans": [_read(Span, x) for x in s["spans"]]}) for s in row["samples"])
    rewards = tuple(_read(Reward, r) for r in row["rewards"])
    prompt = _read(Prompt, row["prompt"])
    group = _read(Group, {"prompt": prompt, "epoch": row["epoch"], "samples": samples, "rewards": rewards})
    if not group.samples or len(group.samples) != len(group.rewards):
        raise ValueError(f"{len(group.samples)} samples with {len(group.rewards)} rewards")
    for ids in (prompt.token_ids, *(sample.token_ids for sample in samples)):
        if not ids or max(ids) >= vocabulary:
            raise ValueError(f"token_ids = {ids!r:.60} must be tokens below {vocabulary}")
    for sample in group.samples:
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
