"""A judge that is a transformers model in this process."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from ..local_chat import LocalChat
from .prompted import PromptedJudge, PromptedOptions

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class LocalJudge(PromptedJudge):
    """Asks a transformers model in this process; the policy under training may judge itself.

    Args:
        model (`str` or `torch.nn.Module`):
            Path or name of a model, loaded at first use, or a model in memory, used as it is.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Tokenizer with a chat template. Defaults to the one that belongs to `model`.
        num_votes (`int`, *optional*, defaults to `3`):
            Independent answers per turn.
        max_batch (`int`, *optional*, defaults to `16`):
            Questions answered in one generation.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Passed to the chat template, such as `{"enable_thinking": False}`.
        **prompted:
            Further arguments of [`PromptedJudge`]. The model is given text only, so `reads_images=True` is refused.
    """

    def __init__(
        self,
        model: "str | nn.Module",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        num_votes: int = 3,
        max_batch: int = 16,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **prompted: Unpack[PromptedOptions],
    ):
        client = LocalChat(model, tokenizer, max_batch=max_batch, chat_template_kwargs=chat_template_kwargs)
        super().__init__(client, num_votes=num_votes, **prompted)
