"""Weights on their way from training ranks to decoding ones: all bits arrive, and each crosses once."""

from itertools import chain
from random import Random

import pytest
import torch
import torch.distributed as dist
from conftest import thorough
from torch import nn

import parallel
from engine.host import OnHost, data_of
from metrics import Clock
from overlap.pools import make_pools
from overlap.weights import deal
from parallel import World

SIZES = [((3, 5), torch.float32), ((7,), torch.bfloat16), ((), torch.float32), ((0, 4), torch.float32)]
SIZES += [((11, 13), torch.bfloat16), ((1,), torch.bfloat16), ((2, 3, 5), torch.float32)]


class Odd(nn.Module):
    """Odd shapes, two dtypes, a weight that is in two places, and values that are not numbers."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in SIZES]
        tensors[0][1, 2] = torch.nan
        self.weights = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])
        self.head = self.weights[4]

    def bits(self) -> list[list[int]]:
        return [data_of(w.detach()).flatten().view(torch.uint8).tolist() for w in self.parameters()]


@pytest.mark.parametrize("trainers", range(1, 5))
@pytest.mark.parametrize("decoders", range(1, 5))
def test_each_byte_is_dealt_once(trainers: int, decoders: int) -> None:
    rng = Random(trainers * 10 + decoders)
    for total, largest in [(1, 1), (3, 100), *((rng.randrange(1, 999), rng.randrange(1, 99)) for _ in range(20))]:
        turns = deal(total, trainers, decoders, largest)
        pieces = [*chain(*turns)]
        assert sorted(chain(*(range(p.start, p.stop) for p in pieces))) == [*range(total)]
        assert all(0 < p.stop - p.start <= largest for p in pieces)
        assert {p.receiver for p in pieces} <= {*range(decoders)}
        parts = [sum(p.stop - p.start for p in pieces if p.sender == i) for i in range(trainers)]
        assert sum(parts) == total and max(parts) - min(parts) <= 1
        targets = [{p.receiver for p in pieces if p.sender == i} for i in range(trainers)]
        assert all(len(target) <= 1 for target in targets), "to one rank each"
        for turn in turns:
            assert len({p.sender for p in turn}) == len(turn), "all send side by side"


def check_weights_arrive(world: World, trainers: int) -> None:
    crossed: list[int] = []
    send = dist.isend
    pools, expected = make_pools(world, trainers, Clock()), Odd(1)
    size = sum(w.nbytes for w in expected.parameters())
    batches = dist.batch_isend_irecv
    note = lambda ops: crossed.extend(op.tensor.nbytes for op in ops if op.op is send) or batches(ops)  # noqa: E731
    dist.batch_isend_irecv = note
    for parallel.BUCKET_BYTES in (9, 64, 2**20):
        for releases in (False, True):
            model = Odd(1 if pools.trains else 2 + world.rank)
            views = [weight.data_ptr() for weight in model.parameters()]
            assert (model.bits() == expected.bits()) == pools.trains
            crossed.clear()
            away = OnHost(model.parameters()) if releases and not pools.trains else OnHost(())
            assert pools.publish(model, f"of {world.rank}") == "of 0"
            assert model.bits() == expected.bits()
            if releases and not pools.trains:
                assert not any(weight.untyped_storage().nbytes() for weight in model.parameters())
            away.bring_back()
            assert model.bits() == expected.bits() and model.head is model.weights[4]
            if not releases:
                assert [weight.data_ptr() for weight in model.parameters()] == views  # in place
            assert sum(parallel.gather_objects(world, sum(crossed))) == size
            assert pools.synced == {"sync_bytes": size, "model_bytes": size}
    dist.batch_isend_irecv = batches


@pytest.mark.parametrize(
    "trainers, decoders",
    [
        thorough(1, 1),
        thorough(2, 1),
        thorough(1, 2),
        (2, 2),
    ],
)
def test_weights_cross_once(run_ranks, trainers: int, decoders: int) -> None:
    run_ranks(trainers + decoders, check_weights_arrive, trainers)


def test_copies_on_the_host_are_found_only_while_they_are_away() -> None:
    whole = torch.arange(12.0).bfloat16().view(3, 4)
    part = whole[1:].T  # a view
    assert data_of(part) is part
    away = OnHost([part])
    assert (
        part.untyped_storage().nbytes() == 0 and data_of(part).tolist() == torch.arange(4.0, 12).view(2, 4).T.tolist()
    )
    data_of(whole)[2, 3] = 99
    away.bring_back()
    assert data_of(part) is part and part[3, 1] == 99 and whole[0].tolist() == [0, 1, 2, 3]
