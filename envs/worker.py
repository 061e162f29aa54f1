"""A worker process of `envs.pool.EnvPool`: it plays the episodes of users' environments."""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # not envs/, where Python starts this file
from envs.pool import Episodes
from process import serving

if __name__ == "__main__":
    serving.serve(lambda: Episodes(sys.argv[1:]).answer)
