"""Where the seconds of an optimizer step go, and how much memory it takes: measured on the way, in every training log.

| metric | seconds of an optimizer step that went to |
|---|---|
| `step_seconds/generate` | sampling completions and decoding them |
| `step_seconds/next_state` | waiting for next states |
| `step_seconds/judge` | waiting for the judge |
| `step_seconds/rewards` | other reward functions, and the rewards of other processes |
| `step_seconds/tokenize` | rendering and tokenizing prompts, with and without hints |
| `step_seconds/teacher` | the teacher's pass, and what is compared right after it |
| `step_seconds/student` | forward, loss and backward, and TRL's own passes over a sampled batch |
| `step_seconds/optimizer` | clipping, the update and what follows it |
| `step_seconds/rest` | everything else, such as the self-test before the first step |
| `step_seconds/total` | all of these: the step from its first micro-batch to its end |

Every moment belongs to one part, so that the parts add up to the total. The micro-batches of a step are summed up, and
a log shows the mean over its steps: where a generation batch serves several steps, its time is shared among them. Next
states and verdicts come in side by side; the wait for them is divided by the time that turns spent in each. What came
in while others were sampled, or while the teacher worked, was not waited for.

`memory/peak_gib` is the peak of the main process since it started: what torch allocated on a CUDA device, otherwise the
resident set.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers import TrainerCallback

from .._trl import SeamGRPOTrainer
from ..rewards import HindsightReward

PARTS = ("generate", "next_state", "judge", "rewards", "tokenize", "teacher", "student", "optimizer", "rest")
"""The parts of a step."""

PEAK_MEMORY = "memory/peak_gib"

GIB = 2**30


def seconds_key(part: str) -> str:
    """The metric of a part's seconds, or of the `"total"`."""
    return f"step_seconds/{part}"


def memory_key(part: str) -> str:
    """The metric of the memory at a part's peak, where a `meter` was set."""
    return f"step_memory_gib/{part}"


def peak_memory(device: torch.device) -> int:
    """Bytes at this process's peak: allocated on a CUDA device, else resident."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()


def peak_resident() -> int:
    """Bytes at the peak of the resident set; on systems that do not tell, what is resident now."""
    status = Path("/proc/self/status")
    # Not `resource.getrusage`: after a fork and exec it still knows the peak of the parent.
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    memory = psutil.Process().memory_info()
    return getattr(memory, "peak_wset", memory.rss)


class StepProfile(TrainerCallback):
    """Adds up the seconds of each part of a step, and hands them to the trainer's log when the step ends.

    Args:
        trainer: A trainer with `record_metric`.
        clock: Tells the time in seconds.

    Attributes:
        meter: Gives the peak of the memory, in bytes, since it was last asked. Where it is set, the peak of each part
            is logged as well. It is not by default, since it has to reset counters that others may read.
    """

    def __init__(self, trainer: Any, clock: Callable[[], float] = time.perf_counter):
        self.trainer, self.clock = trainer, clock
        self.meter: Callable[[], int] | None = None
        self._start()

    def _start(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.memory: dict[str, int] = {}
        self.part, self.since = "rest", self.clock()

    def switch(self, part: str) -> str:
        """Let the time from now on belong to `part`. Returns the part that had it until now."""
        if self.trainer.accelerator.device.type != "cpu":  # kernels are queued, and belong to who asked for them
            torch.accelerator.synchronize()
        before, now = self.part, self.clock()
        self.seconds[before] += now - self.since
        if self.meter is not None:
            self.memory[before] = max(self.memory.get(before, 0), self.meter())
        self.part, self.since = part, now
        return before

    def divide_rewards(self, feedback: HindsightReward) -> None:
        """Give next states and the judge what they took of the reward functions' time."""
        waited = sum(row.next_state_seconds for row in feedback.last)
        judged = sum(row.seconds for row in feedback.last)
        if not waited + judged:
            return
        wall = min(feedback.seconds, self.seconds["rewards"])
        self.seconds["rewards"] -= wall
        self.seconds["next_state"] += wall * waited / (waited + judged)
        self.seconds["judge"] += wall * judged / (waited + judged)

    def on_step_begin(self, args, state, control, **kwargs):
        self._start()
        if self.meter is not None:
            self.meter()

    def on_step_end(self, args, state, control, **kwargs):
        self.switch("rest")
        for part, seconds in self.seconds.items():
            self.trainer.record_metric(seconds_key(part), seconds)
        self.trainer.record_metric(seconds_key("total"), sum(self.seconds.values()))
        for part, memory in self.memory.items():
            self.trainer.record_metric(memory_key(part), memory / GIB)
        self.trainer.record_metric(PEAK_MEMORY, peak_memory(self.trainer.accelerator.device) / GIB)


class ProfiledSteps(SeamGRPOTrainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin for a trainer that enters `timed` around the parts of its steps: the times go to its log."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.profile = StepProfile(self)
        self.add_callback(self.profile)

    def profile_callbacks(self) -> None:
        """Let what callbacks that were added since do at the end of a step, such as moving an average, belong to it."""
        self.pop_callback(self.profile)
        self.add_callback(self.profile)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Let the time of the block belong to `part`, except for parts inside of it."""
        before = self.profile.switch(part)
        try:
            yield
        finally:
            self.profile.switch(before)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, as usual. In training it begins the student's part, which the backward pass ends."""
        if self.model.training:
            self.profile.switch("student")
        return super().compute_loss(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A micro-batch, as usual. After the last one of a step, the time is the optimizer's."""
        loss = super().training_step(*args, **kwargs)
        self.profile.switch("optimizer" if self.accelerator.sync_gradients else "rest")
        return loss
