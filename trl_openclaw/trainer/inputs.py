"""Checks on what a trainer was given: columns, judges, where hints come from, and what the policy is."""

import copy
import warnings
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .._trl import SeamGRPOTrainer, get_config_model_id
from ..calls import is_async_callable
from ..judges.base import Judge
from ..next_states.base import NextStateProvider
from ..objectives import SAMPLED_TOKEN
from ..teachers import LocalTeacher, Teacher
from .adapters import check_adapter
from .guard import stop_together
from .opd_config import ROW_MEAN_LOSSES, OPDConfig
from .prompts import first_problem


def checked_args(trainer_class: Any, model: Any, args: OPDConfig | None) -> OPDConfig:
    """The configuration, or one with an output folder named after the model.

    Raises:
        TypeError: If it is another trainer's.
    """
    wanted = trainer_class.config_class
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return wanted(f"{name.split('/')[-1]}-{trainer_class._name}")
    if not isinstance(args, wanted):
        raise TypeError(
            f"{trainer_class.__name__} takes a `{wanted.__name__}`, got `{type(args).__name__}`. It has every field of "
            "`GRPOConfig`, so only the class name changes."
        )
    return args


def check_columns(train_dataset: Any, eval_dataset: Any, environment_factory: Any, processing_class: Any) -> None:
    """Refuse a dataset without prompts, naming the columns it has, or with a malformed prompt, naming the row.

    What cannot be read in advance (a stream, a transform) is checked batch by batch; see `check_batch`.

    Raises:
        ValueError: If a dataset lacks the column `prompt` and no environment supplies it, or holds a malformed one.
    """
    if environment_factory is not None:
        return
    images = not isinstance(processing_class, PreTrainedTokenizerBase)  # not known yet where it is still to be loaded
    evals = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    for name, dataset in {"train_dataset": train_dataset, **evals}.items():
        columns = getattr(dataset, "column_names", None)
        if columns is not None and "prompt" not in columns:
            raise ValueError(
                f"`{name}` needs a column `prompt` (text, or a list of messages with `role` and `content`); it has "
                f"{', '.join(map(repr, columns)) or 'no columns'}."
            )
        if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
            batches = dataset.select_columns("prompt").with_format(None).iter(1000)
            problem = first_problem((prompt for batch in batches for prompt in batch["prompt"]), images=images)
            if problem is not None:
                raise ValueError(f"`{name}`, {problem}.")


def check_batch(rows: list[dict[str, Any]], trainer: SeamGRPOTrainer) -> None:
    """Refuse a malformed prompt in a batch that is about to be sampled from. A collective.

    Raises:
        ValueError: On every rank, when one of them has a malformed prompt.
    """
    prompts = [row.get("prompt") for row in rows if "prompt" in row or not trainer.has_environment]
    problem = first_problem(prompts, images=trainer.is_multimodal)
    place = f"The batch of process {trainer.accelerator.process_index}"
    stop_together(problem and f"{place}, {problem}.", trainer.accelerator, ValueError)
    if any(isinstance(prompt, str) for prompt in prompts) and trainer.tokenizer.chat_template is not None:
        warnings.warn(
            "The prompts are plain text, which is continued as it stands, without the model's chat template. For a "
            "chat model give messages: `[{'role': 'user', 'content': ...}]`.",
            UserWarning,
            stacklevel=4,
        )


def check_size(train_dataset: Any, args: OPDConfig) -> None:
    """Refuse a dataset that does not fill one generation batch, since TRL would train 0 steps and say nothing.

    Raises:
        ValueError: If there are fewer rows than prompts in a generation batch.
    """
    prompts = args.generation_batch_size // args.num_generations
    if hasattr(train_dataset, "__len__") and len(train_dataset) < prompts:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} rows, but one generation batch takes {prompts} prompts "
            f"(`generation_batch_size={args.generation_batch_size}`, `num_generations={args.num_generations}`). Add "
            "rows or lower `per_device_train_batch_size`, `gradient_accumulation_steps` or `steps_per_generation`."
        )


