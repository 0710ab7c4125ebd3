"""`SeamGRPOTrainer`: TRL's `GRPOTrainer` with its private steps turned into a few named seams.

It changes nothing by itself, except that a completion without a single token no longer brings the run down. The rest of
the package overrides the seams and never a private name, so a new TRL release means reading this package and
`SIGNATURES`, which a contract test holds against the installed TRL.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from trl.models.utils import disable_gradient_checkpointing

from ..dropout import disable_functional_dropout
from ..quantized import keep_unpacked
from ..shared_prefix import PrefixSharing
from ..trajectories import TEMPERATURES, TRAJECTORY_COLUMN
from .batches import exchange_window, keep_prompts_together
from .forward import ObservedForward, shared_prefill
from .generation import Rollout, announced, with_trajectories
from .models import use_small_tiles
from .open_trainer import OpenGRPOTrainer

SIGNATURES: dict[str, tuple[str, ...]] = {
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "_generate": ("self", "prompts"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
        "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
    ),
    "_generate_single_turn": (
        "self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images",
    ),
    "_prepare_inputs": ("self", "generation_batch"),
    "_set_signature_columns_if_needed": ("self",),
    "_tokenize_prompts": ("self", "prompts"),
    "_tool_call_loop": (
        "self", "prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images", "multimodal_fields",
    ),
}  # fmt: skip
"""The private methods of `GRPOTrainer` that are overridden or called here, with their parameters in TRL 1.16."""


UNREWARDED_WARNING = "All reward functions returned None"
"""Part of TRL's warning about a row without any reward."""


