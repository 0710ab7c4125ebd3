"""Which scenarios of `distributed/two_ranks.py` are run under which config, and what the processes found.

A test that asks for one scenario has all of its config's run, once for all tests: processes take seconds to start.
"""

import json
import subprocess
from contextlib import suppress
from pathlib import Path

from launch_ranks import processes_of, run_under

TRAINED = [
    "by prompt",
    "an adapter by prompt",
    "an adapter and a head by prompt",
    "combine by prompt",
    "combine with an adapter by prompt",
]
"""Distillation alone and with rewards, of all weights, of an adapter, and of a head beside it (`modules_to_save`)."""

TEACHERS = [
    "teacher loaded again",
    "teacher is the reference",
    "another model",
    "another model's path",
    "live teacher, initial reference",
    "topk_surrogate by prompt",
    "full_divergence by prompt",
]
"""The objectives read the teacher's head; a teacher that is the adapter switched off is among `TRAINED`."""

AVERAGES = ["average", "average loaded again", "average of an adapter", "average of a head, too"]
"""Of a model in memory, of one from a path (which ZeRO-3 spreads as it is loaded), and of what LoRA trains."""

UNEVEN = [
    "one rank without hints",
    "uneven lengths",
    "judge broken on one rank",
    "no hints at all",
    "one rank samples equal prompts",
]
"""Rows that differ from process to process."""

SHARING = ["one rank shares", "one rank shares, in whole rows"]

STOPPED = {
    "judge broken everywhere": "8 of 8 turns, for 2 batches in a row",
    "judge unreachable": "127.0.0.1:9",
    "bad prompt in a stream": "`prompt[0]` has the role 'User'",
    "teacher broken on one rank": "`ScriptedTeacher` failed: RuntimeError: down on rank 1",
    "teacher ahead, broken on one rank": "`ScriptedTeacher` failed: RuntimeError: down on rank 1",
}
"""Scenarios in which all processes stop, and what all of them say."""

OF_TWO_COPIES = [
    "combine",
    "lora",
    "reference ahead",
    "reference afterwards",
    "longer conversations on rank zero",
    "more turns on rank zero",
    "scores by rank",
    *STOPPED,
    "alarm",
    "topk_surrogate one rank without hints",
    "full_divergence one rank without hints",
    *SHARING,
    "budget too small on one rank",
    "one rank's rows are longer than the default budget",
    "one rank samples equal prompts, in whole rows",
]
"""What is looked at where each process holds the whole model."""

LIKE_ONE = [*TRAINED, *TEACHERS, *AVERAGES]
"""What several processes train just as one does."""

RUNS = {
    "single": LIKE_ONE,
    "multi_gpu": [*LIKE_ONE, *UNEVEN, *OF_TWO_COPIES],
    "zero1": TRAINED,
    "zero2": [*LIKE_ONE, *SHARING],
    "zero3": [
        *LIKE_ONE,
        *UNEVEN,
        *SHARING,
        "one rank shares an adapter",
        "one rank shares an adapter, in whole rows",
        "one rank shares a whole vocabulary",
        "one rank shares a whole vocabulary, in whole rows",
        "more turns on rank zero",
    ],
    "zero3_offload": TRAINED,
    "fsdp2": [*LIKE_ONE, *UNEVEN],
    "multi_node": TRAINED,
}
"""A config of `accelerate_configs`, and its scenarios in their order."""


class Run:
    """What the processes found under a config, scenario by scenario.

    Args:
        config: One of `RUNS`.
        folder: Where they left it, with other files of theirs.
    """

    def __init__(self, config: str, folder: Path):
        self.config, self.folder = config, folder
        paths = [folder / f"rank{rank}.jsonl" for rank in range(processes_of(config))]
        lines = [path.read_text().split("\n")[:-1] if path.exists() else [] for path in paths]  # whole ones only
        ended = ([json.loads(line) for line in ranks] for ranks in zip(*lines, strict=False))
        self.found = dict(zip(RUNS[config], ended, strict=False))

    def __getitem__(self, scenario: str) -> list[dict]:
        """What each process found in a scenario."""
        assert scenario in RUNS[self.config]
        assert scenario in self.found, f"It did not end.\n{(self.folder / 'stderr0').read_text()[-3000:]}"
        return self.found[scenario]


def run_all(config: str, folder: Path) -> None:
    """Run all scenarios of a config, one after another in the same processes."""
    with suppress(subprocess.TimeoutExpired):  # who asks for a scenario that did not end hears of it
        run_under(config, "two_ranks.py", folder, *RUNS[config])
