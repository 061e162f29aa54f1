"""What a client asks and what it is told, as JSON in OpenAI's form: requests checked, answers and errors written."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from config import ConfigError, check_options, one_line
from core import Span, Tokenizer
from data import TOKEN_CHARACTERS, checked_options, converse
from sampling import SamplingConfig
from server.fields import NEUTRAL, asks_for

Json = dict[str, object]
T = TypeVar("T")

MAX_STOPS, MAX_STOP = 16, 256  # stop texts of a request, and characters of each
COMPLETION_TOKENS = 16  # without max_tokens, as of other servers
LEAST_TOP_P = 1e-30  # less would be 0 in fp32, and leave no token to draw
SAMPLING = {"temperature": float, "top_p": float, "min_p": float, "top_k": int}
COMMON = {*SAMPLING, "model", "n", "max_tokens", "stop", "seed", "stream", "stream_options", "return_token_ids"}
COMMON |= {"user", "metadata", "store", "safety_identifier"}  # these tell nothing that a server here wants to know
FIELDS = {False: COMMON | {"prompt", "logprobs"}, True: COMMON | {"messages", "max_completion_tokens", "logprobs"}}
FIELDS[True] |= {"chat_template_kwargs"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # and what templates know


class ApiError(Exception):
    """A request that cannot be answered: the status of HTTP, and what the client is told."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str = "", param: str = ""):
        super().__init__(message)
        self.status = status
        self.body: Json = {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}


@dataclass(frozen=True)
class Chat:
    """How chats are written that do not say otherwise."""

    system: str = ""  # message before those that have none
    options: Mapping[str, object] = field(default_factory=dict)  # of the chat template


@dataclass(frozen=True)
class Ask:
    """A request for completions, checked as far as no engine is needed for it."""

    is_chat: bool
    prompts: tuple[tuple[int, ...], ...]
    num_responses: int  # to each prompt
    max_tokens: int  # 0: as many as fit, in a completion COMPLETION_TOKENS at most
    stop: tuple[str, ...]
    sampling: SamplingConfig
    seed: int | None
    stream: bool
    with_usage: bool  # at the end of a stream
    with_logprobs: bool
    with_ids: bool


@dataclass(frozen=True)
class Piece:
    """What a response has newly got: sampled tokens, and at its end the reason and the weights that sampled it."""

    choice: int  # place among all responses of the request: prompt by prompt
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str = ""
    spans: tuple[Span, ...] = ()


# ---- requests ------------------------------------------------------------------------------------------------------


def read_ask(
    body: bytes,
    is_chat: bool,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    stop: tuple[str, ...],
    longest: int,
    most: int,
    chat: Chat = Chat(),
) -> Ask:
    """Return the request of a body. Raises ApiError.

    `sampling` and `stop`: of requests that name none. `longest`: tokens of a prompt; `most`: responses of a request.
    Far longer texts, and more of them, are refused before they are tokenised.
    """
    asked = read_object(body)
    _check_fields(asked, is_chat)
    take = _Taker(asked)
    chosen = {key: take(key, kind, getattr(sampling, key)) for key, kind in SAMPLING.items()}
    if 0.0 < chosen["top_p"] < LEAST_TOP_P:
        chosen["top_p"] = LEAST_TOP_P
    sampling = replace(sampling, **chosen)
    try:
        check_options(sampling, "sampling")
    except ConfigError as error:
        message = str(error).removeprefix("sampling.")
        raise ApiError(400, message, param=message.partition(" ")[0]) from None
    top = take("logprobs", bool if is_chat else int, False if is_chat else -1, 0, 2**31)
    if not is_chat and top > 0:
        raise ApiError(
            400, f"logprobs = {top}: there are none but of sampled tokens; write logprobs = 0", param="logprobs"
        )
    if is_chat and asked.get("max_completion_tokens") is not None:
        asked = asked | {"max_tokens": asked["max_completion_tokens"]}
        take = _Taker(asked)
    options: Json = take("stream_options", dict, {})
    count = take("n", int, 1, 1, 2**16)
    given = [] if is_chat else _prompts(asked)
    if (wanted := count * (1 if is_chat else len(given))) > most:
        raise ApiError(400, f"{wanted} responses in one request are over serve.queue = {most}; ask for fewer")
    prompts = [_chat_ids(asked, tokenizer, longest, chat)] if is_chat else [_ids(p, tokenizer, longest) for p in given]
    return Ask(
        is_chat,
        tuple(prompts),
        num_responses=count,
        max_tokens=take("max_tokens", int, 0, 1, 2**22),
        stop=_stop(asked, stop),
        sampling=sampling,
        seed=take("seed", int, None, -(2**63), 2**63 - 1),
        stream=take("stream", bool, False),
        with_usage=options.get("include_usage") is True,
        with_logprobs=bool(top) if is_chat else top == 0,
        with_ids=take("return_token_ids", bool, False),
    )


