"""A judge on the ranks that decode: one packed forward grades many responses, between and beside decode windows.

The judge is a local Hugging Face folder, of two kinds: a causal model that gives its verdict in one token, or a reward
model (...ForSequenceClassification), whose head reads the last token. Layers that do not fit on the device stay in host
memory and stream through two buffers while other layers compute. (RollPacker, section 4.3)
"""

import itertools
import math
import re
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import checkpoint
from config import ConfigError, option
from core import Reward, Tokenizer
from data import converse
from engine.host import upload
from reward import Graded, RewardConfig, add_up, by_grader
from rewards.graders import TASK_OF_JUDGE
from rewards.gradings import PoolStats
from rewards.offload import OffloadedModel, check_room
from rewards.pool import RewardPool

TEMPLATE = """Question:
{question}

Reference answer:
{answer}

Response to be graded:
{response}

Does the response reach the reference answer? Answer yes or no.
Answer:"""


@dataclass(frozen=True)
class JudgeConfig:
    path: str = option("", "local Hugging Face folder: a causal model or a ...ForSequenceClassification reward model")
    template: str = option(
        "", "text for the judge, with {question}, {answer} and {response}; empty: TEMPLATE of rewards/judge.py"
    )
    chat: bool = option(
        True,
        "use the judge's chat template, if any: the text is the user's message; a reward model reads the conversation",
    )
    accept: str = option(
        "",
        "verdict on a correct response, one token; empty: yes, with a space before it where no chat template is used",
    )
    reject: str = option("", "verdict on a wrong response, one token; empty: no, as for accept")
    label: int = option(1, "label that means correct, of a reward model with several labels", min=0)
    reward: str = option(
        "probability",
        "probability (of accept against reject), hard (0 or 1) or score (log-odds, or a reward model's own number)",
        choices=("probability", "hard", "score"),
    )
    batch_tokens: int = option(8192, "tokens of one forward, and of the longest text", min=16, max=2**22)
    max_wait_seconds: float = option(
        0.5, "longest time that a response waits for others to fill a forward", min=0.0, max=1e7
    )
    memory_gib: float = option(
        0.0,
        "device memory of the judge in GiB; layers beyond it stream from the host; 0: all free memory (on CPU: all)",
        min=0.0,
        max=1e5,
    )
    sm_share: float = option(
        0.25,
        "share of a GPU's multiprocessors (green context, torch >= 2.12); 0: a CUDA stream without a share of its own",
        min=0.0,
        max=1.0,
    )


# ---- the judge's text --------------------------------------------------------------------------------------------


