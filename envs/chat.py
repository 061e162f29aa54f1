"""What the model reads of an environment's texts, in a chat with what the template writes around them."""

import math
from collections.abc import Mapping

from config import ConfigError
from core import Tokenizer
from data import converse
from environments import EpisodeError, reply_tokens

QUESTION = {"role": "user", "content": "Where?"}
TURNS = (  # (the model's text, the reply to it)
    ("Here.", "No."),
    ("1 + 1 = 2", "two\nlines"),
    ("<think>\nThere?\n</think>\n\nThere.", "No."),
)


class Reader:
    """Makes tokens of the texts that environments give."""

    def __init__(self, tokenizer: Tokenizer, max_reply_tokens: int, chat: Mapping[str, object] | None):
        """`chat`: texts are messages of the user, for a template that reads these options; None: they are not.

        Raises ConfigError as `chat_glue` does.
        """
        self.tokenizer, self.max_reply_tokens = tokenizer, max_reply_tokens
        self.before, self.after = ([], []) if chat is None else chat_glue(tokenizer, chat)

    def tokens(self, text: str, last: int | None, room: float = math.inf) -> list[int]:
        """Return the tokens that come after the token `last` of a turn; None: before the first turn.

        Raises EpisodeError if the model cannot read the text there. `room`: of the whole episode, in tokens.
        """
        reply = reply_tokens(text, self.tokenizer, self.max_reply_tokens)
        if last is not None:
            is_ended = self.before[:1] == [last]  # the model has sampled the end of its turn
            reply = [*self.before[is_ended:], *reply, *self.after]
        if last is not None and not reply:
            raise EpisodeError("gives no text after a turn, so the turn would go on")
        if last is None and len(reply) >= room:
            raise EpisodeError("begins with a text that leaves no room in rollout.max_response_tokens")
        if last is None and reply and self.before + self.after:
            raise EpisodeError("begins with a text, but the chat asks the model to write; put the text into the prompt")
        return reply


def turn_end(tokenizer: Tokenizer, options: Mapping[str, object]) -> list[int]:
    """Return the tokens that a chat template writes behind the model's turn. Raises the template's own errors."""
    text, _ = TURNS[0]
    whole = converse(tokenizer, [QUESTION, {"role": "assistant", "content": text}], False, options=options)
    return tokenizer.encode(whole.rpartition(text)[2], add_special_tokens=False)


def chat_glue(tokenizer: Tokenizer, options: Mapping[str, object]) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a reply, the reply being a message of the user. `options`: of the template.

    The first of them is the end token of the model's turn, where the template writes one. Raises ConfigError if the
    template does not just append: then ids that are built turn by turn are not those that the model knows.
    """
    found = set()
    begin = converse(tokenizer, [QUESTION], True, options=options)
    for text, reply in TURNS:
        messages = [QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        whole = converse(tokenizer, messages, True, options=options)
        rest = whole.removeprefix(begin + text)
        if rest == whole or rest.count(reply) != 1:
            raise ConfigError(
                f"the tokenizer's chat template rewrites or drops earlier messages ({whole!r:.80}), so turns cannot be "
                "appended to what was sampled; take another template, or prompts of text with data.chat = false"
            )
        found.add(tuple(rest.split(reply)))
    if len(found) > 1:
        raise ConfigError(f"the tokenizer's chat template writes turns in different ways: {sorted(found)}; correct it")
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in found.pop())
    return before, after
