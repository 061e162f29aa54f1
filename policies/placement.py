"""Who computes what: work spread over ranks and moved between them. Pure functions, the same on every rank."""

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from heapq import heapify, heapreplace

from core import SampleId, VisitId

GROUP_SIZES = (1, 2, 4, 8)  # of tensor-parallel groups
MARGIN = 8  # sequences; fewer are not worth the recomputation that a move costs


def group_sizes(num_ranks: int, node_size: int) -> list[int]:
    """Return the sizes of tensor-parallel groups whose neighbours always share a machine.

    `node_size` 0, which is unknown, leaves 1: a group that crosses machines would run at the speed of the network.
    """
    return [n for n in GROUP_SIZES if num_ranks % n == 0 and (n == 1 or (node_size and node_size % n == 0))]


def assign_by_load(loads: Sequence[float], num_ranks: int, held: Sequence[float] = ()) -> list[list[int]]:
    """Spread items over ranks: the heaviest first, each to the lightest rank. `held` is what ranks have already."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [(load, rank) for rank, load in enumerate(held or [0] * num_ranks)]  # heap
    heapify(totals)
    for i in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        total, rank = totals[0]
        shares[rank].append(i)
        heapreplace(totals, (total + loads[i], rank))
    return shares


def tail_replicas(live: int, room: int, num_replicas: int) -> int:
    """Return with how many replicas the tail of a round goes on: as few as have room for what is decoded still.

    `room`: sequences that a replica holds to their end, however long they get.
    """
    return min(max(-(-live // room), 1), num_replicas)


def frees(kept: Set[Hashable], awaited: Iterable[Iterable[Hashable]]) -> bool:
    """Return whether another job can begin on workers of a round, if its tail goes on with those `kept`.

    `awaited`: sets of the round's workers of which each would let another job begin.
    """
    return any(kept.isdisjoint(part) for part in awaited)


class Placement:
    """Which replica decodes which sequence. Every rank keeps a copy, fed with what all ranks know."""

    def __init__(self, num_replicas: int):
        self.replicas = [*range(num_replicas)]  # those that decode, in the order in which they have joined
        self.live: list[dict[SampleId, float]] = [{} for _ in range(num_replicas)]  # expected tokens, newest last
        self.place: dict[SampleId, int] = {}  # of each in `live`

    @property
    def num_replicas(self) -> int:
        return len(self.live)

    @property
    def num_live(self) -> int:
        return len(self.place)

    def hold(self, replica: int, expected: Mapping[SampleId, float]) -> None:
        """Note that the replica at this place decodes these sequences, the newest last."""
        self.live[replica].update(expected)
        self.place.update(dict.fromkeys(expected, replica))

    def launch(
        self, ids: Sequence[VisitId], num_responses: int, expected: Sequence[float] = (), spread: bool = False
    ) -> list[list[SampleId]]:
        """Return the responses to `ids` that each replica starts, in their order.

        `expected`, tokens of a response by prompt, balances the replicas; without it, all are like those that run. A
        prompt's responses stay together, since they share its prefill, or are `spread`, which balances long prompts.
        """
        if not ids:
            return [[] for _ in self.live]
        held = [sum(live.values()) for live in self.live]
        expected = expected or [sum(held) / self.num_live if self.num_live else 1.0] * len(ids)
        tokens = {id.sample(r): e for id, e in zip(ids, expected, strict=True) for r in range(num_responses)}
        samples, size = list(tokens), 1 if spread else num_responses
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        shares = assign_by_load([tokens[part[0]] * size for part in parts], len(held), held)
        started = [[id for i in sorted(share) for id in parts[i]] for share in shares]
        for replica, ids_here in enumerate(started):
            self.hold(replica, {id: tokens[id] for id in ids_here})
        return started

    def deal(self, tokens: Mapping[SampleId, float]) -> list[list[SampleId]]:
        """Return the sequences that each replica continues, as new replicas do; `tokens` so far of each."""
        ids = sorted(tokens)
        shares = assign_by_load([tokens[id] for id in ids], self.num_replicas)
        self.live = [{} for _ in shares]
        for replica, share in enumerate(shares):
            self.hold(replica, {ids[i]: tokens[ids[i]] for i in share})
        return [list(live) for live in self.live]

    def by_replica(self, ids: Iterable[SampleId]) -> dict[int, set[SampleId]]:
        """Return those of `ids` that are decoded, by the place of their replica."""
        found: dict[int, set[SampleId]] = {}
        for id in ids:
            if id in self.place:
                found.setdefault(self.place[id], set()).add(id)
        return found

    def remove(self, ids: Iterable[SampleId]) -> None:
        for id in ids:
            if id in self.place:
                del self.live[self.place.pop(id)][id]

    def handovers(self) -> list[tuple[SampleId, int, int]]:
        """Return moves (sequence, from, to) that level the replicas, once one has MARGIN fewer than another and at most
        half of its sequences; else nothing.

        The newest sequences go: they still wait, or have the least to compute again.
        """
        least = [(len(live), replica) for replica, live in enumerate(self.live)]  # heaps: who gives never takes
        most = [(-count, replica) for count, replica in least]
        low, high = min(least)[0], -min(most)[0]
        if high - low < MARGIN or 2 * low > high:
            return []
        heapify(least)
        heapify(most)
        moves = []
        while -most[0][0] - least[0][0] > 1:
            (negative, source), (count, target) = most[0], least[0]
            moves.append(self._move(next(reversed(self.live[source])), target))
            heapreplace(most, (negative + 1, source))
            heapreplace(least, (count + 1, target))
        return moves

    def _move(self, id: SampleId, target: int) -> tuple[SampleId, int, int]:
        source = self.place[id]
        self.hold(target, {id: self.live[source].pop(id)})
        return id, self.replicas[source], self.replicas[target]

    def join(self, replica: int) -> None:
        """Go on with one replica more, which has nothing to decode yet: `handovers` give it its share."""
        self.replicas.append(replica)
        self.live.append({})

    def shrink(self, num_replicas: int) -> list[tuple[SampleId, int, int]]:
        """Go on with the first replicas only; return the moves (sequence, from, to) that empty the others."""
        counts = [(len(live), replica) for replica, live in enumerate(self.live[:num_replicas])]
        heapify(counts)
        moves = []
        for id in [id for live in self.live[num_replicas:] for id in live]:
            count, target = counts[0]
            moves.append(self._move(id, target))
            heapreplace(counts, (count + 1, target))
        del self.replicas[num_replicas:], self.live[num_replicas:]
        return moves
