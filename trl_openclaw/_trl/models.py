"""Models made ready to score tokens just as TRL's student does."""

from torch import nn
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.kernels import chunked_divergence, chunked_logprob
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

from ..dropout import disable_functional_dropout
from ..quantized import keep_unpacked


def use_small_tiles() -> None:
    """Let TRL's kernels of the LM head work on fewer positions at once, for devices without Triton.

    In plain torch every step over a tile makes a temporary of its size. With TRL's 4,096 positions these are gigabytes
    that no cache holds; with 128 they take a tenth of the memory, and less time. No number changes but for rounding.
    """
    chunked_logprob.TOKEN_CHUNK_SIZE = chunked_divergence.TOKEN_CHUNK_SIZE = 128


def prepare_scoring_model(model: PreTrainedModel, trainer: GRPOTrainer) -> nn.Module:
    """Make a second model score tokens as the student does, and place it the way TRL places its reference model.

    Args:
        model: A causal language model that TRL has not touched yet.
        trainer: Gives temperature, head precision, devices and the distributed engine.

    Returns:
        The frozen, prepared model in evaluation mode.
    """
    model.eval().requires_grad_(False)
    disable_dropout_in_model(model)
    disable_functional_dropout(model)
    keep_unpacked(model)
    add_fused_lm_head(model, temperature=trainer.temperature, cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32)
    model.scoring_temperature = trainer.temperature  # the fused head keeps it to itself; the self-test wants to know
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return prepare_fsdp(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)
