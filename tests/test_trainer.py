"""The trainer's gradient is that of the plain batch, however it is packed, streamed, sharded or resumed."""

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import ALONE, thorough
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from attention import PackedAttention
from buffer import SampleBuffer
from checkpoint import Checkpoints, check_model, fill, list_checkpoints, load_model, load_state, load_tensors
from core import Example, Prompt, Sample, SampleId, Span, VisitId
from engine import kernels
from learning import examples_of
from loss import LOSSES, PROXIMAL, LossConfig, Tokens, kl_to_reference, weighted_sum
from model import Model, empty_model
from parallel import World
from sampling import SamplingConfig, score
from trainer import SUMS, NonFiniteError, Trainer, TrainerConfig, multiplications, pack, work_of
from weights import sharding

CPU = torch.device("cpu")
NORMALISATIONS = ("token", "sequence", "constant")
MAX_RESPONSE = 30


@pytest.fixture(scope="module")
def examples(tiny_folder: Path) -> list[Example]:
    """Uneven samples whose recorded log-probs are the model's, give or take 0.3."""
    rng = Random(0)

    def ids(longest: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, 258) for _ in range(rng.randint(1, longest)))

    plain = [sampled(ids(12), ids(MAX_RESPONSE), rng.uniform(-1, 1)) for _ in range(11)]
    exact = on_policy(load_model(tiny_folder, CPU, torch.float32), plain)
    return [replace(e, logprobs=tuple(x + rng.gauss(0, 0.3) for x in e.logprobs)) for e in exact]


def sampled(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], advantage: float = 0.0) -> Example:
    """A response that was sampled as a whole, without recorded log-probs."""
    return Example(SampleId(0, 0, 0), prompt_ids, token_ids, (Span(0, len(token_ids), 0),), (), advantage)


def on_policy(model: Model, examples: Sequence[Example]) -> list[Example]:
    """Return the examples with the model's own log-probs as the recorded ones."""
    scored = make_trainer(model).with_old_logprobs(examples)
    by_tokens = {(e.prompt_ids, e.token_ids): e.old_logprobs for e in scored}
    return [replace(e, logprobs=by_tokens[e.prompt_ids, e.token_ids]) for e in examples]


def make_trainer(
    model: Model,
    loss: LossConfig = LossConfig(),  # noqa: B008
    world: World = ALONE,
    reference: Model | None = None,
    **settings,
) -> Trainer:
    """Return a trainer of a copy of `model`: two trainers of one model would share its gradients."""
    settings = {"lr": 1e-3, "lr_warmup_updates": 0, "grad_clip": 0.0, **settings}
    others = loss, SamplingConfig(), world, MAX_RESPONSE, 10, reference, settings.pop("keeps_model", True)
    return Trainer(copy.deepcopy(model), TrainerConfig(**settings), *others)


def gradient(trainer: Trainer) -> Tensor:
    return torch.cat([sharding.whole(master.grad).flatten() for master in trainer.masters])


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([sharding.whole(param.detach()).flatten() for param in trainer.params]).clone()


def assert_same_gradient(ours: Tensor, theirs: Tensor, limit: float = 1e-5) -> None:
    assert theirs.norm() > 1e-3 and (ours - theirs).norm() / theirs.norm() < limit


# ---- gradient sums -----------------------------------------------------------------------------------------------

# A loss and a normalisation meet in a weighted sum only; tests/test_loss.py has them all.
ALL = [
    (name, way) if way == "token" or name in ("ppo", "gspo") else thorough(name, way)
    for name in LOSSES
    for way in NORMALISATIONS
]


