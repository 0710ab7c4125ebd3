"""Everything private that this package needs of TRL, in one place."""

from trl.kernels import chunked_divergence, chunked_logprob
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, get_config_model_id, pad, use_adapter
from trl.trainer.utils import maybe_gather_lm_head_ctx as gathered

from .forward import completion_positions_only
from .generation import Rollout, as_rewards_see, reward_columns
from .models import prepare_scoring_model, use_small_tiles
from .seams import SIGNATURES, UNREWARDED_WARNING, SeamGRPOTrainer
from .suffixes import ChatSuffixes

__all__ = [
    "SIGNATURES",
    "UNREWARDED_WARNING",
    "ChatSuffixes",
    "ChunkedDivergenceFunction",
    "Rollout",
    "SeamGRPOTrainer",
    "add_fused_lm_head",
    "as_rewards_see",
    "chunked_divergence",
    "chunked_logprob",
    "completion_positions_only",
    "create_model_from_path",
    "disable_gradient_checkpointing",
    "gathered",
    "get_config_model_id",
    "pad",
    "prepare_scoring_model",
    "reward_columns",
    "use_adapter",
    "use_small_tiles",
]