def read_object(body: bytes) -> Json:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        value = json.loads(body)
    except RecursionError:
        raise ApiError(400, "the body is JSON with too many lists or objects in one another") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}, not an object")
    for key, part in value.items():
        try:
            json.dumps({key: part}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(
                400, f"{key!a:.60} has half of a surrogate pair, which is no character", param=ascii(key)
            ) from None
    return value


def _check_fields(asked: Json, is_chat: bool) -> None:
    for key, value in asked.items():
        if key in FIELDS[is_chat] or value is None:
            continue
        if key not in NEUTRAL:
            raise ApiError(
                400, f"unknown field {key!r:.60}; there are: {', '.join(sorted(FIELDS[is_chat]))}", param=key
            )
        if asks_for(value, NEUTRAL[key]):
            raise ApiError(400, f"{key} = {value!r:.60} is not among what this server can do; leave it out", param=key)


KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", dict: "an object"}


class _Taker:
    """Takes fields of a type from a request; null is as good as nothing."""

    def __init__(self, asked: Json):
        self.asked = asked

    def __call__(self, key: str, kind: type, default: T, low: float | None = None, high: float | None = None) -> T:
        value = self.asked.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        if type(value) is not kind:
            raise ApiError(400, f"{key} = {value!r:.60} must be {KINDS[kind]}", param=key)
        if low is not None and high is not None and not low <= value <= high:  # type: ignore[operator]
            raise ApiError(400, f"{key} = {value!r:.60} must be from {low} to {high}", param=key)
        return value  # type: ignore[return-value]


def _stop(asked: Json, default: tuple[str, ...]) -> tuple[str, ...]:
    value = asked.get("stop")
    if value is None:
        return default
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or len(texts) > MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP for text in texts)
    ):
        raise ApiError(
            400,
            f"stop = {value!r:.60} must be a text, or at most {MAX_STOPS} of them, of 1 to {MAX_STOP} characters each",
            param="stop",
        )
    return tuple(texts)


def _prompts(asked: Json) -> list[object]:
    """Return the prompts of a completion as they are given: one, or a list of them."""
    given = asked.get("prompt")
    return given if isinstance(given, list) and given and isinstance(given[0], list | str) else [given]


def _ids(prompt: object, tokenizer: Tokenizer, longest: int) -> tuple[int, ...]:
    """Return the tokens of a completion's prompt: a text or a list of token ids."""
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(_short(prompt, longest)))
    if isinstance(prompt, list) and prompt and all(type(id) is int for id in prompt):
        return tuple(prompt)
    raise ApiError(
        400, f"prompt = {prompt!r:.60} must be a text or a list of token ids, or a list of these", param="prompt"
    )


def _chat_ids(asked: Json, tokenizer: Tokenizer, longest: int, chat: Chat) -> tuple[int, ...]:
    """Return what the chat template writes of the messages, in tokens."""
    messages = asked.get("messages")
    if not tokenizer.chat_template:
        raise ApiError(400, "the model's tokenizer has no chat template; ask /v1/completions")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    plain = [_plain(message) for message in messages]
    if chat.system and plain[0]["role"] != "system":
        plain = [{"role": "system", "content": chat.system}, *plain]
    _short("".join(message["content"] for message in plain), longest)
    try:
        own = checked_options(_Taker(asked)("chat_template_kwargs", dict, {}), "chat_template_kwargs")
        if "chat_template" in own:
            raise ConfigError("chat_template_kwargs sets chat_template, a program; leave it out: the model has its own")
    except ConfigError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from None
    try:
        text = converse(tokenizer, plain, True, options={**chat.options, **own})
        return tuple(tokenizer.encode(_short(text, longest), add_special_tokens=False))
    except ApiError:
        raise
    except Exception as error:  # a template is a program of the model's author and may raise anything
        said = one_line(error)
        raise ApiError(400, f"the chat template refuses these messages: {said}", param="messages") from None


def _plain(message: object) -> dict[str, str]:
    """Return a message whose content is one text."""
    role, content = (message.get(key) for key in ("role", "content")) if isinstance(message, dict) else (None, None)
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = "".join(part for part in parts if isinstance(part, str)) if None not in parts else None
    if not isinstance(message, dict) or not isinstance(role, str) or not isinstance(content, str):
        raise ApiError(400, f"message {message!r:.60} must have a role and a content, both text", param="messages")
    if tools := next((key for key in ("tool_calls", "function_call", "tool_call_id") if message.get(key)), None):
        raise ApiError(400, f"message {message!r:.60}: this server has no tools; leave {tools} out", param="messages")
    if role not in ROLES:
        raise ApiError(400, f"role = {role!r:.60} is none of {', '.join(ROLES)}", param="messages")
    return {"role": ROLES[role], "content": content}


def _short(text: str, longest: int) -> str:
    if len(text) > TOKEN_CHARACTERS * longest:  # to make its tokens could take minutes
        raise ApiError(400, f"the prompt has {len(text)} characters, far too many for {longest} tokens")
    return text


# ---- answers -------------------------------------------------------------------------------------------------------


