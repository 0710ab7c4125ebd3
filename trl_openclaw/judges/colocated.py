"""A judge that is the policy under training, asked through the engine that samples for it."""

from collections.abc import Mapping
from typing import Any, Unpack

from ..engine_chat import EngineChat
from .prompted import PromptedJudge, PromptedOptions


class ColocatedJudge(PromptedJudge):
    """Has the policy judge itself, by the vLLM engine in the trainer's process: no second model, no server.

    It needs `use_vllm=True` with `vllm_mode="colocate"`, on one GPU per engine and without sleep mode. What judges is
    the policy as it was when the batch was sampled, adapter included, so the judge changes as training goes on.

    Args:
        num_votes (`int`, *optional*, defaults to `3`):
            Independent answers per turn.
        max_batch (`int`, *optional*, defaults to `64`):
            Questions answered at once.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Passed to the chat template, such as `{"enable_thinking": False}`.
        **prompted:
            Further arguments of [`PromptedJudge`]. The model is given text only, so `reads_images=True` is refused.
    """

    def __init__(
        self,
        *,
        num_votes: int = 3,
        max_batch: int = 64,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **prompted: Unpack[PromptedOptions],
    ):
        client = EngineChat(max_batch=max_batch, chat_template_kwargs=chat_template_kwargs)
        super().__init__(client, num_votes=num_votes, **prompted)
