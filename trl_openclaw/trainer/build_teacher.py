"""Builds the teacher, and the reference, that a trainer's arguments ask for."""

from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedTokenizerBase

from .._trl import SeamGRPOTrainer, prepare_scoring_model
from ..scoring import TokenScorer
from ..teachers import (
    TEACHERS,
    AdapterOffTeacher,
    ExternalTeacher,
    FrozenTeacher,
    InitialWeights,
    LocalTeacher,
    Teacher,
    check_same_vocabulary,
    load_beside,
    max_model_length,
)
from .opd_config import OPDConfig

TeacherModel: TypeAlias = str | nn.Module | Teacher


def choose_teacher_model(model: Any, teacher_model: TeacherModel | None, args: OPDConfig) -> TeacherModel | None:
    """The external teacher that the argument or the configuration names, or `None` for a self-teacher.

    Raises:
        TypeError: If it is nothing that could score.
        ValueError: If two teachers are named, or the policy is named as its own external teacher.
    """
    if teacher_model is None:
        return args.teacher_model_name_or_path or args.server_teacher()
    for name in ("teacher_model_name_or_path", "teacher_server_model"):
        if getattr(args, name) is not None:
            raise ValueError(f"`teacher_model` and `{name}` name two teachers. Remove one.")
    if args.teacher != "frozen":
        raise ValueError(f"`teacher={args.teacher!r}` and `teacher_model` name two teachers. Remove one.")
    if teacher_model is model and not isinstance(model, str):
        raise ValueError("`teacher_model` is the policy itself. Use `teacher='frozen'` or `teacher='live'`.")
    if not isinstance(teacher_model, str | nn.Module) and not callable(getattr(teacher_model, "score", None)):
        raise TypeError(
            f"`teacher_model` must be a path as text, a model, or an object with `score(rows) -> TeacherScores`, got "
            f"{teacher_model!r}."
        )
    return teacher_model


def build_teacher(
    trainer: SeamGRPOTrainer,
    scorer: TokenScorer,
    teacher_model: TeacherModel | None,
    teacher_processing_class: PreTrainedTokenizerBase | None,
    initial: InitialWeights,
) -> Teacher:
    """Make the teacher, after TRL's own set-up.

    Args:
        trainer: The trainer.
        scorer: Runs the teacher's forward passes.
        teacher_model: An external teacher: path, model, or a finished object with `score`. `None` for a self-teacher.
        teacher_processing_class: The external teacher's tokenizer, if it is not beside its weights.
        initial: What is left of the policy before TRL touched it.

    Raises:
        VocabularyMismatchError: If an external teacher has another vocabulary.
    """
    if teacher_model is None:
        return TEACHERS[trainer.args.teacher].build(trainer, scorer, initial)
    if not isinstance(teacher_model, str | nn.Module):
        return teacher_model
    return _external(trainer, scorer, teacher_model, teacher_processing_class)


def build_reference(
    trainer: SeamGRPOTrainer, scorer: TokenScorer, teacher: Teacher, initial: InitialWeights
) -> Teacher | None:
    """What G-OPD sees the teacher from, or `None` where `reward_scale` leaves it out.

    The reference scores the plain prompts. Where its weights are the teacher's, it is the teacher.

    Args:
        trainer: The trainer.
        scorer: Runs the forward passes.
        teacher: The teacher.
        initial: What is left of the policy before TRL touched it.

    Raises:
        VocabularyMismatchError: If another model is the reference and has another vocabulary.
    """
    args = trainer.args
    if args.reward_scale == 1:
        return None
    if args.opd_reference == "unhinted_teacher":
        return teacher
    if not args.uses_initial_reference:
        return _external(trainer, scorer, args.opd_reference, None)
    is_initial = isinstance(teacher, LocalTeacher) and teacher.same_weights_at_start and args.teacher == "frozen"
    if not is_initial:
        return FrozenTeacher.build(trainer, scorer, initial)
    # Without a hint the teacher would be seen from itself, and adds exactly nothing.
    return None if args.control == "unhinted_teacher" else teacher


def is_trl_reference(trainer: SeamGRPOTrainer, reference: Teacher | None) -> bool:
    """Whether a reference has the weights that TRL's own reference pass (`beta`) scores the plain prompts with."""
    if trainer.beta == 0 or not isinstance(reference, LocalTeacher):
        return False
    return isinstance(reference, AdapterOffTeacher) or reference.model is trainer.ref_model


def _external(
    trainer: SeamGRPOTrainer,
    scorer: TokenScorer,
    model: str | nn.Module,
    processing_class: PreTrainedTokenizerBase | None,
) -> ExternalTeacher:
    """Another model, loaded if it is a path, that reads token ids as the student does."""
    if isinstance(model, str):
        # A revision pins the student's repository and means nothing in another one.
        model = load_beside(trainer, model, **{"revision": None, **(trainer.args.teacher_model_init_kwargs or {})})
    check_same_vocabulary(trainer.processing_class, model, processing_class)
    max_length = max_model_length(model)
    return ExternalTeacher(prepare_scoring_model(model, trainer), scorer, max_length=max_length)
