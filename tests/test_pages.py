"""Every page has the holders that it should have, dense or shared, through thousands of takes and releases."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from engine.pages import Pages, compact


@dataclass(eq=False)
class Holder:
    pages: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)  # what the holder believes to stand on its pages


def check(pages: Pages, holders: list[Holder], content: dict[int, str]) -> None:
    users = Counter(page for holder in holders for page in holder.pages)
    assert pages.used == len(users) and pages.free == pages.size - len(users)
    for holder in holders:
        assert [content[page] for page in holder.pages] == holder.content
    if pages.dense:
        assert users == Counter(range(pages.used))
        for holder in holders:
            assert all(pages.holder[page] is holder for page in holder.pages)
            assert pages.start[holder.pages].tolist() == [i * pages.page_size for i in range(len(holder.pages))]
    else:
        assert all(pages.users[page] == count for page, count in users.items())
        assert sorted([*users, *pages.unused]) == list(range(pages.size))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lost_given_twice_or_overwritten(dense: bool, seed: int) -> None:
    rng = Random(seed)
    pages, content, holders, written = Pages(rng.randint(1, 40), 4, dense), {}, [], 0
    for _ in range(600):
        operation = rng.choice(("new", "take", "take", "share", "release"))
        if operation == "new":
            holders.append(Holder())
        elif operation == "take" and holders and pages.free:
            holder, written = rng.choice(holders), written + 1
            page = pages.take(holder)
            content[page] = f"text {written}"
            holder.content.append(content[page])
        elif operation == "share" and holders and not dense:
            donor, holder = rng.choice(holders), Holder()
            for page in donor.pages[: rng.randint(0, 3)]:
                pages.share(holder, page)
            holder.content = donor.content[: len(holder.pages)]
            holders.append(holder)
        elif operation == "release":
            gone = rng.sample(holders, min(len(holders), rng.randint(0, 3)))
            holders = [holder for holder in holders if holder not in gone]
            moves = pages.release(gone)
            assert dense or not moves
            for source, target in moves:
                content[target] = content[source]
            assert not any(holder.pages for holder in gone)
        check(pages, holders, content)
    assert written > 15
    pages.release(holders)
    assert pages.used == 0 and pages.free == pages.size


def test_needed_rounds_up() -> None:
    assert [Pages(9, 4, True).needed(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


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