class SeamGRPOTrainer(OpenGRPOTrainer):
    """`GRPOTrainer` with the seams that the methods of the first section are."""

    extra_columns: tuple[str, ...] = ()
    """Dataset columns to keep when `remove_unused_columns=True`."""

    adds_token_losses: bool = False
    """Whether `token_losses` is called; it may still have nothing to add."""

    reads_old_policy: bool = False
    """Whether `read_old_policy` is called."""

    announces_completions: bool = False
    """Whether `on_completion` is to be called."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.accelerator.device.type == "cpu":
            use_small_tiles()
        if self.args.disable_dropout:  # TRL switches off `nn.Dropout` only
            disable_functional_dropout(self.model)
        keep_unpacked(self.model)
        self.empty_rows: list[bool] | None = None
        self._sampled_from: list[list[int]] = []
        self._tool_mask: list[list[int]] | None = None
        self._temperatures: list[float] | None = None
        self._awaits_old_policy = False
        shares = getattr(self.args, "prefix_sharing", False)
        self.prefix_sharing = PrefixSharing(self.accelerator) if shares else None
        rollout_func = getattr(self, "rollout_func", None)
        if rollout_func is not None:
            self.rollout_func = self._complete_rollouts(rollout_func)

    # Seams

    def before_sampling(self, inputs: list[dict[str, Any]]) -> None:
        """Called on every rank with the rows of a generation batch, before anything is sampled."""

    def on_completion(self, row: int, completion_ids: list[int]) -> None:
        """Called for a row of this rank that ended, with its ids, while other rows are still being sampled.

        Not for rows that end with the batch or are cut, nor where a completion is more than one call's ids (tools,
        environments, rollout functions) or does not come from transformers' `generate`.
        """

    def before_rewards(self, inputs: list[dict[str, Any]], rollout: Rollout) -> None:
        """Called on every rank once a generation batch is sampled, before TRL waits for the reward functions."""

    def on_rewards(self, rollout: Rollout, rewards_per_func: torch.Tensor) -> None:
        """Called once per generation batch with what this rank sampled, and all ranks' rewards `(world * B, F)`."""

    def batch_over(self) -> None:
        """Called once a generation batch is sampled and has its rewards, or when an error ended it."""

    def extend_batch(self, inputs: list[dict[str, Any]], batch: dict[str, Any]) -> dict[str, Any]:
        """Return the scored generation batch, with whatever the loss will need added to it."""
        return batch

    def token_advantages(self, inputs: dict[str, Any], old_per_token_logps: torch.Tensor) -> torch.Tensor:
        """Return the advantages `(B,)` or `(B, T)` of a micro-batch, given the sampling policy's log-probs `(B, T)`."""
        return inputs["advantages"]

    def on_student(self, inputs: dict[str, Any], per_token_logps: torch.Tensor) -> None:
        """Called in the loss with a micro-batch and the student's log-probs `(B, T)`, before `token_advantages`."""

    def token_losses(
        self, inputs: dict[str, Any], per_token_logps: torch.Tensor, hidden: torch.Tensor, model: nn.Module
    ) -> torch.Tensor | None:
        """Return losses `(B, T)` to add to TRL's loss per token, or `None`. Called inside the student's forward.

        Args:
            inputs: The micro-batch.
            per_token_logps: The student's log-probs `(B, T)`, with gradient.
            hidden: The last hidden states `(B, T, H)` that they were made of.
            model: The unwrapped model, for its LM head.
        """
        raise NotImplementedError

    def read_old_policy(self, per_token_logps: torch.Tensor, hidden: torch.Tensor, model: nn.Module) -> None:
        """Called inside TRL's own pass of the policy over a sampled batch, part by part, where TRL makes one.

        Args:
            per_token_logps: The log-probs `(n, T)` of some rows, in the order of the batch.
            hidden: The last hidden states `(n, T, H)` that they were made of.
            model: The unwrapped model, for its LM head.
        """

    def loss_scale(self, inputs: dict[str, Any]) -> torch.Tensor | float:
        """Return the factor that a micro-batch's loss is multiplied with."""
        return 1.0

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Entered around what takes time in a step: `"generate"`, `"tokenize"`, `"rewards"`, `"student"`."""
        return nullcontext()

    def student_logps(self, batch: dict[str, torch.Tensor], rows: slice) -> torch.Tensor:
        """The student's log-probs `(n, T)` of some rows of a batch, computed just as the loss computes them."""
        ids = torch.cat([batch["prompt_ids"][rows], batch["completion_ids"][rows]], dim=1)
        mask = torch.cat([batch["prompt_mask"][rows], batch["completion_mask"][rows]], dim=1)
        width = batch["completion_ids"].size(1)
        temperatures = batch["row_temperature"][rows] if "row_temperature" in batch else None
        observed = ObservedForward(
            self.model, self.accelerator, width, sharing=self.prefix_sharing, temperatures=temperatures
        )
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(observed, ids, mask, width)[0]

    # TRL's private steps

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        self._signature_columns += [name for name in self.extra_columns if name not in self._signature_columns]

    def _prepare_inputs(self, generation_batch):
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.prefix_sharing is None or not self.prefix_sharing.works_for(self.model):
            return inputs
        if self._buffered_inputs is None or self._buffered_inputs is buffered:
            return inputs
        self._buffered_inputs = keep_prompts_together(self._buffered_inputs, exchange_window(self))
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if not isinstance(model, ObservedForward):
            temperatures = self._temperatures_of_batch()
            model = ObservedForward(
                model, self.accelerator, logits_to_keep, sharing=self.prefix_sharing, temperatures=temperatures
            )
            # The old policy comes first: after it the same module, with another adapter, may be TRL's reference.
            if self._awaits_old_policy:
                model.token_losses = self.read_old_policy
            self._awaits_old_policy = False
        with self.timed("student"):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )

    def _temperatures_of_batch(self) -> torch.Tensor | None:
        """Those of the rows `(B,)` of the batch that was sampled last; `None` where they have the trainer's own."""
        if self._temperatures is None or set(self._temperatures) == {1.0}:
            return None
        return torch.tensor(self._temperatures, device=self.accelerator.device)

    def _generate(self, prompts):
        self.empty_rows = self._temperatures = None
        with self.timed("generate"):
            output = super()._generate(prompts)
        # A rollout function's may be arrays.
        self._sampled_from = [torch.as_tensor(ids).tolist() for ids in output[0]]
        self._tool_mask = None if output[2] is None else [torch.as_tensor(mask).tolist() for mask in output[2]]
        return output

    def _tokenize_prompts(self, prompts):
        with self.timed("tokenize"):
            return super()._tokenize_prompts(prompts)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        stock = not (self.use_vllm or self.use_transformers_continuous_batching or self.args.cache_implementation)
        sharing = self.prefix_sharing if stock else None
        model = self.accelerator.unwrap_model(self.model)
        with shared_prefill(model, sharing), announced(self, images, multimodal_fields):
            completion_ids, logprobs = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, *args, **kwargs
            )
        if self.empty_rows is None:  # later calls continue a tool loop, where TRL allows an empty turn
            completion_ids, logprobs = self._fill_empty(completion_ids, logprobs)
        return completion_ids, logprobs

    def _fill_empty(self, completion_ids, logprobs):
        """Give an empty completion one EOS token, since TRL reads the last id of each; the row is masked later."""
        self.empty_rows = [len(ids) == 0 for ids in completion_ids]
        if any(self.empty_rows):
            completion_ids = [ids or [self.eos_token_ids[0]] for ids in map(list, completion_ids)]
            if logprobs is not None:
                logprobs = [
                    [None] if empty else values for empty, values in zip(self.empty_rows, logprobs, strict=True)
                ]
        return completion_ids, logprobs

    def _complete_rollouts(self, rollout_func: Callable) -> Callable:
        def completed(prompts, trainer):
            output = dict(rollout_func(prompts, trainer))
            if "completion_ids" in output:  # a missing key is TRL's to report
                output["completion_ids"], output["logprobs"] = self._fill_empty(
                    output["completion_ids"], output.get("logprobs")
                )
                if isinstance(output.get("env_mask"), list):
                    output["env_mask"] = [mask if mask is None or len(mask) else [1] for mask in output["env_mask"]]
                output = with_trajectories(output, self.tokenizer)
            self._temperatures = output.pop(TEMPERATURES, None)
            return output

        return completed

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        ends = {*self.eos_token_ids, self.pad_token_id}
        masked = [self.mask_truncated_completions and ids[-1] not in ends for ids in completion_ids_list]
        said = [row.get(TRAJECTORY_COLUMN) or completion for row, completion in zip(inputs, completions, strict=True)]
        # Copies, since reward functions and next states are free to edit what they are shown.
        shown = copy.deepcopy((prompts, said))
        rollout = Rollout(
            shown[0],
            self._sampled_from,
            shown[1],
            completion_ids_list,
            masked,
            self._tool_mask,
            self._temperatures,
        )
        self.before_rewards(inputs, rollout)
        # TRL warns about every row without a reward and prints the row. Such rows are ordinary here and counted in
        # the metrics, and what users wrote does not belong in a log unasked.
        with _silenced("trl.trainer.grpo_trainer", UNREWARDED_WARNING), self.timed("rewards"):
            rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.on_rewards(rollout, rewards_per_func)
        return rewards_per_func

    def _generate_and_score_completions(self, inputs):
        self.before_sampling(inputs)
        self._awaits_old_policy = self.reads_old_policy and self.scores_old_policy
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self.batch_over()
        temperatures = self._temperatures_of_batch()
        if temperatures is not None:
            batch["row_temperature"] = temperatures
        return self.extend_batch(inputs, batch)

    def _compute_loss(self, model, inputs):
        old = inputs.get("old_per_token_logps")

        def set_advantages(per_token_logps: torch.Tensor) -> None:
            self.on_student(inputs, per_token_logps)
            inputs["advantages"] = self.token_advantages(inputs, per_token_logps if old is None else old)

        width = inputs["completion_ids"].size(1)
        observed = ObservedForward(
            model, self.accelerator, width, set_advantages, self.prefix_sharing, inputs.get("row_temperature")
        )
        if self.adds_token_losses:
            observed.token_losses = partial(self.token_losses, inputs)
        loss = super()._compute_loss(observed, inputs)
        if observed.added is not None:
            loss = loss + self._aggregate(observed.added, inputs)
        return loss * self.loss_scale(inputs)

    def _aggregate(self, per_token_loss: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """One number from losses per token `(B, T)`, by the same weights as TRL gives its own for each `loss_type`.

        TRL sums up inside `_compute_loss` and has no hook for it; a contract test holds the two together.
        """
        if self.use_vllm and self.vllm_importance_sampling_correction:
            per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        masked = per_token_loss * mask
        training = self.mode == "train"
        accumulation = self.current_gradient_accumulation_steps if training else 1.0
        if self.loss_type in ("dapo", "cispo"):
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            return masked.sum() / (tokens * accumulation / self.args.steps_per_generation if training else tokens)
        if self.loss_type == "bnpo":
            loss = masked.sum() / mask.sum().clamp(min=1.0)
        elif self.loss_type == "dr_grpo":
            loss = masked.sum() / (len(masked) * self.max_completion_length)
        elif self.loss_type == "luspo":
            loss = masked.sum(-1).mean()
        else:
            loss = (masked.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        return loss / accumulation


@contextmanager
def _silenced(logger_name: str, part: str) -> Iterator[None]:
    """Drop log records that contain `part`; accelerate puts the rank in front."""

    def keep(record: logging.LogRecord) -> bool:
        return part not in record.getMessage()

    logger = logging.getLogger(logger_name)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