def check_feedback(
    judge: Judge | None, next_state: NextStateProvider | None, train_dataset: Any, several_turns: bool
) -> None:
    """Refuse feedback that could never come.

    Args:
        judge: The judge.
        next_state: The next-state provider.
        train_dataset: The dataset, perhaps with next states.
        several_turns: Whether tools, environments or rollouts may answer.

    Raises:
        TypeError: If judge or next state is a plain function.
        ValueError: If there is a judge but nothing that would follow a reply.
    """
    for name, thing, wrapper in (("judge", judge, "RuleJudge"), ("next_state", next_state, "FunctionNextState")):
        if thing is not None and not is_async_callable(thing):
            raise TypeError(f"`{name}` must be an async callable, got {thing!r}. Wrap a function in `{wrapper}`.")
    columns = getattr(train_dataset, "column_names", None)
    open_ended = columns is None or several_turns
    if judge is not None and next_state is None and not open_ended and "next_state" not in (columns or ()):
        raise ValueError(
            "There is a `judge` but nothing for it to read: pass `next_state` (a provider), or a dataset with a column "
            "`next_state`."
        )


def with_judge_column(args: OPDConfig, kwargs: dict[str, Any], num_rewards: int) -> tuple[OPDConfig, dict[str, Any]]:
    """Make room for the judge's score, which is one more reward function, in copies of what the caller gave.

    Args:
        args: The configuration; the judge's score gets the weight 1.
        kwargs: Arguments for `GRPOTrainer`.
        num_rewards: Number of the caller's own reward functions.

    Raises:
        ValueError: If weights or processing classes do not match the caller's reward functions.
    """
    if args.reward_weights is not None:
        if len(args.reward_weights) != num_rewards:
            raise ValueError(
                f"`reward_weights` has {len(args.reward_weights)} entries for {num_rewards} `reward_funcs`. The "
                "judge's score always has weight 1."
            )
        args = copy.copy(args)
        args.reward_weights = [*args.reward_weights, 1.0]
    classes = kwargs.get("reward_processing_classes")
    if classes is not None:
        classes = classes if isinstance(classes, list) else [classes]
        kwargs = {**kwargs, "reward_processing_classes": [*classes, None]}
    return args, kwargs


def check_policy(trainer: SeamGRPOTrainer, needs_teacher: bool) -> None:
    """Refuse a policy that the teacher could not follow, after TRL's own set-up.

    Raises:
        ValueError: If it takes images or has virtual tokens, its adapter cannot be trained or saved, or its router loss
            would be rescaled.
    """
    if needs_teacher and trainer.is_multimodal:
        raise ValueError(
            "The teacher cannot score image prompts yet. Pass the tokenizer instead of the processor as "
            "`processing_class`."
        )
    if needs_teacher and trainer.uses_virtual_tokens:
        raise ValueError(
            "Prompt-learning adapters put virtual tokens before the padding, so a teacher with a longer prompt would "
            "not score the same positions. Use LoRA."
        )
    if trainer.loss_type in ROW_MEAN_LOSSES and trainer.uses_router_aux_loss:
        raise ValueError(
            f"`loss_type={trainer.loss_type!r}` divides by rows; taking rows without a signal out of that divisor "
            "would rescale the router loss as well. Use `loss_type='dapo'` or `router_aux_loss_coef=0`."
        )
    if trainer.takes_several_turns and trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"`multi_objective_aggregation={trainer.multi_objective_aggregation!r}` knows one reward for a completion, "
            "but with tools, environments and rollouts each turn has its own. Use 'sum_then_normalize'."
        )
    if is_peft_model(trainer.model):
        check_adapter(trainer)


