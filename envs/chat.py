"""What a chat template writes between a model's turn and its next: found once, by rendering short conversations."""

from config import ConfigError
from core import Tokenizer
from data import converse

QUESTION = {"role": "user", "content": "Where?"}
TURNS = (("Here.", "No."), ("1 + 1 = 2", "two\nlines"))  # (the model's text, the reply to it)


def chat_glue(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a reply, the reply being a message of the user.

    The first of them is the end token of the model's turn, where the template writes one. Raises ConfigError if the
    template does not just append: then ids that are built turn by turn are not those that the model knows.
    """
    found = set()
    begin = converse(tokenizer, [QUESTION], True)
    for text, reply in TURNS:
        messages = [QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": reply}]
        whole = converse(tokenizer, messages, True)
        rest = whole.removeprefix(begin + text)
        if rest == whole or rest.count(reply) != 1:
            raise ConfigError(
                f"the tokenizer's chat template rewrites or drops earlier messages ({whole!r:.80}), so turns cannot be "
                "appended to what was sampled; take another template, or data.chat = false"
            )
        found.add(tuple(rest.split(reply)))
    if len(found) > 1:
        raise ConfigError(f"the tokenizer's chat template writes turns in different ways: {sorted(found)}; correct it")
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in found.pop())
    return before, after
