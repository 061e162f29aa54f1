"""The episodes of a rank: environments answer the sequences whose turn has ended.

Tokens are only appended. What the model has sampled is decoded for the environment, and never encoded again; what the
environment gives is tokenised alone. An episode lives where its sequence is: one that comes from elsewhere, or out of a
checkpoint, is played again from its turns.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import cast

from core import Prompt, Sample, SampleId, Tokenizer, Visit, turns_of
from engine.sequence import Sequence, continued
from environments import EnvConfig, EpisodeError, Played
from envs.chat import Reader
from envs.pool import EnvPool
from reward import RewardConfig

TokenIds = tuple[list[int], int | None]  # of a text, and the token before it
Ended = tuple[Sample, dict]  # of an episode, and what graders get to know of it


@dataclass
class Awaited:
    """A sequence whose environment has not answered yet."""

    visit: Visit
    sequence: Sequence  # before its first token
    turn: Sample | None = None  # what the engine returned; None: the text before the first turn is awaited
    actions: list[str] = field(default_factory=list)  # to be sent first: a replay
    before: list[TokenIds] = field(default_factory=list)  # tokens before each of them: those that the model has read
    since: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class EpisodeStats:
    """What happened since the newest `take_stats`. The ranks of a replica all count the same."""

    failed: int = 0  # episodes that began again
    reply_seconds: list[float] = field(default_factory=list)  # that sequences waited for an answer


class Episodes:
    """Begins and continues the sequences of prompts that name an environment. Ranks of a replica all make the same.

    An episode whose environment fails is played again, so it neither completes its prompt nor counts as 0; so
    is one whose text the model cannot read. Raises WorkerError when environments fail too often in a row.
    """

    def __init__(
        self,
        config: EnvConfig,
        limits: RewardConfig,
        prompts: Iterable[Prompt],
        tokenizer: Tokenizer,
        seed: int,
        chat: Mapping[str, object] | None = None,
        log: Path | None = None,
    ):
        """`chat`: prompts and replies are messages, for a template with these options; `log`: as of the pool."""
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self.names = {prompt.env for prompt in prompts if prompt.env}
        self.reader = Reader(tokenizer, config.max_reply_tokens, chat if self.names else None)
        self.pool = EnvPool(config, limits, self.names, log)
        self.awaited: dict[SampleId, Awaited] = {}
        self.open: set[SampleId] = set()  # the pool has their episodes
        self.ready: set[SampleId] = set()  # those awaited whose turns need no answer
        self.stats = EpisodeStats()

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def begin(self, visit: Visit, sequence: Sequence) -> None:
        """Ask for the text before the first turn of a new sequence."""
        self._begin(Awaited(visit, sequence))

    def end_turn(self, visit: Visit, sequence: Sequence, turn: Sample) -> None:
        """Ask for the answer to a turn. `turn`: the sample that the engine returned."""
        is_open, is_whole = turn.id in self.open, turn.finish_reason == "stop"
        places = turns_of(turn.spans) if is_whole else turns_of(turn.spans)[:-1]  # the environment gets whole turns
        texts = (turn.token_ids[place.start : place.stop] for place in (places[-1:] if is_open else places))
        actions = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
        awaited = self.awaited[turn.id] = Awaited(visit, sequence, turn)
        if not is_open:
            ids, ends = turn.token_ids, [0, *(place.stop for place in places)]
            before = [
                ([*ids[end : place.start]], ids[end - 1] if end else None)
                for end, place in zip(ends, places, strict=False)
            ]
            self._begin(replace(awaited, actions=actions, before=before))
        elif is_whole:
            self.pool.act(turn.id, *actions)
        else:
            self.ready.add(turn.id)

    def poll(self, waits: bool) -> list[Sequence | Ended]:
        """Return sequences that go on, and episodes that have ended. `waits`: until nothing is awaited any more."""
        replies = [self._answer(self.awaited[id], self.pool.played(id)) for id in self.ready]
        self.ready.clear()
        while True:
            for key, played, error in self.pool.wait() if waits else self.pool.poll():
                awaited = self.awaited[id := cast(SampleId, key)]
                if error:
                    self.stats.failed += 1
                    self._play_again(awaited)
                elif awaited.actions:
                    self._go_on(awaited, played)
                else:
                    self.stats.reply_seconds.append(time.perf_counter() - awaited.since)
                    try:
                        replies.append(self._answer(awaited, played))
                    except EpisodeError as unread:
                        self.pool.fail(id, f"environment {awaited.visit.prompt.env} {unread}")
                        self.stats.failed += 1
                        self._play_again(awaited)
            if not waits or not self.awaited:
                return sorted(replies, key=lambda reply: (reply if isinstance(reply, Sequence) else reply[0]).id)

    def take_stats(self) -> EpisodeStats:
        """Return what happened since the last call."""
        taken, self.stats = self.stats, EpisodeStats()
        return taken

    def withdraw(self, ids: Collection[SampleId]) -> list[Awaited]:
        """Forget episodes whose sequences are stopped, or go on elsewhere; return those that waited for an answer."""
        self.pool.forget(self.open.intersection(ids))
        self.open.difference_update(ids)
        self.ready.difference_update(ids)
        return [self.awaited.pop(id) for id in ids if id in self.awaited]

    def _begin(self, awaited: Awaited) -> None:
        visit, id = awaited.visit, awaited.sequence.id
        seed = Random(f"{self.seed} {tuple(visit.id)}").getrandbits(32)  # the same for all responses of a prompt
        self.awaited[id] = awaited
        self.open.add(id)
        self.pool.begin(id, visit.prompt.env, visit.prompt.extra, seed)

    def _go_on(self, awaited: Awaited, played: Played) -> None:
        """Send the next turn of a replay. One that goes another way than the model knows begins from the beginning."""
        (known, last), id = awaited.before.pop(0), awaited.sequence.id
        try:
            is_known = not played.end and self.reader.tokens(played.texts[-1], last) == known
        except EpisodeError:
            is_known = False
        if is_known:
            self.pool.act(id, awaited.actions.pop(0))
            return
        if not played.end:
            self.pool.fail(id, f"environment {awaited.visit.prompt.env}: it is no function of row, seed and turns")
        self.stats.failed += 1
        self.open.discard(id)
        self._begin(Awaited(awaited.visit, awaited.sequence, since=awaited.since))

    def _play_again(self, awaited: Awaited) -> None:
        """Play a failed episode again: from its turns where a run is a function of its seed, else from the beginning.

        So all ranks of a replica go on alike, and an environment that cannot repeat itself has a way on.
        """
        self.open.discard(awaited.sequence.id)
        if awaited.turn and self.config.clock == "steps":
            self.end_turn(awaited.visit, awaited.sequence, awaited.turn)
            self.awaited[awaited.sequence.id].since = awaited.since
        else:
            self._begin(Awaited(awaited.visit, awaited.sequence, since=awaited.since))

    def _answer(self, awaited: Awaited, played: Played) -> Sequence | Ended:
        """Append the reply, or end the episode: also where the reply would leave no room for a turn.

        Raises EpisodeError for a text that cannot be read.
        """
        sequence, turn = awaited.sequence, awaited.turn
        del self.awaited[sequence.id]
        reason = played.end if not turn or turn.finish_reason == "stop" else turn.finish_reason
        if not reason:
            last = turn.token_ids[-1] if turn else None
            reply = self.reader.tokens(played.texts[-1], last, sequence.max_new_tokens)
            if not reply:
                return sequence
            if len(turn.token_ids if turn else ()) + len(reply) < sequence.max_new_tokens:
                return continued(sequence, turn or sequence, reply)
            reason = "length"
        assert turn, "an episode does not end before its first turn"
        self.open.discard(turn.id)
        if not played.end:
            self.pool.forget([turn.id], are_sound=True)
        return replace(turn, finish_reason=reason), {"turn_rewards": [*played.rewards]}
