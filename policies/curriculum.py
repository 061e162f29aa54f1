"""Which prompts rest: those whose responses all earn alike, for ever more epochs. Pure, no torch.

Where all responses to a prompt get one reward, penalties included, group-relative advantages are 0: with rewards of 0
and 1, where its pass rate is 0 or 1. Such a prompt has taught nothing, and will hardly teach more in the next epoch.
But it may later, as the policy changes: so it comes back, and no epoch is left with less than a share of its prompts.
"""

from dataclasses import dataclass, field

LONGEST = 16  # epochs of a rest
RESTING = 0.75  # share of an epoch's prompts, at most, that are skipped


@dataclass(frozen=True)
class Rest:
    """The state of a prompt whose newest visit had equal rewards."""

    streak: int  # such visits in a row
    until: int  # the epoch in which it is drawn again


@dataclass
class Curriculum:
    """Skips the prompts that rest: 1, 2, 4, ... epochs after so many visits in a row with equal rewards.

    All ranks feed their copies with the same visits in the same order, and so skip the same prompts.
    """

    rests: dict[int, Rest] = field(default_factory=dict)  # by prompt

    def observe(self, epoch: int, prompt: int, varies: bool) -> None:
        """Take in a visit that was graded: whether the rewards of its responses differ."""
        before = self.rests.pop(prompt, Rest(0, 0))
        if not varies:
            streak = before.streak + 1
            until = epoch + 1 + min(2 ** (streak - 1), LONGEST)
            self.rests[prompt] = Rest(streak, max(until, before.until))  # a visit that waited may come late

    def skips(self, epoch: int, prompt: int, skipped: int, num_prompts: int) -> bool:
        """Return whether an epoch of so many prompts, of which it has `skipped` some, goes on without this one."""
        return prompt in self.rests and epoch < self.rests[prompt].until and skipped < int(RESTING * num_prompts)

    def resting(self, epoch: int) -> int:
        """Return how many prompts rest in an epoch."""
        return sum(epoch < rest.until for rest in self.rests.values())

    def state_dict(self) -> list[tuple[int, int, int]]:
        return [(prompt, rest.streak, rest.until) for prompt, rest in self.rests.items()]

    def load_state_dict(self, state: list[tuple[int, int, int]]) -> None:
        self.rests = {prompt: Rest(*rest) for prompt, *rest in state}
