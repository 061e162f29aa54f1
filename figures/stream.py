"""One long round, with all ranks decoding to its end and with half of them leaving to train: when each did what.

python figures/stream.py           runs benchmarks/stream.py --quick on 4 ranks (minutes), then draws
python figures/stream.py --draw    draws again from figures/stream.json
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from timeline import draw
from training_runs import keep, kept, stamp

HERE = Path(__file__).parent
DATA = HERE / "stream.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw, from figures/stream.json")
    if not parser.parse_args().draw:
        stamp(quick=False)  # refuses code that no commit has, before the work
        script = HERE.parent / "benchmarks" / "stream.py"
        with TemporaryDirectory() as folder:
            spans = Path(folder) / "spans.json"
            subprocess.run([sys.executable, str(script), "--quick", "--spans", str(spans)], check=True)
            keep(DATA, json.loads(spans.read_text(encoding="utf-8")))
    spans, made = kept(DATA)
    caption = f"python figures/stream.py ({made}): given lengths, 4 ranks of one thread, a step of 16 x 8 samples"
    draw(spans, HERE / "stream.png", caption)


if __name__ == "__main__":
    main()
