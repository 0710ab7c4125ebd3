"""Where the crash test kills a learner."""

BATCHES = "trl_openclaw.live.store_batches.Batches"
VERSIONS = "trl_openclaw.live.store_versions.Versions"
LEARNER = "trl_openclaw.live.learner"

POINTS: dict[str, tuple[str, str, int]] = {
    "first batch claimed": (f"{BATCHES}.claim", "after", 1),
    "first step made": (f"{LEARNER}.updates.Updates.on_step_end", "before", 1),
    "first checkpoint marked": (f"{LEARNER}.updates.mark_whole", "after", 1),
    "batch about to be claimed": (f"{BATCHES}.claim", "before", 2),
    "batch claimed": (f"{BATCHES}.claim", "after", 2),
    "weights remembered": (f"{LEARNER}.updates.Updates.on_step_begin", "after", 2),
    "gradients there": (f"{LEARNER}.trainer.LiveTrainer.training_step", "after", 3),
    "step made": (f"{LEARNER}.updates.Updates.on_step_end", "before", 2),
    "token scores kept": (f"{BATCHES}.add_token_scores", "after", 2),
    "adapter being written": ("peft.PeftModel.save_pretrained", "after", 3),  # the second is the checkpoint's
    "adapter written": (f"{LEARNER}.updates.write_adapter", "after", 2),
    "version added": (f"{VERSIONS}.add_version", "after", 2),
    "checked": (f"{VERSIONS}.add_version_event", "after", 2),
    "checkpoint half written": ("transformers.Trainer._save_optimizer_and_scheduler", "before", 2),
    "checkpoint written": (f"{LEARNER}.updates.mark_whole", "before", 2),
    "marker being written": (f"{LEARNER}.checkpoints.Path.replace", "before", 2),
    "checkpoint marked": (f"{LEARNER}.updates.mark_whole", "after", 2),
    "published": (f"{VERSIONS}.publish", "after", 2),
    "batch ended": (f"{BATCHES}.end_batch", "after", 2),
    "update over": (f"{LEARNER}.updates.Updates.on_save", "after", 2),
}
"""By name: what is called, whether the learner is killed before or after that, and at which of its calls."""

REJECTED: dict[str, tuple[str, str, int]] = {
    "about to be rejected": (f"{BATCHES}.end_batch", "before", 2),
    "batch rejected": (f"{BATCHES}.end_batch", "after", 2),
    "version rejected": (f"{VERSIONS}.add_version_event", "after", 3),
    "weights being restored": (f"{LEARNER}.snapshot.load_tensors", "after", 1),
}
"""The same for a second update that fails its checks."""

FEW = (
    "first batch claimed",
    "first checkpoint marked",
    "batch claimed",
    "gradients there",
    "step made",
    "adapter being written",
    "version added",
    "checkpoint half written",
    "checkpoint written",
    "marker being written",
    "checkpoint marked",
    "published",
    "batch ended",
)
"""The points of `POINTS` that are tried each time; the others only with the slow tests."""
