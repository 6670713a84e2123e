"""Mean KL and task accuracy of both models, ratio by ratio: the reference's from ../ranking and reference-half.csv.

python experiments/fine-grained/beside.py
python experiments/fine-grained/beside.py --collect RUNS/all/report.csv   # first takes over the reference's half
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "ranking"))
from conclude import RATIOS, interval, keep, read, values_of  # noqa: E402 (a folder of scripts, no package)

METHODS = ("frequency", "reap", "reap_l2", "hope_norms_co", "hope_norms_all", "hope_outputs_all")
SHOWN = ("p06", "p12", "p25", "p50")
KL, TASK = "fidelity/kl/mean", "task/accuracy/agent"


def collect(report: Path) -> None:
    """reference-half.csv: the rows of a grid's report.csv that prune half."""
    rows = [row for row in read(report) if row["run"].rsplit("-", 2)[1] == "p50" and row["status"] == "done"]
    keep(rows, HERE / "reference-half.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="REPORT", help="report.csv of all.yaml run on the reference")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect)
    fine = read(HERE / "all.csv")
    reference = read(HERE.parent / "ranking" / "all.csv") + read(HERE / "reference-half.csv")
    print("| method | model | " + " | ".join(RATIOS[ratio] for ratio in SHOWN) + " |")
    print("|---" * (2 + len(SHOWN)) + "|")
    for method in METHODS:
        for name, rows in (("reference", reference), ("fine-grained", fine)):
            cells = []
            for ratio in SHOWN:
                middle, half = interval(list(values_of(rows, ratio, KL)[method].values()))
                cells.append(f"{middle:.3f} ± {half:.3f}, {mean(values_of(rows, ratio, TASK)[method].values()):.2f}")
            print(f"| {method} | {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
