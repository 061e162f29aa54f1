"""Fields of OpenAI's API that no endpoint here has: the server's, and the one of an agent that is trained."""

#: With the values that ask for nothing, beside null.
NEUTRAL: dict[str, tuple] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    **{"logit_bias": ({},), "best_of": (1,), "echo": (False,), "suffix": ("",), "tools": ([],)},
    **{"tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "parallel_tool_calls": (True, False)},
}


def asks_for(value: object, neutral: tuple) -> bool:
    """Whether a value asks for something. 0 is not false: `logprobs` = 0 asks for those of sampled tokens."""
    alike = [other for other in neutral if isinstance(other, bool) == isinstance(value, bool)]
    return value is not None and value not in alike
