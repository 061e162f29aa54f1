"""Every page has the holders that it should have, dense or shared, through thousands of takes and releases."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from engine.cpu import BatchedPages
from engine.pages import Pages, compact, pages_needed


@dataclass(eq=False)
class Holder:
    row: int = -1
    pages: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)  # what the holder believes to stand on its pages


def check(pages: Pages, holders: list[Holder], memory: dict[int, str]) -> None:
    users = Counter(page for holder in holders for page in holder.pages)
    assert pages.used == len(users) and pages.free == pages.size - len(users)
    for holder in holders:
        assert [memory[page] for page in holder.pages] == holder.content
    if isinstance(pages, BatchedPages):
        assert users == Counter(range(pages.used))
        for holder in holders:
            assert all(pages.holder[page] is holder for page in holder.pages)
            assert (pages.row[holder.pages] == holder.row).all()
            assert pages.start[holder.pages].tolist() == [i * pages.page_size for i in range(len(holder.pages))]
    else:
        assert all(pages.users[page] == count for page, count in users.items())
        assert sorted([*users, *pages.unused]) == list(range(pages.size))


@pytest.mark.parametrize("kind", [Pages, BatchedPages])
@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lost_given_twice_or_overwritten(kind: type[Pages], seed: int) -> None:
    rng = Random(seed)
    pages, memory, holders, written = kind(rng.randint(1, 40), 4), {}, [], 0
    for _ in range(600):
        operation = rng.choice(("new", "take", "take", "share", "seat", "release"))
        if operation == "new":
            holders.append(Holder(row=rng.randint(-1, 9)))
        elif operation == "take" and holders and pages.free:
            holder, written = rng.choice(holders), written + 1
            page = pages.take(holder)
            memory[page] = f"text {written}"
            holder.content.append(memory[page])
        elif operation == "share" and holders and pages.shares:
            donor, holder = rng.choice(holders), Holder()
            for page in donor.pages[: rng.randint(0, 3)]:
                pages.share(holder, page)
            holder.content = donor.content[: len(holder.pages)]
            holders.append(holder)
        elif operation == "seat" and holders:
            holder = rng.choice(holders)
            holder.row = rng.randint(0, 9)
            pages.seat(holder, holder.row)
        elif operation == "release":
            gone = rng.sample(holders, min(len(holders), rng.randint(0, 3)))
            holders = [holder for holder in holders if holder not in gone]
            moves = pages.release(gone)
            assert not pages.shares or not moves
            for move in moves:
                memory[move.target] = memory[move.source]
            assert not any(holder.pages for holder in gone)
        check(pages, holders, memory)
    assert written > 15
    pages.release(holders)
    assert pages.used == 0 and pages.free == pages.size


def test_needed_rounds_up() -> None:
    assert [pages_needed(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_compact_closes_every_hole_and_no_move_feeds_another() -> None:
    rng = Random(0)
    for _ in range(2000):
        used = rng.randint(0, 24)
        freed = rng.sample(range(used), rng.randint(0, used))
        moves = compact(list(freed), used)
        sources, targets = [m[0] for m in moves], [m[1] for m in moves]
        assert not set(sources) & set(targets) and not set(sources) & set(freed) and set(targets) <= set(freed)
        kept = set(range(used)) - set(freed) - set(sources) | set(targets)
        assert kept == set(range(used - len(freed)))
        assert len(moves) == sum(i < used - len(freed) for i in freed)  # no page is copied in vain
