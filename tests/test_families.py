"""Families that do more than the plain decoder: what the engine decodes equals one full forward, whatever it does."""

from dataclasses import replace

import pytest
import torch
from test_drafts import Foresight, assert_same
from test_rollout import full_logits, generate, kinds, make_engine, make_sequences

from model import Model, parse_shape
from rollout import Engine
from sampling import SamplingConfig, score

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral, window of one": {"model_type": "mistral", "sliding_window": 1},
    "some layers have windows": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "rope_parameters": YARN,
    },
}


def random_model(name: str) -> Model:
    model = Model(parse_shape(SMALL | FAMILIES[name], name))
    generator = torch.Generator().manual_seed(3)
    for key, tensor, _ in model.hf_tensors():
        if not key.endswith("norm.weight"):
            tensor.normal_(0.0, 0.3, generator=generator)
    return model


@kinds
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_pages", [2000, 22])
def test_decoding_reads_what_a_full_forward_reads(name: str, num_pages: int, kind: type[Engine]) -> None:
    """In chunks of prefill, with preemption, and with drafts."""
    model, count = random_model(name), 8
    settings = {"kind": kind, "num_pages": num_pages, "step_tokens": 16}
    engine = make_engine(model, **settings)
    samples = generate(engine, make_sequences(count, seed=3))
    assert (engine.stats.preemptions > 0) == (num_pages == 22)
    for s in make_sequences(count, seed=3):
        done = samples[s.id]
        logits = full_logits(model, [*s.prompt_ids, *done.token_ids])[len(s.prompt_ids) - 1 : -1]
        expected, _ = score(logits, torch.tensor(done.token_ids), SamplingConfig())
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=0, atol=2e-5)
        assert expected.std() > 0.1
    engine = make_engine(model, **settings)
    engine.drafter = Foresight(samples, right=0.8)
    assert_same(generate(engine, make_sequences(count, seed=3)), samples, 2e-5)
    assert engine.drafter.accepted > 0
    plain = Model(replace(model.shape, windows=()))
    plain.load_state_dict(model.state_dict())
    ids = list(range(40))
    assert (full_logits(plain, ids) - full_logits(model, ids)).abs().max() > 0.1, "the window shows"
