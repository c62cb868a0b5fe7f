"""The learned cost model on programs it has never seen, from a stored collection.

    python -m bench.learned FOLDER [--seed 0] [--minutes 5] [--model FOLDER] [--json FILE]

FOLDER holds `samples.jsonl` of `autoshard learn`. Trains anew (every run is the same), prints learned, analytic, and
shuffled-label scores on the kernels and steps of held-out programs, how well two sessions of measuring agree, and the
learned and analytic scores on kernels whose visits agree, and on those that no training program has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from rich.console import Console
from rich.progress import Progress

from autoshard.cli_learn import score_table, scores_table
from autoshard.costmodel import (
    SAMPLES,
    LearnOptions,
    agreed_scores,
    learn_model,
    make_samples,
    one_core,
    read_samples,
    unseen_scores,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="The learned cost model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("reading programs", total=None)
        samples = make_samples(
            read_samples(args.folder / SAMPLES), one_core(), lambda i, n: progress.update(task, completed=i, total=n)
        )
        task = progress.add_task("training", total=None)
        options = LearnOptions(seconds=args.minutes * 60, seed=args.seed)
        with tempfile.TemporaryDirectory() as temporary:
            found = learn_model(
                samples,
                args.model or Path(temporary),
                options,
                {"good": len(samples)},
                split_seed=args.seed,
                tell=lambda i, n, *_: progress.update(task, completed=i, total=n),
            )
    console.print(score_table(found))
    agreed = agreed_scores(found)
    console.print("held-out kernels whose two fastest visits agree within 5 %:")
    console.print(scores_table([s for s in agreed if s.kind == "cluster"]))
    unseen = unseen_scores(found)
    console.print("held-out kernels that no training program has:")
    console.print(scores_table([s for s in unseen if s.kind == "cluster"]))
    if args.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        record = {
            "versions": versions,
            "seed": args.seed,
            "machine": found.record["machine"],
            "agreed": [s.to_dict() for s in agreed],
            "unseen": [s.to_dict() for s in unseen],
            "record": dict(found.record),
        }
        args.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
