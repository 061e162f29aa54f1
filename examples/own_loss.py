"""A loss of your own: `python examples/own_loss.py --config FILE.toml --loss.name=unclipped`.

It takes what train.py takes. To build it in, put the function and its entry into loss.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import train
from loss import LOSSES, LossConfig, Tokens


def unclipped(t: Tokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Policy gradient weighted by the plain ratio. Returns the loss [T] and which tokens were clipped [T]."""
    ratio = (t.logprobs - t.old_logprobs).exp()
    return -ratio * t.advantages, torch.zeros_like(ratio, dtype=torch.bool)


LOSSES["unclipped"] = unclipped

if __name__ == "__main__":
    sys.exit(train.main(sys.argv[1:], script=__file__))