class Writer:
    """Writes the text of one response as its tokens come, up to its stop text and never half a character.

    `names_special`: special tokens have their names in it, else they have none.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], names_special: bool = False):
        self.tokenizer, self.stop, self.names_special = tokenizer, stop, names_special
        self.ids: list[int] = []
        self.start = self.known = 0  # tokens before `known` are written; those from `start` on are decoded again
        self.held, self.is_stopped = "", False

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=not self.names_special)

    def add(self, token_ids: Sequence[int], is_last: bool) -> str:
        """Return the text that these tokens add, but for what may be the beginning of a stop text."""
        self.ids += token_ids
        before, now = self._decode(self.ids[self.start : self.known]), self._decode(self.ids[self.start :])
        if self.is_stopped or (now.endswith("\ufffd") and not is_last):
            return ""
        if now != before:  # tokens without a text are no context: what follows might lose its space as a first word
            self.start = self.known
        self.known = len(self.ids)
        self.held += now[len(before) :]
        if places := [self.held.find(stop) for stop in self.stop if stop in self.held]:
            self.is_stopped = True
            return self.held[: min(places)]
        lengths = [n for stop in self.stop for n in range(1, len(stop)) if self.held.endswith(stop[:n])]
        keep = len(self.held) - (0 if is_last else max(lengths, default=0))
        text, self.held = self.held[:keep], self.held[keep:]
        return text


class Answers:
    """Writes the answers to one request: a whole one, or the chunks of a stream."""

    def __init__(self, ask: Ask, id: int, model: str, tokenizer: Tokenizer):
        self.ask, self.tokenizer = ask, tokenizer
        count = len(ask.prompts) * ask.num_responses
        self.writers = [Writer(tokenizer, ask.stop) for _ in range(count)]
        self.tokens = [Writer(tokenizer, (), names_special=True) for _ in range(count)]  # one by one, for log-probs
        self.begun: set[int] = set()
        self.num_tokens = 0
        name = "chatcmpl" if ask.is_chat else "cmpl"
        self.head: Json = {"id": f"{name}-{id}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """Return the answer of all responses, each in one piece."""
        kind = "chat.completion" if self.ask.is_chat else "text_completion"
        choices = [self._choice(piece) for piece in sorted(pieces, key=lambda piece: piece.choice)]
        return self.head | {"object": kind, "choices": choices, "usage": self.usage()} | self._prompt_ids()

    def chunk(self, piece: Piece) -> Json:
        """Return the next chunk of a stream."""
        kind = "chat.completion.chunk" if self.ask.is_chat else "text_completion"
        prompt_ids = {} if self.begun else self._prompt_ids()
        return self.head | {"object": kind, "choices": [self._choice(piece)]} | prompt_ids

    def last_chunk(self) -> Json | None:
        """Return the chunk that ends a stream, if the client has asked for it."""
        kind = "chat.completion.chunk" if self.ask.is_chat else "text_completion"
        return self.head | {"object": kind, "choices": [], "usage": self.usage()} if self.ask.with_usage else None

    def usage(self) -> Json:
        asked = sum(map(len, self.ask.prompts))
        return {
            "prompt_tokens": asked,
            "completion_tokens": self.num_tokens,
            "total_tokens": asked + self.num_tokens,
        }

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": list(self.ask.prompts[0])} if self.ask.with_ids and self.ask.is_chat else {}

    def _choice(self, piece: Piece) -> Json:
        ask, is_new = self.ask, piece.choice not in self.begun
        self.begun.add(piece.choice)
        self.num_tokens += len(piece.token_ids)
        text = self.writers[piece.choice].add(piece.token_ids, bool(piece.finish_reason))
        choice: Json = {"index": piece.choice, "finish_reason": piece.finish_reason or None, "logprobs": None}
        if not ask.is_chat:
            choice["text"] = text
        elif ask.stream:
            choice["delta"] = ({"role": "assistant"} if is_new else {}) | {"content": text}
        else:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        if ask.with_logprobs:
            choice["logprobs"] = self._logprobs(piece)
        if ask.with_ids:
            choice["token_ids"] = list(piece.token_ids)
            if piece.spans:
                choice["spans"] = [asdict(span) for span in piece.spans]
            if not ask.is_chat and is_new:
                choice["prompt_token_ids"] = list(ask.prompts[piece.choice // ask.num_responses])
        return choice

    def _logprobs(self, piece: Piece) -> Mapping[str, object]:
        """Return the log-probs beside texts of tokens that join to the whole: a character is its last token's."""
        writer, last = self.tokens[piece.choice], len(piece.token_ids) - 1 if piece.finish_reason else -1
        tokens = [writer.add([id], i == last) for i, id in enumerate(piece.token_ids)]
        if not self.ask.is_chat:
            return {"tokens": tokens, "token_logprobs": list(piece.logprobs), "top_logprobs": None, "text_offset": None}
        rows = zip(tokens, piece.logprobs, strict=True)
        return {
            "content": [{"token": t, "logprob": p, "bytes": _bytes(t), "top_logprobs": []} for t, p in rows],
            "refusal": None,
        }


def _bytes(text: str) -> list[int] | None:
    return None if "\ufffd" in text else [*text.encode()]