@pytest.mark.slow
@pytest.mark.parametrize("name, normalisation", ALL)
def test_packing_order_and_number_of_calls_change_nothing(tiny_model, examples, name: str, normalisation: str) -> None:
    loss = LossConfig(name=name, normalisation=normalisation)
    whole = make_trainer(tiny_model, loss)
    whole.accumulate(examples)
    expected, sums = gradient(whole).clone(), whole.sums.clone()
    shuffled = Random(1).sample(examples, len(examples))
    ways = {
        "many calls in another order": (64, [shuffled[:2], shuffled[2:3], [], shuffled[3:]]),
        "one sample at a time": (1, [shuffled]),
        "one call each": (8192, [[e] for e in examples]),
    }
    for budget, calls in ways.values():
        trainer = make_trainer(tiny_model, loss, tokens_per_microbatch=budget)
        for call in calls:
            trainer.accumulate(call)
        assert_same_gradient(gradient(trainer), expected)
        torch.testing.assert_close(trainer.sums, sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_logits_in_parts_change_nothing(tiny_model, reference, examples, size: int) -> None:
    gradients, old = [], []
    for tokens_per_logits in (8192, size):
        trainer = make_trainer(
            tiny_model, LossConfig(kl_coef=0.1), reference=reference, tokens_per_logits=tokens_per_logits
        )
        trainer.accumulate(examples)
        gradients.append(gradient(trainer).clone())
        old.append(torch.tensor([x for e in trainer.with_old_logprobs(examples) for x in e.old_logprobs]))
    assert_same_gradient(gradients[1], gradients[0])
    torch.testing.assert_close(old[1], old[0], rtol=0, atol=1e-5)


def padded_logprobs(theirs, examples: Sequence[Example]) -> Tensor:
    """Log-probs of all response tokens by transformers' model on one padded batch."""
    targets = torch.tensor([i for e in examples for i in e.token_ids])
    return padded_distributions(theirs, examples).gather(1, targets[:, None])[:, 0]


def padded_distributions(theirs, examples: Sequence[Example]) -> Tensor:
    """Log-probs of the whole vocabulary at all response tokens. [T, V]"""
    width = max(e.num_tokens for e in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, e in enumerate(examples):
        ids[row, : e.num_tokens] = torch.tensor([*e.prompt_ids, *e.token_ids])
        mask[row, : e.num_tokens] = 1
    logprobs = theirs(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    return torch.cat([logprobs[row, len(e.prompt_ids) - 1 : e.num_tokens - 1] for row, e in enumerate(examples)])


@pytest.mark.parametrize("name, normalisation", ALL)
def test_gradients_equal_transformers_on_a_padded_batch(tiny_model, tiny_folder, examples, name, normalisation) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    new = padded_logprobs(theirs, examples)
    old = torch.tensor([x for e in examples for x in e.logprobs])
    lengths = torch.tensor([len(e.token_ids) for e in examples])
    sample = torch.repeat_interleave(torch.arange(len(examples)), lengths)
    advantages = torch.tensor([e.advantage for e in examples])[sample]
    if (name, normalisation) == ("ppo", "token"):  # in full, so that one case shares no code with ours
        ratio = (new - old).exp()
        mean = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()
    else:
        config = LossConfig(name=name, normalisation=normalisation)
        denominator = new.detach() if name == "decoupled" else old
        tokens = Tokens(new, denominator, old, advantages, sample, lengths)
        total, count = weighted_sum(LOSSES[name](tokens, config)[0], tokens, normalisation, MAX_RESPONSE)
        mean = total / count
    mean.backward()

    trainer = make_trainer(tiny_model, LossConfig(name=name, normalisation=normalisation))
    trainer.accumulate(examples)
    mine = Model(tiny_model.shape)  # holds gradients where weights belong, so that they get Hugging Face's names
    for param, master in zip(mine.parameters(), trainer.masters, strict=True):
        param.data.copy_(master.grad / trainer.sums[1])
    parameters = dict(theirs.named_parameters())
    named: list[tuple] = [(tensor, parameters[key].grad) for key, tensor in mine.export().items()]
    assert len(named) == len(parameters)
    assert_same_gradient(torch.cat([a.flatten() for a, _ in named]), torch.cat([b.flatten() for _, b in named]))
    for ours, others in named:
        assert (ours - others).norm() <= 1e-5 * others.norm() + 1e-7
    stats = trainer.update()
    assert stats["loss"] == pytest.approx(mean.item(), rel=1e-4, abs=1e-6)
    assert stats["grad_norm"] == pytest.approx(torch.cat([b.flatten() for _, b in named]).norm().item(), rel=1e-4)


@pytest.mark.parametrize("normalisation, part", [("token", 8192), ("sequence", 7)])
def test_the_entropy_bonus_has_the_gradient_of_the_full_distribution(
    tiny_model, tiny_folder, examples, normalisation: str, part: int
) -> None:
    from transformers import AutoModelForCausalLM

    found = []
    for coef in (0.0, 3.0):
        loss = LossConfig(entropy_coef=coef, normalisation=normalisation)
        trainer = make_trainer(tiny_model, loss, tokens_per_logits=part)
        trainer.accumulate(examples)
        found.append((gradient(trainer).clone(), trainer.sums))
    theirs = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    logprobs = padded_distributions(theirs, examples)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    lengths = torch.tensor([len(e.token_ids) for e in examples])
    share = torch.repeat_interleave(1.0 / lengths, lengths) if normalisation == "sequence" else torch.ones(len(entropy))
    (-3.0 * entropy * share).sum().backward()
    named = dict(theirs.named_parameters())
    wanted = Model(tiny_model.shape).double()  # holds gradients where weights belong
    for name, view, _ in wanted.hf_tensors():
        view.copy_(named[name].grad.view(view.shape))
    wanted_gradient = torch.cat([p.detach().flatten() for p in wanted.parameters()])
    (plain, plain_sums), (bonus, sums) = found
    assert_same_gradient((bonus - plain).double(), wanted_gradient, 1e-4)
    places = [SUMS.index(name) for name in ("loss", "entropy")]
    assert (sums - plain_sums)[places].tolist() == pytest.approx([(-3.0 * entropy * share).sum().item(), 0.0], rel=1e-5)
    assert sums[places[1]].item() == pytest.approx(entropy.sum().item(), rel=1e-5)


# ---- memory ------------------------------------------------------------------------------------------------------


def test_gradients_and_moments_have_their_memory_from_the_start(tiny_model, examples) -> None:
    trainer = make_trainer(tiny_model)
    held = [*(master.grad for master in trainer.masters), *trainer._moments()]
    assert len(held) == 3 * len(trainer.params)
    for _ in range(2):
        trainer.accumulate(examples)
        assert all(tensor.any() for tensor in held[: len(trainer.params)])
        trainer.update()
        assert not any(tensor.any() for tensor in held[: len(trainer.params)]), "set to zero in place"
        again = [*(master.grad for master in trainer.masters), *trainer._moments()]
        assert all(a is b for a, b in zip(held, again, strict=True))
    assert all(tensor.any() for tensor in trainer._moments())


# ---- frozen weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_frozen_norms_leave_all_other_gradients_as_they_are(tiny_model, reference, examples, monkeypatch, recompute):
    """On a GPU the kernels have no backward pass; here their twins are cut off from it. The reference may use them."""
    used, found = [], []

    def cut_off(twin: Callable[..., Any]) -> Callable[..., Any]:
        def cut(*args: Any) -> Any:
            used.append(twin.__name__)
            found = twin(*args)
            return tuple(t.detach() for t in found) if isinstance(found, tuple) else found.detach()

        return cut

    monkeypatch.setattr(kernels, "use_triton", lambda x: True)
    monkeypatch.setattr(kernels, "add_rms_norm", cut_off(kernels.add_rms_norm_torch))
    monkeypatch.setattr(kernels, "silu_mul", cut_off(kernels.silu_mul_torch))
    for frozen in (False, True):
        trainer = make_trainer(tiny_model, LossConfig(kl_coef=0.1), reference=reference, recompute=recompute)
        for name, weight in trainer.model.named_parameters():
            weight.requires_grad_(not (frozen and "norm" in name))
        trainer.accumulate(examples)
        found.append({name: weight.grad for name, weight in trainer.model.named_parameters()})
    assert set(used) == {"add_rms_norm_torch", "silu_mul_torch"}
    for name, whole in found[0].items():
        assert whole.any() and torch.equal(found[1][name], torch.zeros_like(whole) if "norm" in name else whole), name


def train_frozen(world: World, folder: Path, examples: list[Example], dtype: torch.dtype) -> None:
    model = load_model(folder, CPU, dtype)
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" not in name and "embed" not in name)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer = make_trainer(model, world=world, weight_decay=0.5, shard=world.size)
    for _ in range(2):
        trainer.accumulate(examples)
        trainer.update()
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, before[name]) == ("norm" in name or "embed" in name), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_weights_stay_as_they_are(run_ranks, tiny_folder, examples, dtype: torch.dtype) -> None:
    train_frozen(ALONE, tiny_folder, examples, dtype)
    run_ranks(2, train_frozen, tiny_folder, examples, dtype)


# ---- spans -------------------------------------------------------------------------------------------------------


@pytest.fixture
def turns(examples) -> list[Example]:
    """The examples as turns with tokens between them that nobody sampled; what is recorded there must not matter."""
    found = []
    for e in (e for e in examples if len(e.token_ids) >= 6):
        spans = Span(0, 2, 3), Span(4, len(e.token_ids) - 1, 4)
        found.append(replace(e, spans=spans, logprobs=(*e.logprobs[:2], *(math.nan,) * 2, *e.logprobs[4:-1], math.nan)))
    assert len(found) > 4
    return found


def masked_sums(model: Model, reference: Model, e: Example, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """The loss of each response token by hand, 0 at those that were not sampled, and the mask. [T] each"""
    tokens, count = torch.tensor(e.token_ids), len(e.token_ids)
    mask = torch.zeros(count, dtype=torch.bool)
    for span in e.spans:
        mask[span.start : span.end] = True
    rows, own = [], []
    for m in (model, reference):
        ids = torch.tensor([*e.prompt_ids, *e.token_ids])
        hidden = m(ids, torch.arange(len(ids)), PackedAttention([len(ids)], CPU))
        rows.append(m.logits(hidden)[-count - 1 : -1].log_softmax(-1))  # [T, V]
        own.append(rows[-1].gather(1, tokens[:, None])[:, 0])
    new, ref, old = *own, torch.tensor(e.logprobs)
    ratio = (new - old.where(mask, new.detach())).exp()
    values = -torch.minimum(ratio * e.advantage, ratio.clamp(0.8, 1.28) * e.advantage)
    values = values + loss.kl_coef * ((ref - new).exp() - (ref - new) - 1)
    values = values + loss.entropy_coef * (rows[0].exp() * rows[0]).sum(-1)
    return values.where(mask, torch.zeros(())), mask


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_only_tokens_in_spans_are_trained(tiny_model, reference, turns, normalisation: str) -> None:
    loss = LossConfig(normalisation=normalisation, kl_coef=0.3, entropy_coef=0.2)
    trainer = make_trainer(tiny_model, loss, reference=reference, tokens_per_microbatch=64)
    trainer.accumulate(turns)
    parts = [masked_sums(trainer.model, reference, e, loss) for e in turns]
    if normalisation == "token":
        mean = sum(values.sum() for values, _ in parts) / sum(mask.sum() for _, mask in parts)
    elif normalisation == "sequence":
        mean = sum(values.sum() / mask.sum() for values, mask in parts) / len(parts)
    else:
        mean = sum(values.sum() for values, _ in parts) / MAX_RESPONSE / len(parts)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(mean, trainer.params)])
    assert_same_gradient(gradient(trainer) / trainer.sums[1], wanted)
    stats = trainer.update()
    assert stats["loss"] == pytest.approx(float(mean), rel=1e-4)
    assert stats["trained_tokens"] == sum(len(e.token_ids) - 3 for e in turns)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_an_example_without_a_sampled_token_teaches_nothing(tiny_model, examples, normalisation: str) -> None:
    given = [replace(e, spans=()) for e in examples]
    loss = LossConfig(normalisation=normalisation)
    trainer, other = (make_trainer(tiny_model, loss, tokens_per_microbatch=64) for _ in range(2))
    trainer.accumulate(given)
    assert not gradient(trainer).any() and not trainer.sums.any() and trainer.with_old_logprobs(given) == []
    trainer.accumulate([*given, *examples])
    other.accumulate(examples)
    assert_same_gradient(gradient(trainer) / trainer.sums[1], gradient(other) / other.sums[1])


@pytest.mark.parametrize("name, normalisation", ALL)
def test_samples_without_advantage_run_forward_only_and_change_nothing(
    tiny_model, examples, monkeypatch, name: str, normalisation: str
) -> None:
    mixed = [replace(e, advantage=0.0) if i % 2 else e for i, e in enumerate(examples)]
    loss = LossConfig(name=name, normalisation=normalisation)
    trainer, other = (make_trainer(tiny_model, loss) for _ in range(2))
    backward, forward = list[float](), Trainer._add_gradients

    def note(self: Trainer, batch: Sequence[Example]) -> None:
        backward.extend(e.advantage for e in batch if torch.is_grad_enabled())
        forward(self, batch)

    monkeypatch.setattr(Trainer, "_add_gradients", note)
    trainer.accumulate(mixed)
    assert (0.0 in backward) == (name in ("kimi15", "sft"))
    monkeypatch.setattr("loss.SCALED", set())
    other.accumulate(mixed)
    assert_same_gradient(gradient(trainer), gradient(other))
    torch.testing.assert_close(trainer.sums, other.sums, rtol=1e-5, atol=1e-5)


def test_the_multiplications_are_those_of_transformers(tiny_model, tiny_folder) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")
    shape = tiny_model.shape
    for n in (1, 17, 200):
        with FlopCounterMode(display=False) as counter:
            theirs(torch.zeros(1, n, dtype=torch.int64))
        masked = n * n * shape.num_layers * shape.num_heads * shape.head_dim  # theirs attends to later tokens, too
        assert counter.get_total_flops() == 2 * (multiplications(shape, n, n) + masked)
    windowed = replace(shape, windows=(5, 0))
    assert multiplications(windowed, 5, 5) == multiplications(shape, 5, 5)
    saved = 200 * 195 * shape.num_heads * shape.head_dim
    assert multiplications(windowed, 200, 0) == multiplications(shape, 200, 0) - saved


def test_ranks_share_the_work_of_gradients(tiny_model) -> None:
    """One long sample among short ones, and groups of which only some teach."""
    trainer, buffer = make_trainer(tiny_model), SampleBuffer(32)
    for i in range(32):
        length = 80 if i == 7 else 5 + i
        own = sampled((1,), (2,) * length, float(i % 3 == 1))
        buffer.put(VisitId(0, i), [replace(own, id=VisitId(0, i).sample(0))])
    [shares] = buffer.deal(4, work_of=partial(work_of, trainer))
    works = [sum(map(partial(work_of, trainer), share)) for share in shares]
    assert max(works) - min(works) <= min(work_of(trainer, e) for share in shares for e in share if e.advantage)
    plain, long = (replace(shares[0][0], token_ids=(2,) * n, spans=(Span(0, n, 0),), advantage=0.0) for n in (20, 40))
    assert work_of(trainer, replace(plain, advantage=1.0)) == 3 * work_of(trainer, plain)
    assert work_of(trainer, long) > 2 * work_of(trainer, plain)
    answer = replace(plain, spans=(Span(10, 20, 0),))
    head = tiny_model.shape.hidden_size * tiny_model.shape.vocab_size
    assert work_of(trainer, plain) - work_of(trainer, answer) == 10 * head, "of sampled tokens only"


@pytest.mark.parametrize("option", ["kl_coef", "entropy_coef"])
def test_other_terms_teach_without_an_advantage(tiny_model, reference, examples, option: str) -> None:
    trainer = make_trainer(tiny_model, LossConfig(**{option: 0.1}), reference=reference)
    trainer.accumulate([replace(e, advantage=0.0) for e in examples])
    assert gradient(trainer).norm() > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_given_tokens_are_context_like_the_prompt_and_versions_change_nothing(tiny_model, examples, name: str) -> None:
    long = [e for e in examples if len(e.token_ids) > 4]
    ways = {
        "given": [replace(e, spans=(Span(3, len(e.token_ids), 1),)) for e in long],
        "in the prompt": [
            replace(sampled(e.prompt_ids + e.token_ids[:3], e.token_ids[3:], e.advantage), logprobs=e.logprobs[3:])
            for e in long
        ],
        "of two versions": [replace(e, spans=(Span(3, 4, 1), Span(4, len(e.token_ids), 2))) for e in long],
    }
    found = []
    for way in ways.values():
        trainer = make_trainer(tiny_model, LossConfig(name=name))
        trainer.accumulate(way)
        found.append((gradient(trainer), trainer.sums[: SUMS.index("newest")]))
        newest = sum(len(span) for e in way for span in e.spans if span.version == 0)
        assert trainer.sums[SUMS.index("newest")] == newest, "the weights of this step are version 0"
    assert found[0][0].norm() > 1e-3
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_old_logprobs_are_those_of_the_sampled_tokens(tiny_model, examples, turns) -> None:
    trainer = make_trainer(tiny_model, LossConfig(old_logprobs="trainer"))
    whole: dict[Any, Any] = {e.token_ids: e.old_logprobs for e in trainer.with_old_logprobs(examples)}
    kept: list[Any] = trainer.with_old_logprobs(turns)
    for e in kept:
        everything = whole[e.token_ids]
        assert [*e.old_logprobs] == pytest.approx([*everything[:2], *everything[4:-1]], abs=1e-5)
    trainer.accumulate(kept)
    assert trainer.update()["clip_fraction"] == 0  # the ratio is 1


def test_what_is_learnt_of_a_sample_keeps_its_spans() -> None:
    sample = Sample(0, 0, 0, (5, 6, 7), (-1.0, 0.0, -2.0), "stop", (Span(0, 1, 3), Span(2, 3, 4)))
    [example] = examples_of(Prompt(0, (9,), "", "", "math"), [sample], [0.5], mask_truncated=False)
    assert example == Example(sample.id, (9,), sample.token_ids, sample.spans, sample.logprobs, 0.5)


# ---- over ranks --------------------------------------------------------------------------------------------------


def train_share(world: World, model_folder: Path, examples: list[Example], result: Path, settings: dict) -> None:
    """Two updates on uneven shares: rank 0 has most samples; in the first update the last rank has none.

    The device is released between gradients and update, as a rank that has left a round may have to.
    """
    trainer = make_trainer(load_model(model_folder, CPU, torch.float32), world=world, **settings)
    gradients, step = [], trainer._step
    trainer._step = lambda lr: (gradients.append(gradient(trainer).clone()), step(lr))
    stats = []
    for update in range(2):
        owners = [0, 0, 0, *range(max(world.size - 1 + update, 1))] if world.size > 1 else [0]
        batch = examples[:: 2 - update]
        trainer.accumulate([e for i, e in enumerate(batch) if owners[i % len(owners)] == world.rank])
        sums = [sharding.own_part(master.grad) for master in trainer.trained]
        assert any(part.any() for part in sums) or not update
        trainer.release()
        assert not any(part.untyped_storage().nbytes() for part in sums)
        trainer.take_back()
        stats.append(trainer.update())
    torch.save((gradients, weights(trainer), stats), f"{result}.{world.rank}")


SHARDED = {"shard": 2, "recompute": "on", "offload_optimizer": True, "tokens_per_microbatch": 128}


def test_a_rank_may_have_nothing_but_samples_without_advantage(run_ranks, tiny_folder, examples, tmp_path) -> None:
    # In the second update of `train_share` all of rank 0's.
    mixed = [e if i % 5 == 4 else replace(e, advantage=0.0) for i, e in enumerate(examples)]
    train_share(ALONE, tiny_folder, mixed, tmp_path / "alone", {})
    run_ranks(2, train_share, tiny_folder, mixed, tmp_path / "rank", {"shard": 2})
    alone, *ranks = (torch.load(tmp_path / name) for name in ("alone.0", "rank.0", "rank.1"))
    for gradients, weight, _ in ranks:
        for mine, expected in zip(gradients, alone[0], strict=True):
            assert_same_gradient(mine, expected)
        torch.testing.assert_close(weight, alone[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "size, settings",
    [
        (2, {}),
        (4, SHARDED | {"keeps_model": False}),
        thorough(4, {}),
        thorough(2, SHARDED),
        thorough(4, {"shard": 4}),
    ],
)
def test_any_number_of_ranks_makes_the_same_update(
    run_ranks, tiny_folder, examples, tmp_path, size: int, settings: dict
) -> None:
    train_share(ALONE, tiny_folder, examples, tmp_path / "alone", {})
    run_ranks(size, train_share, tiny_folder, examples, tmp_path / "rank", settings)
    alone, *ranks = (torch.load(tmp_path / name) for name in ("alone.0", *(f"rank.{i}" for i in range(size))))
    for gradients, weight, stats in ranks:
        for mine, expected in zip(gradients, alone[0], strict=True):
            assert_same_gradient(mine, expected)
        assert torch.equal(weight, ranks[0][1])
        torch.testing.assert_close(weight, alone[1], rtol=0, atol=1e-5)
        for mine, expected in zip(stats, alone[2], strict=True):
            assert mine.pop("skipped") == expected["skipped"] == ""
            assert mine == pytest.approx({k: expected[k] for k in mine}, rel=1e-4, abs=1e-6, nan_ok=True)


# ---- KL and old log-probs ----------------------------------------------------------------------------------------


@pytest.fixture
def reference(tiny_model) -> Model:
    other = copy.deepcopy(tiny_model).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for param in other.parameters():
        param.add_(0.05 * torch.randn(param.shape, generator=generator))
    return other


def test_the_kl_term_pulls_towards_the_reference(tiny_model, reference, examples) -> None:
    trainer = make_trainer(tiny_model, LossConfig(kl_coef=0.3), reference=reference)
    trainer.accumulate(examples)
    ours, sums = gradient(trainer).clone(), trainer.sums.clone()

    plain = make_trainer(tiny_model)
    plain.accumulate(examples)
    batch = sorted(examples, key=lambda e: -e.num_tokens)
    kl = kl_to_reference(plain._score(plain.model, batch)[0], plain._score(reference, batch)[0]).sum()
    grads = torch.autograd.grad(kl, plain.params)
    assert_same_gradient(ours, gradient(plain) + 0.3 * torch.cat([g.flatten() for g in grads]))
    stats, plain_loss = trainer.update(), plain.sums[0].item()
    assert stats["kl"] == pytest.approx(kl.item() / sums[2].item(), rel=1e-4) and stats["kl"] > 1e-3
    assert stats["loss"] == pytest.approx((plain_loss + 0.3 * kl.item()) / sums[2].item(), rel=1e-4)
    assert all(p.grad is None for p in reference.parameters())


def test_a_reference_equal_to_the_policy_adds_nothing(tiny_model, examples) -> None:
    gradients = []
    for loss, other in ((LossConfig(), None), (LossConfig(kl_coef=5.0), copy.deepcopy(tiny_model))):
        trainer = make_trainer(tiny_model, loss, reference=other)
        trainer.accumulate(examples)
        gradients.append(gradient(trainer).clone())
    assert_same_gradient(gradients[1], gradients[0])


def test_a_batch_without_a_token_of_the_newest_weights_has_no_difference_to_the_rollout(tiny_model, examples) -> None:
    older = [replace(e, spans=tuple(replace(span, version=-1) for span in e.spans)) for e in examples]
    trainer = make_trainer(tiny_model)
    trainer.accumulate(older)
    stats = trainer.update()
    assert math.isnan(stats["logprob_diff_mean"]) and math.isnan(stats["logprob_diff_max"]) and not stats["skipped"]


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_old_logprobs_of_the_trainer_make_the_ratio_one(tiny_model, examples, name: str) -> None:
    trainer = make_trainer(tiny_model, LossConfig(name=name, old_logprobs="trainer", clip_low=0.01, clip_high=0.01))
    trainer.accumulate(examples)
    exact = make_trainer(tiny_model, LossConfig(name=name))
    exact.accumulate(on_policy(tiny_model, examples))
    assert_same_gradient(gradient(trainer), gradient(exact))
    stats = trainer.update()
    assert stats["clip_fraction"] == 0
    assert stats["logprob_diff_mean"] == pytest.approx(0.3 * math.sqrt(2 / math.pi), rel=0.2)  # the rollout's, still
    assert exact.update()["logprob_diff_max"] < 1e-5


def test_old_logprobs_are_of_the_micro_batches_that_get_gradients(tiny_model, examples, monkeypatch) -> None:
    """In bfloat16 others round otherwise, by more than the bounds of GSPO, and the first ratio would not be 1."""
    mixed = [replace(e, advantage=e.advantage * (i % 2)) for i, e in enumerate(examples)]
    trainer, scored, score = make_trainer(tiny_model, tokens_per_microbatch=64), [], Trainer._score

    def note(self, model, batch, *args, **options):
        scored.append([(e.prompt_ids, e.token_ids, e.advantage) for e in batch])
        return score(self, model, batch, *args, **options)

    monkeypatch.setattr(Trainer, "_score", note)
    trainer.accumulate(trainer.with_old_logprobs(mixed))
    count = len(scored) // 2
    assert scored[:count] == scored[count:] and count > 2
    assert {len({bool(advantage) for *_, advantage in batch}) for batch in scored} == {1}


@pytest.mark.parametrize(
    "name, in_bf16, in_fp32",
    [
        ("ppo", "trainer", "rollout"),
        ("decoupled", "trainer", "trainer"),
        ("tis", "rollout", "rollout"),
        ("own", "rollout", "rollout"),
        ("own decoupled", "trainer", "trainer"),
    ],
)
def test_loss_and_dtype_choose_the_denominator(name: str, in_bf16: str, in_fp32: str, monkeypatch) -> None:
    monkeypatch.setitem(LOSSES, "own", LOSSES["tis"])
    monkeypatch.setitem(LOSSES, "own decoupled", LOSSES["decoupled"])
    monkeypatch.setattr("loss.PROXIMAL", PROXIMAL | {"own decoupled"})
    for dtype, denominator in ((torch.bfloat16, in_bf16), (torch.float32, in_fp32)):
        assert LossConfig(name=name).for_dtype(dtype).old_logprobs == denominator
        assert LossConfig(name=name, old_logprobs="rollout").for_dtype(dtype).old_logprobs == "rollout"
        older = LossConfig(name=name).for_dtype(dtype, are_older=True).old_logprobs
        assert older == ("trainer" if "decoupled" in name else "rollout"), "only that ratio corrects for them"


@pytest.mark.parametrize("dtype, denominator", [(torch.bfloat16, "trainer"), (torch.float32, "rollout")])
def test_the_dtype_chooses_the_denominator(tiny_model, examples, dtype: torch.dtype, denominator: str) -> None:
    gradients = []
    for loss in (LossConfig(), LossConfig(old_logprobs=denominator)):
        trainer = make_trainer(copy.deepcopy(tiny_model).to(dtype), loss)
        trainer.accumulate(examples)
        gradients.append(gradient(trainer).clone())
    assert trainer.update()["clip_fraction"] == (0 if denominator == "trainer" else pytest.approx(0.3, abs=0.2))
    assert torch.equal(*gradients)


def test_old_logprobs_come_from_the_operations_of_the_gradient(tiny_model, examples, monkeypatch) -> None:
    """Kernels may round otherwise, and the ratio of the first update would not be 1."""
    monkeypatch.setattr(kernels, "use_triton", lambda x: True)
    for name in ("add_rms_norm", "silu_mul"):
        monkeypatch.setattr(kernels, name, lambda *_: pytest.fail("a kernel"))
    make_trainer(tiny_model).with_old_logprobs(examples)


@pytest.mark.parametrize("name, weight", [("ppo", 1.0), ("decoupled", math.exp(0.5))])
def test_old_logprobs_are_kept_over_several_updates(tiny_model, examples, name: str, weight: float) -> None:
    trainer = make_trainer(tiny_model, LossConfig(name=name, old_logprobs="trainer"), lr=1e-2)
    kept = trainer.with_old_logprobs(examples)
    kept = [replace(e, logprobs=tuple(x - 0.5 for x in e.old_logprobs)) for e in kept]
    assert sorted(tuple(e.token_ids) for e in kept) == sorted(tuple(e.token_ids) for e in examples)
    trainer.accumulate(kept)
    trainer.update()
    trainer.accumulate(kept)
    rollout = make_trainer(trainer.model)  # the same ratio, told through the recorded log-probs
    rollout.accumulate([replace(e, logprobs=e.old_logprobs) for e in kept])
    assert_same_gradient(gradient(trainer), weight * gradient(rollout))
    assert trainer.update()["clip_fraction"] > 0


@pytest.mark.parametrize("difference, weight", [(0.5, math.exp(0.5)), (1.5, 2.0), (-1.0, math.exp(-1.0))])
def test_importance_weights_are_capped(tiny_model, examples, difference: float, weight: float) -> None:
    exact = on_policy(tiny_model, examples)
    plain = make_trainer(tiny_model)
    plain.accumulate(exact)
    trainer = make_trainer(tiny_model, LossConfig(name="decoupled", tis_cap=2.0))
    trainer.accumulate([replace(e, logprobs=tuple(x - difference for x in e.logprobs)) for e in exact])
    assert_same_gradient(gradient(trainer), weight * gradient(plain))


def test_importance_weights_leave_the_kl_term_alone(tiny_model, reference, examples) -> None:
    loss = LossConfig(name="decoupled", kl_coef=1.0)
    nothing_to_learn = [replace(e, advantage=0.0) for e in examples]
    gradients = []
    for config in (loss, replace(loss, name="ppo")):
        trainer = make_trainer(tiny_model, config, reference=reference)
        trainer.accumulate(nothing_to_learn)
        gradients.append(gradient(trainer).clone())
    assert_same_gradient(*gradients)


def test_temperature_and_filters_are_those_of_the_rollout(tiny_model, examples) -> None:
    sampling = SamplingConfig(temperature=0.7, top_k=30, top_p=0.9)
    trainer = Trainer(tiny_model, TrainerConfig(), LossConfig(), sampling, ALONE, MAX_RESPONSE, 10)
    [e, *_] = examples
    logprobs, entropy = trainer._score(tiny_model, [e])
    ids, attend = torch.tensor([*e.prompt_ids, *e.token_ids]), PackedAttention([e.num_tokens], CPU)
    hidden = tiny_model(ids, torch.arange(e.num_tokens), attend)
    logits = tiny_model.logits(hidden[len(e.prompt_ids) - 1 : -1])
    expected = score(logits, torch.tensor(e.token_ids), sampling)
    torch.testing.assert_close((logprobs, entropy), expected)


# ---- updates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_update_is_skipped_and_three_in_a_row_stop_the_run(tiny_model, examples, bad: float) -> None:
    trainer = make_trainer(tiny_model)
    broken = [replace(examples[0], advantage=bad), *examples[1:]]

    def update(batch: list[Example]) -> dict:
        trainer.accumulate(batch)
        return trainer.update()

    assert update(examples)["skipped"] == ""
    before, state = weights(trainer), copy.deepcopy(trainer.optimizer.state_dict())
    for _ in range(2):
        assert "loss" in update(broken)["skipped"]
    assert torch.equal(weights(trainer), before)
    for name, kept in state["state"].items():
        for key, value in kept.items():
            assert torch.equal(trainer.optimizer.state_dict()["state"][name][key], value)
    assert update(examples)["skipped"] == ""  # a good one in between: the count starts again
    assert not torch.equal(weights(trainer), before) and weights(trainer).isfinite().all()
    before = weights(trainer)
    for _ in range(2):
        update(broken)
    with pytest.raises(NonFiniteError, match="three updates in a row"):
        update(broken)
    assert torch.equal(weights(trainer), before)


def test_a_gradient_that_is_not_finite_is_skipped_too(tiny_model, examples) -> None:
    trainer = make_trainer(tiny_model)
    before = weights(trainer)
    trainer.accumulate(examples)
    trainer.masters[3].grad.flatten()[0] = math.nan
    stats = trainer.update()
    assert "gradient norm nan" in str(stats["skipped"]) and math.isfinite(stats["loss"])
    assert torch.equal(weights(trainer), before)
    trainer.accumulate(examples)
    assert trainer.update()["skipped"] == ""  # nothing of it is left in the sums


def test_nothing_to_learn_from_is_no_update_and_no_error(tiny_model) -> None:
    trainer = make_trainer(tiny_model)
    before = weights(trainer)
    for _ in range(4):
        trainer.accumulate([])
        stats = trainer.update()
        assert stats["skipped"] == "no sample to learn from" and math.isnan(stats["logprob_diff_max"])
    assert torch.equal(weights(trainer), before)


def test_gradients_are_clipped_by_their_norm_over_all_parameters(tiny_model, examples) -> None:
    seen = []
    for clip in (0.0, 1e-3, 1e3):
        trainer = make_trainer(tiny_model, grad_clip=clip)
        with patch.object(trainer, "_step", lambda lr: seen.append(gradient(trainer).clone())):  # noqa: B023
            trainer.accumulate(examples)
            norm = trainer.update()["grad_norm"]
        assert norm == pytest.approx(seen[0].norm().item(), rel=1e-5)  # what is reported is the norm before
    assert seen[1].norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert_same_gradient(seen[1] * (seen[0].norm() / seen[1].norm()), seen[0])
    assert torch.equal(seen[2], seen[0])


def test_the_learning_rate_warms_up_and_falls(tiny_model, examples) -> None:
    def rates(**settings) -> list[float]:
        trainer = make_trainer(tiny_model, lr=0.5, **settings)
        return [trainer.lr_at(i) for i in range(12)]

    assert rates() == [0.5] * 12
    assert rates(lr_warmup_updates=4)[:6] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])
    tenth = 0.5 / 10  # 10 updates in all; what comes after them has nothing left
    assert rates(lr_schedule="linear") == pytest.approx([i * tenth for i in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0)])
    assert rates(lr_schedule="linear", lr_warmup_updates=1) == rates(lr_schedule="linear")
    sixth = 0.5 / 6  # the peak is reached by the fifth, and six are left with it
    rise, fall = [0.1, 0.2, 0.3, 0.4], [i * sixth for i in (6, 5, 4, 3, 2, 1, 0, 0)]
    assert rates(lr_schedule="linear", lr_warmup_updates=5) == pytest.approx(rise + fall)
    assert max(rates(lr_schedule="linear", lr_warmup_updates=5)) == 0.5
    assert rates(lr_schedule="linear", lr_warmup_updates=20)[:10] == rates(lr_warmup_updates=20)[:10]  # never at it
    trainer = make_trainer(tiny_model, lr=1e-3, lr_warmup_updates=2)
    moved: list[float] = []
    for _ in range(2):
        before = weights(trainer)
        trainer.accumulate(examples)
        assert trainer.update()["lr"] == pytest.approx(5e-4 * (len(moved) + 1))
        moved.append((weights(trainer) - before).abs().max().item())
    assert moved == pytest.approx([5e-4, 1e-3], rel=0.05)  # AdamW moves a steady weight by the rate


