"""Teachers that run in the training process: the policy itself in some state, or a model beside it."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn

from .._trl import SeamGRPOTrainer
from ..scoring import TeacherRow, TeacherScores, TokenScorer
from .weights import (
    InitialWeights,
    adapter_changes_nothing_yet,
    adapter_hidden,
    adapter_switched,
    keep_initial_adapter,
    max_model_length,
    trained_outside,
)


class LocalTeacher:
    """A model in this process that scores rows, with the student's temperature, precision and LM head.

    Args:
        model: The prepared model that is called; its LM head is fused by TRL.
        scorer: Runs the forward passes.
        max_length: The longest prompt plus completion that fits into the model, in tokens; `None` if unknown.

    Attributes:
        same_weights_at_start (`bool`): Whether its weights are the student's before the first step. The self-test then
            compares this very teacher with the student.
    """

    same_weights_at_start = False

    def __init__(self, model: nn.Module, scorer: TokenScorer, *, max_length: int | None = None):
        self.model = model
        self.scorer = scorer
        self.max_length = max_length

    def score(self, rows: Sequence[TeacherRow], *, topk: int = 0, keep_states: bool = False) -> TeacherScores:
        """Score `rows`; see `TokenScorer.score`."""
        with self.weights():
            return self.scorer.score(self.model, rows, topk=topk, keep_states=keep_states)

    def weights(self) -> AbstractContextManager:
        """Switches the model to the teacher's weights while it scores."""
        return nullcontext()

    def left_out(self) -> AbstractContextManager:
        """While it lasts, saving the policy leaves out what the teacher keeps inside the policy's model."""
        return nullcontext()

    def save(self, checkpoint: str, writes: bool = True) -> None:
        """Write into a checkpoint's folder what `restore` needs; nothing for weights that do not move. A collective.

        Args:
            checkpoint: The folder.
            writes: Whether this process is one that writes.
        """

    def restore(self, checkpoint: str) -> None:
        """Go on from what was saved in a checkpoint's folder; nothing for weights that do not move."""


class ExternalTeacher(LocalTeacher):
    """Another model, which must share the student's tokenizer (see `check_same_vocabulary`)."""


class PolicyTeacher(LocalTeacher):
    """A teacher that is the policy's own model in some state, looked up anew each time: engines replace it.

    Args:
        trainer: Holds the policy.
        scorer: Runs the forward passes.
    """

    same_weights_at_start = True

    def __init__(self, trainer: SeamGRPOTrainer, scorer: TokenScorer):
        self.trainer = trainer
        self.scorer = scorer
        self.max_length = max_model_length(trainer.model)

    @property
    def model(self) -> nn.Module:
        """The policy as the trainer has it now."""
        return self.trainer.model


class LiveTeacher(PolicyTeacher):
    """The policy as it is at this moment, seeing the hint. Drifts: published results agree on that."""

    @classmethod
    def build(cls, trainer: SeamGRPOTrainer, scorer: TokenScorer, initial: InitialWeights) -> "LiveTeacher":
        """Make the teacher, and warn."""
        warnings.warn(
            "`teacher='live'` learns from itself as it changes. Published results agree that such a teacher drifts; "
            "watch length and entropy, or use `teacher='frozen'`.",
            UserWarning,
            stacklevel=4,
        )
        return cls(trainer, scorer)


class AdapterOffTeacher(PolicyTeacher):
    """The initial policy of PEFT training, without a second copy of the model in memory.

    The adapter is switched off, or, when it did not begin at nothing, a frozen copy of it (`"ref"`) is switched on.
    """

    def weights(self) -> AbstractContextManager:
        """The initial adapter where there is one, else none."""
        return adapter_switched(self._policy, self._initial)

    def left_out(self) -> AbstractContextManager:
        """Saving leaves out the initial adapter, which the policy's model holds beside the one in training."""
        return adapter_hidden(self._policy, self._initial)

    @property
    def _policy(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    @property
    def _initial(self) -> str | None:
        return "ref" if "ref" in self._policy.peft_config else None


class FrozenTeacher(LocalTeacher):
    """The initial policy, seeing the hint: full tuning keeps a copy of the initial weights."""

    same_weights_at_start = True

    @classmethod
    def build(cls, trainer: SeamGRPOTrainer, scorer: TokenScorer, initial: InitialWeights) -> LocalTeacher:
        """Make the teacher in the cheapest way that holds the initial weights.

        PEFT: the policy with its adapter off. Full tuning: TRL's reference model when `beta` needs one anyway, the
        copy that was made of a model in memory, or the policy's checkpoint loaded again.

        Raises:
            ValueError: If PEFT training changes weights that stay when the adapter is off.
        """
        if is_peft_model(trainer.model):
            outside = trained_outside(trainer.model)
            if outside is not None:
                raise ValueError(
                    f"A frozen teacher or initial reference is the policy with its adapter off, but `{outside}` is "
                    "trained outside of the adapter and would change it. Train without `bias`."
                )
            if not (initial.fresh_adapter and adapter_changes_nothing_yet(trainer.model.active_peft_config)):
                keep_initial_adapter(trainer.model)
            return AdapterOffTeacher(trainer, scorer)
        if trainer.ref_model is not None and not trainer.args.sync_ref_model:
            model = trainer.ref_model
        else:
            model = initial.second_model(trainer)
        return cls(model, scorer, max_length=max_model_length(trainer.model))
