"""Run `make demo` for several seeds: the table of the README.

python benchmarks/demo.py                   # some minutes on two quiet cores
python benchmarks/demo.py --seeds 0                               # one seed
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import ROOT, header, table, write


def play(seed: int) -> dict[str, Any]:
    """Return the held-out accuracies before and after training, and the seconds by stage."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "fsdptrain", "demo", "--seed", str(seed), "--output-dir", f"{folder}/run"]
        subprocess.run(argv, check=True, cwd=ROOT, stdout=sys.stderr)
        found = json.loads(Path(folder, "run", "summary.json").read_text())
    return {"seed": seed, **found, "total_s": round(sum(found["seconds"].values()), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="path of the report")
    args = parser.parse_args()
    begin = header()
    rows = [play(seed) for seed in args.seeds]
    write(args.json, {**begin, "results": rows})
    print(table([{key: value for key, value in row.items() if key != "seconds"} for row in rows]))


if __name__ == "__main__":
    main()