def check_objective(trainer: SeamGRPOTrainer, teacher: Teacher, reference: Teacher | None) -> None:
    """Refuse an objective that policy, teacher or reference cannot serve.

    Raises:
        ValueError: If `topk` is larger than the vocabulary, or more than log-probs of sampled tokens is asked of a
            teacher that is not in this process.
    """
    args = trainer.args
    vocabulary = shared_vocabulary(trainer, teacher, reference)
    if args.topk > vocabulary:
        raise ValueError(
            f"`topk={args.topk}` is more than the vocabulary's {vocabulary:,} tokens. Use a smaller `topk`, or "
            "`opd_loss='full_divergence'` for all tokens."
        )
    if args.opd_loss != SAMPLED_TOKEN:
        for name, other in (("teacher", teacher), ("reference", reference)):
            if other is not None and not isinstance(other, LocalTeacher):
                raise ValueError(
                    f"`opd_loss={args.opd_loss!r}` compares more than the sampled token and needs a {name} whose "
                    f"hidden states are at hand, but `{type(other).__name__}` only scores. Use "
                    "`opd_loss='sampled_token'`, or a model in this process."
                )
    if args.opd_loss == "full_divergence" and vocabulary < shared_vocabulary(trainer):
        raise ValueError(
            f"`opd_loss='full_divergence'` compares all {shared_vocabulary(trainer):,} tokens that the policy's head "
            f"has, but the teacher's has {vocabulary:,}. Use an objective over k tokens."
        )


def shared_vocabulary(trainer: SeamGRPOTrainer, *others: Teacher | None) -> int:
    """How many tokens the heads of the policy, and of other models in this process, have in common."""
    models = [trainer.model, *(other.model for other in others if isinstance(other, LocalTeacher))]
    return min(trainer.accelerator.unwrap_model(model).config.get_text_config().vocab_size for model in models)


def check_control(trainer: Any, train_dataset: Any) -> None:
    """Refuse settings about hints where there are none.

    Raises:
        ValueError: If a control arm, or the reference of G-OPD, would change nothing, or has nothing to draw from.
    """
    args, unhinted = trainer.args, trainer.hint_source == "none"
    if unhinted and args.control in ("random_hint", "raw_next_state", "unhinted_teacher"):
        raise ValueError(
            f"`control={args.control!r}` replaces hints, but there are none (`hint_source='none'`). Use a `judge` or a "
            "column `privileged_context`, or leave `control` alone."
        )
    if unhinted and args.opd_reference == "unhinted_teacher":
        raise ValueError(
            "`opd_reference='unhinted_teacher'` is the teacher itself where it reads no hint, so `reward_scale` would "
            "change nothing. Use `opd_reference='initial'`."
        )
    columns = getattr(train_dataset, "column_names", None)
    has_next_states = trainer.next_state is not None or columns is None or "next_state" in columns
    if args.control == "raw_next_state" and not has_next_states:
        raise ValueError(
            "`control='raw_next_state'` takes hints from next states: pass `next_state` (a provider), or a dataset "
            "with a column `next_state`."
        )


def resolve_hint_source(wanted: str, judge: Judge | None, teacher_model: Any, train_dataset: Any) -> str:
    """Where the teacher's extra knowledge comes from: `"judge"`, `"privileged_context"` or `"none"`.

    Args:
        wanted: `OPDConfig.hint_source`.

    Raises:
        ValueError: If what is wanted is not there, if nothing is there, or if `"auto"` would have to choose.
    """
    columns = getattr(train_dataset, "column_names", None)
    has_column = "privileged_context" in (columns or ())
    if wanted == "auto":
        if judge is not None and has_column:
            raise ValueError(
                "There is a `judge` and a `privileged_context` column: set `hint_source` to 'judge' or "
                "'privileged_context'."
            )
        if judge is not None:
            return "judge"
        if has_column:
            return "privileged_context"
        if teacher_model is not None:
            return "none"
        raise ValueError(
            "The teacher would know nothing that the student does not. Pass a `judge` (hints from next states), a "
            "dataset column `privileged_context` (OPCD), or a `teacher_model` (classic on-policy distillation)."
        )
    if wanted == "judge" and judge is None:
        raise ValueError("`hint_source='judge'` needs a `judge`.")
    if wanted == "privileged_context" and columns is not None and not has_column:
        raise ValueError("`hint_source='privileged_context'` needs a dataset column `privileged_context`.")
    if wanted == "none" and teacher_model is None:
        raise ValueError(
            "`hint_source='none'` needs a `teacher_model`: a self-teacher without a hint agrees with the student."
        )
    return wanted