def decay_only(world: World, folder: Path, examples: list[Example], shard: int, dtype: torch.dtype) -> None:
    """One update without a gradient: matrices shrink by lr * weight_decay, norms and biases stay."""
    trainer = make_trainer(load_model(folder, CPU, dtype), world=world, lr=0.1, weight_decay=0.5, shard=shard)
    before = [sharding.whole(m.detach()).clone() for m in trainer.masters]
    trainer.accumulate([replace(e, advantage=0.0) for e in examples])
    assert trainer.update()["grad_norm"] == 0.0
    for old, master in zip(before, trainer.masters, strict=True):
        torch.testing.assert_close(sharding.whole(master.detach()), old * (0.95 if old.dim() > 1 else 1.0))
    assert {m.dim() for m in before} == {1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_biases_do_not_decay(run_ranks, tiny_folder, examples, dtype: torch.dtype) -> None:
    decay_only(ALONE, tiny_folder, examples, 1, dtype)
    if dtype == torch.float32:
        run_ranks(2, decay_only, tiny_folder, examples, 2, dtype)


# ---- bf16 --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_masters_keep_what_bf16_weights_would_lose(tiny_model, examples) -> None:
    trainer = make_trainer(tiny_model.bfloat16(), lr=2e-5)
    assert all(m.dtype == torch.float32 for m in trainer.masters)
    assert all(a is b and a.dtype == torch.bfloat16 for a, b in zip(trainer.model.parameters(), trainer.params))
    start, master_start = weights(trainer), torch.cat([m.flatten() for m in trainer.masters]).clone()
    moved = []
    for _ in range(30):
        trainer.accumulate(examples)
        trainer.update()
        moved.append((weights(trainer) != start).double().mean().item())
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(trainer.params, trainer.masters, strict=True))
    large = start.abs() > 0.02  # bf16 steps of at least 6e-5 there: one update rounds away
    master = torch.cat([m.flatten() for m in trainer.masters])
    assert ((master - master_start)[large].abs() > 1e-4).double().mean() > 0.5
    assert moved[0] < 0.25 and moved[-1] > 0.6
    lost = (start[large] + 2e-5).eq(start[large]) & (start[large] - 2e-5).eq(start[large])
    assert lost.double().mean() > 0.9  # what bf16 weights without masters would have done


