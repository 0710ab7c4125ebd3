"""Does the hint do it? The demo's task under several objectives and controls, each with several seeds.

    python benchmarks/arms.py --seeds 1 2 3

Every run is the demo (`recipes/configs/demo.yaml`) with one thing changed; a run that is already in the folder is not
run again, so the script can be stopped and gone on with. Empty the folder after a change of the code. The figure of a
run is the share of 32 held-out replies, two to each question, that satisfy the user after training. Before training it
is the same for all arms but for the draw of the replies.

The last line is JSON: each arm's mean and its runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from trl_openclaw.cores import available_cores

ROOT = Path(__file__).parents[1]

ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "sampled_token": ("opd", {}),
    "topk_surrogate": ("opd", {"opd_loss": "topk_surrogate"}),
    "random_hint": ("opd", {"control": "random_hint"}),
    "raw_next_state": ("opd", {"control": "raw_next_state"}),
    "rl_only": ("rl", {}),
    "topk_reverse_kl": ("opd", {"opd_loss": "topk_reverse_kl"}),
    "full_divergence": ("opd", {"opd_loss": "full_divergence"}),
    "negative_advantage": ("opd", {"control": "negative_advantage"}),
}
"""Recipe and settings of each arm. The teacher without the hint is no arm: with a frozen teacher it is the student."""


def run_folder(arm: str, seed: int, steps: int, folder: Path) -> Path:
    """Where a run's report goes."""
    return folder / f"{arm}-{seed}-{steps}"


def recipe_command(arm: str, seed: int, steps: int, folder: Path) -> list[str]:
    """The recipe of an arm and its arguments."""
    recipe, settings = ARMS[arm]
    options = {
        "config": "recipes/configs/demo.yaml",
        "seed": str(seed),
        "max_steps": str(steps),
        "eval_steps": str(steps),
        "num_generations_eval": "2",
        "report_dir": str(run_folder(arm, seed, steps, folder)),
        "output_dir": str(folder / f"checkpoint-{arm}-{seed}"),
        **settings,
    }
    return [f"recipes/{recipe}.py", *(part for name, value in options.items() for part in (f"--{name}", value))]


def run(arm: str, seed: int, steps: int, folder: Path) -> dict:
    """One run's summary, from the folder if it is there."""
    summary = run_folder(arm, seed, steps, folder) / "summary.json"
    if not summary.exists():
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/single.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.setdefault("OMP_NUM_THREADS", str(available_cores()))
        subprocess.run([*launch, *recipe_command(arm, seed, steps, folder)], check=True, cwd=ROOT, env=environment)
    return json.loads(summary.read_text(encoding="utf-8"))


def main() -> None:
    """Run all arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/arms")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Seed by seed, so that a comparison is there early.
    summaries = {(arm, seed): run(arm, seed, args.steps, folder) for seed in args.seeds for arm in args.arms}
    satisfied = {arm: [summaries[arm, seed]["after"]["satisfied"] for seed in args.seeds] for arm in args.arms}
    before = statistics.mean(summary["before"]["satisfied"] for summary in summaries.values())
    print(f"\n{'arm':20} {'mean':>5}   runs      (before training: {before:.2f})")
    for arm, values in satisfied.items():
        print(f"{arm:20} {statistics.mean(values):5.2f}   {'  '.join(f'{value:.2f}' for value in values)}")
    print(json.dumps({arm: {"mean": round(statistics.mean(v), 3), "runs": v} for arm, v in satisfied.items()}))


if __name__ == "__main__":
    main()
