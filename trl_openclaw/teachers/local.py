"""Teachers that run in the training process: the policy itself in some state, or a model beside it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from .._trl import SeamGRPOTrainer, use_adapter
from ..scoring import TeacherRow, TeacherScores, TokenScorer


class LocalTeacher:
    """A model in this process that scores rows, with the student's temperature, precision and LM head.

    Args:
        model: The prepared model that is called; its LM head is fused by TRL.
        scorer: Runs the forward passes.
        same_weights_at_start: Whether its weights are the student's before the first step. The self-test then
            compares this very teacher with the student.
        max_length: The longest prompt plus completion that fits into the model, in tokens.
    """

    def __init__(
        self, model: nn.Module, scorer: TokenScorer, *, same_weights_at_start: bool, max_length: int | None = None
    ):
        self.model = model
        self.scorer = scorer
        self.same_weights_at_start = same_weights_at_start
        self.max_length = max_length

    def score(self, rows: Sequence[TeacherRow]) -> TeacherScores:
        """Score `rows`; see `TokenScorer.score`."""
        with self.weights():
            return self.scorer.score(self.model, rows)

    def weights(self) -> AbstractContextManager:
        """Switches the model to the teacher's weights while it scores."""
        return nullcontext()


class LiveTeacher(LocalTeacher):
    """The policy as it is at this moment, seeing the hint. Drifts: published results agree on that."""

    def __init__(self, trainer: SeamGRPOTrainer, scorer: TokenScorer):
        super().__init__(trainer.model, scorer, same_weights_at_start=True, max_length=max_model_length(trainer.model))


class FrozenTeacher(LocalTeacher):
    """The initial policy. With PEFT it is the policy with its adapter off, without a second copy in memory.

    An adapter that was trained before is part of the initial policy: then a frozen copy of that adapter, TRL's own
    `"ref"`, is switched on instead of the adapter being switched off.

    Args:
        trainer: The trainer, after TRL's own set-up.
        scorer: Runs the forward passes.
        initial_model: The prepared copy of the initial weights, for full tuning; `None` with PEFT.
    """

    def __init__(self, trainer: SeamGRPOTrainer, scorer: TokenScorer, initial_model: nn.Module | None = None):
        model = trainer.model if initial_model is None else initial_model
        super().__init__(model, scorer, same_weights_at_start=True, max_length=max_model_length(trainer.model))
        self._adapter_model = trainer.accelerator.unwrap_model(trainer.model) if initial_model is None else None

    def weights(self) -> AbstractContextManager:
        """PEFT: the initial adapter where there is one, else none. Full tuning: the copy is what it is."""
        if self._adapter_model is None:
            return nullcontext()
        return use_adapter(self._adapter_model, "ref" if "ref" in self._adapter_model.peft_config else None)


class ExternalTeacher(LocalTeacher):
    """Another model, which must share the student's tokenizer (see `check_same_vocabulary`)."""

    def __init__(self, model: nn.Module, scorer: TokenScorer):
        super().__init__(model, scorer, same_weights_at_start=False, max_length=max_model_length(model))


def max_model_length(model: nn.Module) -> int | None:
    """Tokens that fit into the model's window, or `None` where its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