def test_bf16_gradients_add_up_in_fp32(tiny_model, examples) -> None:
    model, loss = tiny_model.bfloat16(), LossConfig(old_logprobs="rollout")
    trainer = make_trainer(model, loss, tokens_per_microbatch=1)
    expected = torch.zeros_like(gradient(trainer))
    for e in examples:
        one = make_trainer(model, loss)
        one.accumulate([e])
        expected += gradient(one)
    trainer.accumulate(examples)
    assert gradient(trainer).dtype == torch.float32
    assert_same_gradient(gradient(trainer), expected, 1e-6)
    assert all(p.grad is None for p in trainer.params)
    exact = make_trainer(model.float(), loss)
    exact.accumulate(examples)
    assert_same_gradient(gradient(trainer), gradient(exact), 0.05)


# ---- state -------------------------------------------------------------------------------------------------------


def save(trainer: Trainer, source: Path, run: Path) -> Checkpoints:
    checkpoints = Checkpoints(run, source, 1, trainer.world, trainer.config.shard)
    with trainer.saved_tensors() as tensors:
        checkpoints.save(trainer.num_updates, trainer.model, tensors, trainer.state_dict())
    return checkpoints


def resume(run: Path, dtype: torch.dtype, world: World = ALONE, **settings) -> Trainer:
    [folder] = list_checkpoints(run)
    if settings.get("keeps_model", True):
        trainer = make_trainer(load_model(folder, CPU, dtype), world=world, **settings)
    else:
        shape, files = check_model(folder)
        trainer = make_trainer(empty_model(shape, dtype), world=world, **settings)
        fill(trainer.model, files)
    trainer.load_state_dict(load_state(folder), partial(load_tensors, folder, world=world))
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_restored_trainer_continues_bit_by_bit(tiny_model, tiny_folder, examples, tmp_path, dtype) -> None:
    settings = {"lr_warmup_updates": 3, "lr_schedule": "linear", "weight_decay": 0.1, "grad_clip": 0.5}
    settings["offload_optimizer"] = dtype == torch.bfloat16

    def train(trainer: Trainer, updates: int) -> list[dict]:
        done = []
        for _ in range(updates):
            trainer.accumulate(examples[trainer.num_updates % 3 :: 2])
            done.append(trainer.update())
        return done

    straight = make_trainer(tiny_model.to(dtype), **settings)
    train(straight, 2)
    checkpoints = save(straight, tiny_folder, tmp_path)
    expected = train(straight, 3)  # beside the writing
    checkpoints.wait()
    resumed = resume(tmp_path, dtype, **settings)
    assert train(resumed, 3) == expected
    assert torch.equal(weights(resumed), weights(straight))
    assert all(torch.equal(a, b) for a, b in zip(resumed.masters, straight.masters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_release_amid_gradient_sums_changes_no_bit(tiny_model, examples, dtype: torch.dtype) -> None:
    plain, rested = (make_trainer(tiny_model.to(dtype), offload_optimizer=dtype == torch.bfloat16) for _ in range(2))
    shard = rested.model.layers[0].o_proj.weight.detach().chunk(2, 1)[1]  # a view, as an engine has it
    for _ in range(3):
        for trainer in (plain, rested):
            trainer.accumulate(examples[:5])
        rested.release()
        held = (*rested.params, *rested.masters, *(m.grad for m in rested.masters), *rested._moments(), shard)
        assert not any(tensor.untyped_storage().nbytes() for tensor in held)
        rested.take_back()
        for trainer in (plain, rested):
            trainer.accumulate(examples[5:])
        assert plain.update() == rested.update()
        assert torch.equal(weights(plain), weights(rested))
        assert torch.equal(shard, plain.model.layers[0].o_proj.weight.chunk(2, 1)[1])


def train_and_save(
    world: World, source: Path, examples: list[Example], before: Path | None, run: Path, dtype: torch.dtype, **settings
) -> None:
    """Two updates, resumed from the run `before`, and a checkpoint in `run`."""
    if before:
        trainer = resume(before, dtype, world, **settings)
    else:
        trainer = make_trainer(load_model(source, CPU, dtype), world=world, **settings)
    for _ in range(2):
        trainer.accumulate(examples[world.rank :: world.size])
        trainer.update()
    own, everything = sum(sharding.own_part(p).numel() for p in trainer.params), sum(p.numel() for p in trainer.params)
    assert own == everything if settings.get("keeps_model", True) else own < 0.6 * everything
    newest, full_tensor = [lambda: None], DTensor.full_tensor

    def one_at_a_time(sharded: DTensor) -> Tensor:
        assert newest[-1]() is None, "the weight before it is still whole"
        newest.append(weakref.ref(whole := full_tensor(sharded)))
        return whole

    with patch.object(DTensor, "full_tensor", one_at_a_time):
        save(trainer, source, run).wait()
    assert len(newest) == 1 + (own < everything) * len(trainer.params)
    with pytest.raises(KeyError), sharding.gathered(trainer.learner.layers[0]):
        raise KeyError
    assert isinstance(trainer.learner.layers[0].qkv_proj.weight, DTensor) == (settings.get("shard", 1) > 1)


@pytest.mark.parametrize("dtype", [torch.float32, thorough(torch.bfloat16)], ids=str)
def test_a_run_goes_on_with_another_sharding(run_ranks, tiny_folder, examples, tmp_path, dtype: torch.dtype) -> None:
    plain = partial(train_and_save, dtype=dtype, weight_decay=0.5)
    sharded = partial(plain, shard=2, offload_optimizer=True)
    first = tmp_path / "first"
    run_ranks(2, sharded, tiny_folder, examples, None, first)
    plain(ALONE, tiny_folder, examples, first, tmp_path / "alone")
    run_ranks(4, partial(sharded, keeps_model=False), tiny_folder, examples, first, tmp_path / "four")
    run_ranks(2, plain, tiny_folder, examples, first, tmp_path / "two")
    assert len(list(first.glob("checkpoints/*/optimizer/*"))) == 2, "each rank has written its part"
    alone, *others = (resume(tmp_path / name, dtype, weight_decay=0.5) for name in ("alone", "four", "two"))
    limit = 1e-5 if dtype == torch.float32 else 0.01
    for other in others:
        torch.testing.assert_close(weights(alone), weights(other), rtol=0, atol=limit)
        assert alone.state_dict() == other.state_dict()
        assert alone.state_dict() == {"num_updates": 4, "bad_updates": 0, "optimizer_steps": 4}
        with alone.saved_tensors() as mine, other.saved_tensors() as theirs:
            assert len(mine) == len(alone.names) * (2 if dtype == torch.float32 else 3) and mine.keys() == theirs.keys()
            for name, moment in mine.items():
                if name.startswith("exp_avg."):
                    rtol = 0.05 if limit > 1e-3 else 1e-4
                    torch.testing.assert_close(moment, theirs[name], rtol=rtol, atol=limit)


def test_bad_updates_are_counted_across_a_restart(tiny_model, tiny_folder, examples, tmp_path) -> None:
    broken = [replace(examples[0], advantage=math.nan)]
    trainer = make_trainer(tiny_model)
    for _ in range(2):
        trainer.accumulate(broken)
        trainer.update()
    save(trainer, tiny_folder, tmp_path).wait()
    resumed = resume(tmp_path, torch.float32)
    resumed.accumulate(broken)
    with pytest.raises(NonFiniteError):
        resumed.update()


# ---- packing -----------------------------------------------------------------------------------------------------


def test_pack_keeps_its_budget_loses_nothing_and_fills_well() -> None:
    rng = Random(0)
    for _ in range(300):
        budget = rng.randint(1, 60)
        sizes = [(rng.randint(1, 8), rng.randint(1, 40)) for _ in range(rng.randint(0, 30))]
        examples = [sampled((1,) * prompt, (2,) * response, i) for i, (prompt, response) in enumerate(sizes)]
        batches = pack(examples, budget)
        tokens = [sum(e.num_tokens for e in batch) for batch in batches]
        assert all(batch and (n <= budget or len(batch) == 1) for batch, n in zip(batches, tokens, strict=True))
        assert sorted(e.advantage for batch in batches for e in batch) == [e.advantage for e in examples]
        assert sum(2 * n <= budget for n in tokens) <= 1  # two such batches would have been one


def test_pack_takes_the_longest_first() -> None:
    sizes = [2, 2, 3, 3, 7, 7, 8, 8]  # shortest first would need five batches of 10
    batches = pack([sampled((1,), (2,) * (size - 1)) for size in sizes], 10)
    assert [[e.num_tokens for e in batch] for batch in batches] == [[8, 2], [8, 2], [7, 3], [7, 3]]
