"""Who computes what: work spread over ranks and moved between them. Pure functions, the same on every rank."""

from collections.abc import Iterable, Mapping, Sequence

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
    totals = list(held) or [0] * num_ranks
    for i in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        rank = totals.index(min(totals))
        shares[rank].append(i)
        totals[rank] += loads[i]
    return shares


def tail_replicas(live: int, room: int, num_replicas: int) -> int:
    """Return with how many replicas the tail of a round goes on: as few as have room for what is decoded still.

    `room`: sequences that a replica holds to their end, however long they get.
    """
    return min(max(-(-live // room), 1), num_replicas)


class Placement:
    """Which replica decodes which sequence. Every rank keeps a copy, fed with what all ranks know."""

    def __init__(self, num_replicas: int):
        self.replicas = [*range(num_replicas)]  # those that decode, in the order in which they have joined
        self.live: list[dict[SampleId, float]] = [{} for _ in range(num_replicas)]  # expected tokens, newest last

    @property
    def num_replicas(self) -> int:
        return len(self.live)

    @property
    def num_live(self) -> int:
        return sum(map(len, self.live))

    def launch(
        self, ids: Sequence[VisitId], num_responses: int, expected: Sequence[float] = (), spread: bool = False
    ) -> list[list[SampleId]]:
        """Return the responses to `ids` that each replica starts, in their order.

        `expected`, tokens of a response by prompt, balances the replicas; without it, all are like those that run. A
        prompt's responses stay together, since they share its prefill, or are `spread`, which balances long prompts.
        """
        held = [sum(live.values()) for live in self.live]
        expected = expected or [sum(held) / self.num_live if self.num_live else 1.0] * len(ids)
        tokens = {id.sample(r): e for id, e in zip(ids, expected, strict=True) for r in range(num_responses)}
        samples, size = list(tokens), 1 if spread else num_responses
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        shares = assign_by_load([tokens[part[0]] * size for part in parts], len(held), held)
        started = [[id for i in sorted(share) for id in parts[i]] for share in shares]
        for live, ids_here in zip(self.live, started, strict=True):
            live.update({id: tokens[id] for id in ids_here})
        return started

    def deal(self, tokens: Mapping[SampleId, float]) -> list[list[SampleId]]:
        """Return the sequences that each replica continues, as new replicas do; `tokens` so far of each."""
        ids = sorted(tokens)
        shares = assign_by_load([tokens[id] for id in ids], self.num_replicas)
        self.live = [{ids[i]: tokens[ids[i]] for i in share} for share in shares]
        return [list(live) for live in self.live]

    def remove(self, ids: Iterable[SampleId]) -> None:
        gone = set(ids)
        for live in self.live:
            for id in live.keys() & gone:  # the smaller of the two is gone through
                del live[id]

    def handovers(self) -> list[tuple[SampleId, int, int]]:
        """Return moves (sequence, from, to) that level the replicas once one runs dry, else nothing.

        The newest sequences go: they still wait, or have the least to compute again.
        """
        counts = [len(live) for live in self.live]
        if max(counts) - min(counts) < MARGIN or 2 * min(counts) > max(counts):
            return []
        moves = []
        while max(counts) - min(counts) > 1:
            source, target = counts.index(max(counts)), counts.index(min(counts))
            id, expected = self.live[source].popitem()
            self.live[target][id] = expected
            counts[source] -= 1
            counts[target] += 1
            moves.append((id, self.replicas[source], self.replicas[target]))
        return moves

    def join(self, replica: int) -> None:
        """Go on with one replica more, which has nothing to decode yet: `handovers` give it its share."""
        self.replicas.append(replica)
        self.live.append({})

    def shrink(self, num_replicas: int) -> list[tuple[SampleId, int, int]]:
        """Go on with the first replicas only; return the moves (sequence, from, to) that empty the others."""
        moves = []
        for source in range(num_replicas, len(self.live)):
            for id, expected in self.live[source].items():
                target = min(range(num_replicas), key=lambda replica: len(self.live[replica]))
                self.live[target][id] = expected
                moves.append((id, self.replicas[source], self.replicas[target]))
        del self.replicas[num_replicas:], self.live[num_replicas:]
        return moves