class Reader:
    """Turns a response and its data row into the token ids that the judge reads."""

    def __init__(self, config: JudgeConfig, tokenizer: Tokenizer, is_reward_model: bool, pad_id: int | None):
        self.template, self.tokenizer, self.is_reward_model = config.template or TEMPLATE, tokenizer, is_reward_model
        self.pad_id = pad_id
        self.chat = config.chat and bool(tokenizer.chat_template)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def __call__(self, response: str, answer: str, row: dict) -> list[int]:
        # A response that spells the judge's own control tokens could end its turn and write the verdict.
        response = self.special.sub(" ", response)
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.chat and self.is_reward_model:
            return self._last_read(self._converse([*messages, {"role": "assistant", "content": response}], False))
        question = messages[0]["content"]
        if len(messages) > 1:
            question = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        fields = {"question": question, "answer": answer, "response": response}
        text = re.sub(r"\{(question|answer|response)\}", lambda match: fields[match[1]], self.template)
        if self.chat:
            return self._converse([{"role": "user", "content": text}], True)
        ids = self.tokenizer.encode(text)
        return self._last_read(ids) if self.is_reward_model else ids

    def _converse(self, messages: list[dict], generation: bool) -> list[int]:
        # Templates without thoughts ignore this; with others the judge would begin with one, and not with a verdict.
        options = {"enable_thinking": False} if generation else {}
        text = converse(self.tokenizer, messages, generation, options=options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _last_read(self, ids: list[int]) -> list[int]:
        """Remove padding at the end, as the reward models of transformers do, even where padding is the end token."""
        while len(ids) > 1 and ids[-1] == self.pad_id:
            ids = ids[:-1]
        return ids


def verdict_ids(config: JudgeConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of `accept` and `reject`. Raises ConfigError unless each is one token."""
    ids: list[int] = []
    space = "" if config.chat and tokenizer.chat_template else " "
    for key, usual in (("accept", "yes"), ("reject", "no")):
        word = getattr(config, key) or space + usual
        tokens = tokenizer.encode(word, add_special_tokens=False)
        if len(tokens) != 1:
            raise ConfigError(
                f"judge.{key} = {word!r} is {len(tokens)} tokens for the judge; a verdict is one token: choose another "
                "word, or add or remove the space before it"
            )
        ids += tokens
    if ids[0] == ids[1]:
        raise ConfigError(f"judge.accept and judge.reject are the same token: {config.accept!r} and {config.reject!r}")
    return ids


def check_judge(config: JudgeConfig, dtype: torch.dtype) -> None:
    """Raise ConfigError on every mistake that shows without loading the weights."""
    if not config.path:
        raise ConfigError(
            f"data rows have the task {TASK_OF_JUDGE}, but judge.path is empty; give a local Hugging Face folder"
        )
    if "{response}" not in (config.template or TEMPLATE):
        raise ConfigError(f"judge.template = {config.template!r} does not contain {{response}}")
    shape, _ = checkpoint.check_model(config.path, "judge.path", rewards=True)
    settings, tokenizer = checkpoint.read_config(config.path), checkpoint.load_tokenizer(config.path)
    labels = checkpoint.num_labels(settings)
    if not labels:
        verdict_ids(config, tokenizer)
    elif labels > 1 and config.label >= labels:
        raise ConfigError(f"judge.label = {config.label}: {config.path} has the labels 0 to {labels - 1}")
    check_room("judge.memory_gib", config.memory_gib, shape, dtype, config.batch_tokens, "judge.batch_tokens")


# ---- the forward -------------------------------------------------------------------------------------------------


class JudgeModel(OffloadedModel):
    """The weights of a judge and its one forward over packed texts."""

    LOGIT_ROWS = 64  # texts read out together: [64, vocabulary] and not [texts, vocabulary]

    def __init__(self, config: JudgeConfig, device: torch.device, dtype: torch.dtype):
        """Raises ConfigError as `check_judge` does."""
        check_judge(config, dtype)
        model, score = checkpoint.load_judge(config.path, torch.device("cpu"), dtype)
        super().__init__(model, device, config.memory_gib)
        self.config, self.is_reward_model = config, score is not None
        tokenizer = checkpoint.load_tokenizer(config.path)
        pad_id = checkpoint.read_config(config.path).get("pad_token_id")
        self.reader = Reader(config, tokenizer, self.is_reward_model, pad_id)
        if score is not None:
            self.head = score.to(device)
        else:
            self.head, self.verdicts = self.model.head_weight, upload(verdict_ids(config, tokenizer), device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what follows runs in other streams

    @property
    def max_tokens(self) -> int:
        return min(self.shape.max_positions, self.config.batch_tokens)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return log-probs of accept and reject [n, 2], or a reward model's numbers [n, labels]; float32."""
        last = [end - 1 for end in itertools.accumulate(len(text) for text in texts)]
        return torch.cat([self._read_out(rows) for rows in self.hidden(texts, last).split(self.LOGIT_ROWS)])

    def _read_out(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.head).float()
        return logits if self.is_reward_model else logits.log_softmax(-1)[:, self.verdicts]

    def score(self, output: Sequence[float]) -> float:
        """Return one text's log-odds of being right, or the number of a reward model that has only one."""
        if len(output) == 1:
            return output[0]
        right = 0 if not self.is_reward_model else self.config.label
        others = torch.tensor([value for i, value in enumerate(output) if i != right], dtype=torch.float64)
        return output[right] - others.logsumexp(0).item()


def background_stream(device: torch.device, sm_share: float) -> tuple[torch.cuda.Stream, object, str]:
    """Return a stream for work beside the decoding, an object that must live as long, and a description.

    The stream has a partition of the multiprocessors if torch can make it; decoding may still use all of them.
    """
    if sm_share:
        from torch.cuda import green_contexts  # torch >= 2.10; its contexts give streams from 2.12 on

        if green_contexts.SUPPORTED and hasattr(green_contexts.GreenContext, "Stream"):
            count = torch.cuda.get_device_properties(device).multi_processor_count
            wanted = max(int(sm_share * count), 8)
            try:
                context: Any = green_contexts.GreenContext.create(num_sms=wanted, device_id=device.index)
                return context.Stream(), context, f"on {wanted} of {count} multiprocessors"
            except RuntimeError:  # a driver or a GPU without partitions
                pass
    return torch.cuda.Stream(device, priority=0), None, "in a stream of the lowest priority"


# ---- grading -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class JudgeStats:
    """Counters since they were last taken."""

    texts: int = 0
    tokens: int = 0
    batches: int = 0
    seconds: float = 0.0  # of forwards, from launch to result
    wait_seconds: float = 0.0  # of all texts together, from `submit` to launch
    peak_queue: int = 0
    streamed_bytes: int = 0
    resident_layers: int = 0  # summed over forwards
    verdict_mass: float = 0.0  # summed probability of accept or reject: near 0, the judge did not understand its task


@dataclass(slots=True)
class _Text:
    key: Hashable
    ids: list[int]
    since: float
    wanted: bool = True


class _Flight:
    """One forward whose result is being copied to the host."""

    def __init__(self, texts: list[_Text], output: Tensor, start: float):
        self.texts, self.start = texts, start
        self.event = torch.cuda.Event() if output.is_cuda else None
        self.host = torch.empty(output.shape, pin_memory=output.is_cuda)
        self.host.copy_(output, non_blocking=True)
        if self.event:
            self.event.record()

    @property
    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def land(self) -> list[list[float]]:
        """Wait for the result and return it."""
        if self.event:
            self.event.synchronize()
        return self.host.tolist()


class Judge:
    """Has the interface of a `RewardPool`: `submit` never waits, `poll` and `drain` return rewards.

    `poll` starts at most one forward: on a GPU it runs in the background, on a CPU before `poll` returns. A text that
    cannot be judged gets a Reward of 0 with the cause in `error`. Raises ConfigError as `check_judge` does.
    """

    def __init__(self, config: JudgeConfig, device: torch.device, dtype: torch.dtype):
        self.config, self.device = config, device
        self.model = JudgeModel(config, device, dtype)
        self.stream: torch.cuda.Stream | None = None
        self._context: object = None  # lives as long as the stream
        how = "between decode steps"
        if device.type == "cuda":
            self.stream, self._context, how = background_stream(device, config.sm_share)
        kind = "reward model" if self.model.is_reward_model else "judge"
        size = len(self.model.layers) * self.model.layers.layer_bytes / 2**30
        self.about = f"{kind} {config.path}: {len(self.model.layers)} layers of {size:.3g} GiB in all, run {how}"
        self.stats = JudgeStats()
        self._queue: deque[_Text] = deque()
        self._queued_tokens = 0
        self._flight: _Flight | None = None
        self._results: list[Graded] = []

    @property
    def num_pending(self) -> int:
        """Number of responses that were submitted and not yet returned."""
        in_flight = sum(text.wanted for text in self._flight.texts) if self._flight else 0
        return len(self._queue) + in_flight + len(self._results)

    def submit(self, key: Hashable, task: str, response: str, answer: str, row: dict) -> None:
        """Have a response judged. `row` is its data row: its `prompt` is the question."""
        try:
            ids = self.model.reader(response, answer, row)
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            return self._fail(key, f"the judge cannot read this text: {type(error).__name__}: {error}")
        if len(ids) > self.model.max_tokens:
            return self._fail(
                key,
                f"{len(ids)} tokens for the judge, over {self.model.max_tokens}, the smaller of judge.batch_tokens = "
                f"{self.config.batch_tokens} and its context of {self.model.shape.max_positions}",
            )
        self._queue.append(_Text(key, ids, time.perf_counter()))
        self._queued_tokens += len(ids)
        self.stats.peak_queue = max(self.stats.peak_queue, len(self._queue))

    def poll(self) -> list[Graded]:
        """Return the rewards since the last call. Never waits for a GPU."""
        self._land(wait=False)
        if not self._flight and self._is_due():
            self._launch()
            self._land(wait=False)
        return self._take_results()

    def drain(self) -> list[Graded]:
        """Judge all pending responses and return their rewards; give the GPU's free memory back to the trainer."""
        while self._queue or self._flight:
            self._advance()
        self.give_back()
        return self._take_results()

    def give_back(self) -> None:
        """Give the GPU's free memory back to the trainer, after the forward under way; other responses still wait."""
        self._land(wait=True)
        self.model.give_back()

    def wait(self, keys: Iterable[Hashable]) -> list[Graded]:
        """Wait for the pending responses of `keys`; return their rewards and all others that are there by then."""
        keys = set(keys)
        while any(text.key in keys for text in (*self._queue, *(self._flight.texts if self._flight else ()))):
            self._advance()
        return self._take_results()

    def forget(self, keep: Iterable[Hashable]) -> None:
        """Forget all pending responses but those of `keep`: if they wait they are never judged."""
        keep = set(keep)
        self._queue = deque(text for text in self._queue if text.key in keep)
        self._queued_tokens = sum(len(text.ids) for text in self._queue)
        self._results = [(key, reward) for key, reward in self._results if key in keep]
        for text in self._flight.texts if self._flight else ():
            text.wanted = text.wanted and text.key in keep

    def close(self) -> None:
        """Drop all pending responses."""
        self.forget(())
        self._land(wait=True)
        self.model.layers.close()

    def take_stats(self) -> JudgeStats:
        """Return the statistics since the last call."""
        taken, self.stats = self.stats, JudgeStats()
        taken.streamed_bytes, self.model.layers.streamed_bytes = self.model.layers.streamed_bytes, 0
        return taken

    # ---- inside ----------------------------------------------------------------------------------------------

    def _fail(self, key: Hashable, error: str) -> None:
        self._results.append((key, Reward(0.0, error=f"{error} (task {TASK_OF_JUDGE}, sample {key})"[:500])))

    def _take_results(self) -> list[Graded]:
        taken, self._results = self._results, []
        return taken

    def _is_due(self) -> bool:
        """Whether a forward is full, or its first text has waited long enough."""
        if self._queued_tokens >= self.config.batch_tokens:
            return True
        return bool(self._queue) and time.perf_counter() - self._queue[0].since >= self.config.max_wait_seconds

    def _advance(self) -> None:
        if not self._flight:
            self._launch()
        self._land(wait=True)

    def _launch(self) -> None:
        """Start a forward of the first texts that fit."""
        texts, num_tokens, start = [], 0, time.perf_counter()
        while self._queue and num_tokens + len(self._queue[0].ids) <= self.config.batch_tokens:
            texts.append(self._queue.popleft())
            num_tokens += len(texts[-1].ids)
        self._queued_tokens -= num_tokens
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.model.place(num_tokens)
            self._flight = _Flight(texts, self.model([text.ids for text in texts]), start)
        stats = self.stats
        stats.texts += len(texts)
        stats.tokens += num_tokens
        stats.batches += 1
        stats.wait_seconds += sum(start - text.since for text in texts)
        stats.resident_layers += len(self.model.layers.resident)

    def _land(self, wait: bool) -> None:
        """Turn the outputs of a forward into rewards once it is done."""
        if not self._flight or not (wait or self._flight.is_done):
            return
        flight, self._flight = self._flight, None
        outputs = flight.land()
        seconds = time.perf_counter() - flight.start
        self.stats.seconds += seconds
        for text, output in zip(flight.texts, outputs, strict=True):
            if not self.model.is_reward_model:
                self.stats.verdict_mass += sum(map(math.exp, output))
            if text.wanted:
                self._grade(text, self.model.score(output), seconds / len(outputs))

    def _grade(self, text: _Text, score: float, seconds: float) -> None:
        if math.isfinite(score):
            self._results.append((text.key, Reward(reward_of(score, self.config.reward), seconds)))
        else:
            self._fail(text.key, f"the judge computed {score}")


def reward_of(score: float, kind: str) -> float:
    """Turn log-odds into a reward: their probability, 1 if it is over one half else 0, or the log-odds themselves."""
    if kind == "score":
        return score
    if kind == "hard":
        return float(score > 0)
    odds = math.exp(-abs(score))  # never overflows
    return (1.0 if score > 0 else odds) / (1 + odds)


class _Also(NamedTuple):
    """Key of a sample's grading by an additional grader."""

    key: Hashable
    grader: str

    def __str__(self) -> str:
        return str(self.key)  # in messages, which name the grader


class AllGraders:
    """Pool and judge behind the interface of one `RewardPool`: each response goes to the grader of its task.

    `also`: weights of graders that grade every sample in addition; its reward is the weighted sum (reward.add_up).
    """

    def __init__(self, pool: RewardPool, judge: Judge | None, also: Mapping[str, float] | None = None):
        self.pool, self.judge, self.also, self.timeouts = pool, judge, dict(also or {}), pool.timeouts
        # The judge comes first: the pool's processes go on while it computes.
        self.parts: list[Judge | RewardPool] = [judge, pool] if judge else [pool]
        self._graded: dict[Hashable, dict[str, Reward | None]] = {}  # by grader; None: not yet

    def __enter__(self) -> "AllGraders":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        return sum(part.num_pending for part in self.parts)

    def submit(self, key: Hashable, task: str, response: str, answer: str, row: dict) -> None:
        self._graded[key] = dict.fromkeys([task, *self.also])  # the row's own first
        for i, name in enumerate(self._graded[key]):
            part = self.judge if name == TASK_OF_JUDGE else self.pool
            assert part, "open_graders loads the judge if a task needs it"
            part.submit(_Also(key, name) if i else key, name, response, answer, row)

    def poll(self) -> list[Graded]:
        return self._whole(graded for part in self.parts for graded in part.poll())

    def drain(self) -> list[Graded]:
        return self._whole(graded for part in self.parts for graded in part.drain())

    def wait(self, keys: Iterable[Hashable]) -> list[Graded]:
        keys = self._with_also(keys)
        return self._whole(graded for part in self.parts for graded in part.wait(keys))

    def forget(self, keep: Iterable[Hashable]) -> None:
        keep = self._with_also(keep)
        self._graded = {key: graded for key, graded in self._graded.items() if key in keep}
        for part in self.parts:
            part.forget(keep)

    def _with_also(self, keys: Iterable[Hashable]) -> set[Hashable]:
        keys = set(keys)
        return keys | {_Also(key, name) for key in keys for name in self.also}

    def _whole(self, graded: Iterable[Graded]) -> list[Graded]:
        """Return the rewards of the samples that all of their graders have graded by now."""
        whole = []
        for place, reward in graded:
            key, grader = place if isinstance(place, _Also) else (place, next(iter(self._graded[place])))
            rewards = self._graded[key]
            rewards[grader] = reward
            done = {name: reward for name, reward in rewards.items() if reward is not None}
            if len(done) == len(rewards):
                del self._graded[key]
                own = dict.fromkeys(done, 1.0)
                whole.append((key, add_up(done, own | self.also) if self.also else reward))
        return whole

    def take_stats(self) -> tuple[PoolStats, JudgeStats]:
        """Return the statistics since the last call."""
        return self.pool.take_stats(), self.judge.take_stats() if self.judge else JudgeStats()

    def close(self) -> None:
        for part in self.parts:
            part.close()


def open_graders(
    reward: RewardConfig, judge: JudgeConfig, tasks: Iterable[str], device: torch.device, dtype: torch.dtype
) -> AllGraders:
    """Start the graders of `tasks`. Raises ConfigError as `RewardPool` and `Judge` do."""
    tasks, also = set(tasks), by_grader("reward.also", reward.also)
    tasks |= also.keys() if tasks else set()
    model = Judge(judge, device, dtype) if TASK_OF_JUDGE in tasks else None
    return AllGraders(RewardPool(reward, tasks - {TASK_OF_JUDGE}), model, also)
