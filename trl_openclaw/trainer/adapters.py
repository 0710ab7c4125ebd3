"""What an adapter in training must be, whoever the teacher is."""

import warnings

from .._trl import SeamGRPOTrainer
from .opd_config import OPDConfig


def check_adapter(trainer: SeamGRPOTrainer) -> None:
    """Refuse a PEFT adapter that would not learn, or not be found again in what is saved; warn about its learning rate.

    Raises:
        ValueError: Saying what to use instead.
    """
    args, head = trainer.args, trainer.model.get_output_embeddings()
    if not (hasattr(head, "weight") and hasattr(head, "bias")):
        raise ValueError(
            "`trainable_token_indices` wraps the LM head of a model that shares it with the embeddings, and TRL reads "
            "the head's weight past that wrapper. Use `modules_to_save=['embed_tokens', 'lm_head']`, or leave it out."
        )
    start = getattr(trainer.model.active_peft_config, "init_lora_weights", True)
    if str(start).startswith("pissa_niter"):
        raise ValueError(
            f"`init_lora_weights={start!r}` takes a random part out of the base weights, another one when the saved "
            "adapter is loaded, which then fits no model. Use `init_lora_weights='pissa'`."
        )
    if args.learning_rate == OPDConfig.learning_rate:
        warnings.warn(
            f"An adapter is trained with the default `learning_rate={args.learning_rate:g}`, which is meant for full "
            "weights. LoRA usually wants about ten times as much.",
            UserWarning,
            stacklevel=5,
        )
