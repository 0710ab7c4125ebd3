"""Builds the teacher that a trainer's configuration asks for."""

import copy
import warnings
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase

from .._trl import SeamGRPOTrainer, create_model_from_path, get_config_model_id, prepare_scoring_model
from ..scoring import TokenScorer
from ..teachers import TEACHERS, ExternalTeacher, FrozenTeacher, LiveTeacher, Teacher, check_same_vocabulary
from .opd_config import OPDConfig


def copy_initial_weights(model: Any, args: OPDConfig, peft_config: Any) -> nn.Module | None:
    """Copy a model instance for the frozen teacher of full tuning, before TRL patches it.

    Returns:
        The copy, or `None` where none is needed: a path is loaded again, PEFT switches its adapter off, and TRL's
        reference model (`beta`) is shared.
    """
    shared = args.beta != 0.0 and not args.sync_ref_model
    if args.teacher != "frozen" or isinstance(model, str) or peft_config is not None or is_peft_model(model) or shared:
        return None
    return copy.deepcopy(model)


def build_teacher(
    trainer: SeamGRPOTrainer,
    scorer: TokenScorer,
    teacher_model: str | nn.Module | Teacher | None,
    teacher_processing_class: PreTrainedTokenizerBase | None,
    initial: nn.Module | None,
    fresh_adapter: bool,
) -> Teacher:
    """Make the teacher, after TRL's own set-up.

    Args:
        trainer: The trainer.
        scorer: Runs the teacher's forward passes.
        teacher_model: An external teacher: path, model, or a finished object with `score`. `None` for a self-teacher.
        teacher_processing_class: The external teacher's tokenizer, if it is not beside its weights.
        initial: The untouched copy of the initial weights, where one was made.
        fresh_adapter: Whether TRL has just made the adapter, so that "adapter off" is the initial policy.

    Raises:
        VocabularyMismatchError: If an external teacher has another vocabulary.
    """
    if teacher_model is not None:
        if not isinstance(teacher_model, str | nn.Module):
            return teacher_model
        model = load_beside(trainer, teacher_model) if isinstance(teacher_model, str) else teacher_model
        check_same_vocabulary(trainer.processing_class, model, teacher_processing_class)
        return ExternalTeacher(prepare_scoring_model(model, trainer), scorer)
    if TEACHERS[trainer.args.teacher] is LiveTeacher:
        warnings.warn(
            "`teacher='live'` learns from itself as it changes. Published results agree that such a teacher drifts; "
            "watch length and entropy, or use `teacher='frozen'`.",
            UserWarning,
            stacklevel=4,
        )
        return LiveTeacher(trainer, scorer)
    if is_peft_model(trainer.model):
        if not fresh_adapter:
            keep_initial_adapter(trainer.model)
        return FrozenTeacher(trainer, scorer)
    if trainer.ref_model is not None and not trainer.args.sync_ref_model:
        return FrozenTeacher(trainer, scorer, trainer.ref_model)
    if initial is None:
        initial = load_beside(trainer, get_config_model_id(trainer.model.config))
    return FrozenTeacher(trainer, scorer, prepare_scoring_model(initial, trainer))


def load_beside(trainer: SeamGRPOTrainer, path: str) -> nn.Module:
    """Load a second model from `path` with the student's loading arguments, precision and attention."""
    kwargs = dict(trainer.args.model_init_kwargs or {})
    if trainer.args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None
    kwargs.setdefault("trust_remote_code", trainer.args.trust_remote_code)
    kwargs.setdefault("dtype", trainer.model.dtype)
    kwargs.setdefault("attn_implementation", trainer.model.config._attn_implementation)
    return create_model_from_path(path, **kwargs)


def keep_initial_adapter(model: Any) -> None:
    """Copy an adapter that came with the policy to `"ref"`, as TRL does for `beta`, so that it can be a teacher."""
    if "ref" in model.peft_config:
        return
    active = model.active_adapter
    model.add_adapter("ref", model.peft_config[active])
    for name, parameter in model.named_parameters():
        if f".{active}." in name:
            reference = model.get_parameter(name.replace(f".{active}.", ".ref."))
            reference.data.copy_(parameter.data)
            reference.requires_grad_(False)
    model.set_adapter(active)
