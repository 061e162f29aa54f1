"""Weights from the ranks that train to the ranks that decode: one model crosses, in parts. (RollMux, section 6)

    training ranks    0   1   2     have the same weights; each sends its third of the bytes to one decoding rank,
                      |   |   |
    decoding ranks    3   4   3     which broadcasts it inside the decoding pool

The link between the pools may be slow. So nothing crosses it twice, the training ranks send side by side, and pieces
are broadcast while the next ones cross.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import parallel
from engine.host import data_of
from parallel import World


class Piece(NamedTuple):
    """Bytes of the model, whose weights lie one after the other, on their way between the pools."""

    sender: int  # rank in the training pool
    receiver: int  # rank in the decoding pool
    start: int
    stop: int


def deal(num_bytes: int, num_trainers: int, num_decoders: int, largest: int) -> list[list[Piece]]:
    """Return the pieces of each turn: one of each training rank's part. Every byte is in one piece. Pure."""
    edges = [num_bytes * i // num_trainers for i in range(num_trainers + 1)]
    parts = [
        [Piece(i, i % num_decoders, at, min(at + largest, stop)) for at in range(start, stop, largest)]
        for i, (start, stop) in enumerate(itertools.pairwise(edges))
    ]
    return [[piece for piece in turn if piece] for turn in itertools.zip_longest(*parts)]


class WeightSync:
    """One rank's part in the way of weights from the training pool to the decoding pool."""

    def __init__(self, world: World, own: World, num_trainers: int):
        """`world`: all ranks, of which the first `num_trainers` train; `own`: those of this rank's pool."""
        self.world, self.own, self.num_trainers = world, own, num_trainers
        self.trains = world.rank < num_trainers

    def send(self, weights: Iterable[Tensor], progress: Callable[[], None]) -> int:
        """Overwrite the decoding ranks' weights with the training ranks'; return the bytes that this rank has sent.

        Collective over all ranks. Weights that are away from the device (engine.host.OnHost) arrive in host memory. The
        device holds three buckets at most: a turn that arrives, the next one, and a piece that is passed on.
        """
        data = [data_of(weight.detach()).view(-1).view(torch.uint8) for weight in weights]
        num_decoders = self.world.size - self.num_trainers
        largest = parallel.BUCKET_BYTES // -(-self.num_trainers // num_decoders)  # a rank receives so many at a time
        turns, sent = deal(sum(map(len, data)), self.num_trainers, num_decoders, largest), 0
        crossing = self._begin(turns[0], data)
        for turn, later in itertools.zip_longest(turns, turns[1:], fillvalue=()):
            (buckets, works), crossing = crossing, self._begin(later, data)
            for work in works:
                work.wait()
            if self.trains:
                sent += sum(bucket.nbytes for bucket in buckets.values())
            else:
                self._spread(turn, buckets, data)
            progress()
        return sent

    def _begin(self, turn: Sequence[Piece], data: Sequence[Tensor]) -> tuple[dict[Piece, Tensor], list[dist.Work]]:
        """Begin to send or receive this rank's pieces; return their buckets and what to wait for."""
        buckets, ops = dict[Piece, Tensor](), list[dist.P2POp]()
        for piece in turn:
            if self.trains and piece.sender == self.own.rank:
                bucket = torch.cat(_cut(data, piece)).to(self.world.device)
                ops.append(dist.P2POp(dist.isend, bucket, self.num_trainers + piece.receiver, self.world.tensors))
            elif not self.trains and piece.receiver == self.own.rank:
                bucket = self._empty(piece)
                ops.append(dist.P2POp(dist.irecv, bucket, piece.sender, self.world.tensors))
            else:
                continue
            buckets[piece] = bucket
        # Together NCCL sends by the group's connections; alone, each would make a communicator of two ranks.
        return buckets, dist.batch_isend_irecv(ops) if ops else []

    def _spread(self, turn: Sequence[Piece], buckets: dict[Piece, Tensor], data: Sequence[Tensor]) -> None:
        """Broadcast the pieces that have arrived inside the decoding pool, and take them all."""
        for piece in turn:
            bucket = buckets[piece] if piece in buckets else self._empty(piece)
            parallel.broadcast_tensors(self.own, [bucket], piece.receiver)
            places = _cut(data, piece)
            for place, arrived in zip(places, bucket.split([*map(len, places)]), strict=True):
                place.copy_(arrived)

    def _empty(self, piece: Piece) -> Tensor:
        return torch.empty(piece.stop - piece.start, dtype=torch.uint8, device=self.world.device)


def _cut(data: Sequence[Tensor], piece: Piece) -> list[Tensor]:
    """Return the bytes of a piece, as views of the weights that they are in."""
    starts = itertools.accumulate(map(len, data), initial=0)
    return [
        part[max(piece.start - start, 0) : piece.stop - start]
        for start, part in zip(starts, data, strict=False)
        if start < piece.stop and start + len(part) > piece.start
    ]
