"""Layers that stream: which ones stay, and that a layer is whole while it is computed with."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ALONE, TINY

from checkpoint import load_model
from model import LayerWeights
from rewards.offload import Layers, ThreadCopies, num_resident, residence_order, token_bytes
from warm_start import make_model

CPU = torch.device("cpu")
NUM_LAYERS = 5


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "deep"
    make_model(replace(TINY, num_layers=NUM_LAYERS), "hailstone", folder, ALONE)
    return folder


def load(folder: Path):
    model = load_model(folder, CPU, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # norms and biases too, so that no two tensors are alike
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return model


@pytest.fixture
def expected(deep_folder: Path) -> list[LayerWeights]:
    return [layer.weights() for layer in load(deep_folder).layers]


@pytest.fixture
def layers(deep_folder: Path):
    made = Layers(load(deep_folder), CPU)
    yield made
    made.close()


class LateCopies(ThreadCopies):
    """Each copy begins late: who does not wait for it computes with another layer."""

    def start(self, target, source, after):
        self.thread.submit(time.sleep, 0.003)
        return super().start(target, source, after)


def assert_whole(layers: Layers, expected: list[LayerWeights]) -> None:
    seen = 0
    for own, theirs in zip(layers, expected):
        before = [tensor.clone() for tensor in own if tensor is not None]
        time.sleep(0.008)  # a computation: long enough for a copy that comes too early
        after = [tensor for tensor in own if tensor is not None]
        wanted = [tensor for tensor in theirs if tensor is not None]
        assert all(torch.equal(a, b) for a, b in zip(before, wanted, strict=True)), f"layer {seen} came late"
        assert all(torch.equal(a, b) for a, b in zip(after, wanted, strict=True)), f"layer {seen} was overwritten"
        seen += 1
    assert seen == NUM_LAYERS


@pytest.mark.parametrize("count", range(NUM_LAYERS + 1))
def test_every_layer_is_whole_from_its_copy_to_its_end(layers, expected, count):
    layers.copies.close()
    layers.copies = LateCopies()
    layers.place(count)
    for _ in range(3):
        assert_whole(layers, expected)
    assert len(layers.resident) == count and len(layers.arriving) == (2 if count < NUM_LAYERS else 0)


def test_residence_may_change_between_forwards_and_be_released(layers, expected):
    layers.copies.close()
    layers.copies = LateCopies()
    for count in (0, 3, 5, 1, 4, 4, 0, 5, 2):
        layers.place(count)
        assert_whole(layers, expected)
        if count == 4:
            layers.release()
            assert layers.device_bytes == 0


def test_a_forward_streams_what_is_not_resident_once(layers, expected):
    layers.place(2)
    for _ in range(4):
        before = layers.streamed_bytes
        assert_whole(layers, expected)
        assert layers.streamed_bytes - before == 3 * layers.layer_bytes


def test_layers_leave_the_model_and_hold_all_of_its_weights(deep_folder, layers, expected):
    model = load(deep_folder)
    Layers(model, CPU).close()
    assert len(model.layers) == 0
    elements = sum(tensor.numel() for tensor in expected[0] if tensor is not None)
    assert elements <= layers.size < elements + 128 * len(expected[0])


# ---- how many stay, and which


def test_residents_fit_and_no_more_would():
    rng = random.Random(0)
    seen = set()
    for _ in range(5000):
        total, layer, token = rng.randint(1, 80), rng.randint(1, 1000), rng.randint(0, 50)
        tokens, free = rng.randint(0, 100), rng.randint(0, 60_000)
        count = num_resident(total, layer, token, tokens, free)
        assert 0 <= count <= total
        needs = [layer * (n if n == total else n + 2) + token * tokens for n in range(total + 1)]
        if count:
            assert needs[count] <= free
        if count < total:
            assert needs[total] > free and (needs[count + 1] > free or count + 1 == total)
        seen.add("all" if count == total else "none" if count == 0 else "some")
    assert seen == {"all", "none", "some"}


def test_longer_batches_and_less_memory_leave_fewer_residents():
    by_tokens = [num_resident(28, 470, 1, tokens, 14_000) for tokens in range(0, 14_000, 100)]
    by_memory = [num_resident(28, 470, 1, 1000, free) for free in range(0, 16_000, 100)]
    assert by_tokens == sorted(by_tokens, reverse=True) and by_memory == sorted(by_memory)
    assert by_tokens[0] == by_memory[-1] == 28 and by_tokens[-1] == by_memory[0] == 0
    assert 10 < len(set(by_tokens)) and num_resident(28, 470, 1, 1000, float("inf")) == 28


@pytest.mark.parametrize("total", [1, 2, 3, 5, 24, 28, 32, 80])
def test_residents_are_spread_evenly(total):
    order = residence_order(total)
    assert sorted(order) == list(range(total))
    for count in range(1, total + 1):
        kept = [-1, *sorted(order[:count]), total]
        longest = max(b - a - 1 for a, b in zip(kept, kept[1:]))
        assert longest <= 2 * total / count, (count, kept)


def test_activations_are_counted_for_the_wider_half_of_a_layer(deep_folder):
    shape = load(deep_folder).shape
    assert token_bytes(shape, torch.float32) == 2 * token_bytes(shape, torch.bfloat16) > 4 * 3 * shape.intermediate_size
