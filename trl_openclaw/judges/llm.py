"""A judge behind an OpenAI-compatible server."""

from collections.abc import Mapping
from typing import Any, Unpack

from ..chat import ChatClient
from .prompted import PromptedJudge, PromptedOptions


class LLMJudge(PromptedJudge):
    """Asks a model on any OpenAI-compatible server.

    Args:
        model (`str`):
            Name of the model as the server lists it.
        base_url (`str`):
            Address of the API, `/v1` included.
        num_votes (`int`, *optional*, defaults to `3`):
            Independent answers per turn.
        api_key (`str`, *optional*):
            Key. Defaults to the environment's `OPENAI_API_KEY`, else to a placeholder, for servers that need none.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds to wait for a single try.
        max_retries (`int`, *optional*, defaults to `2`):
            Further tries after a failure that may pass.
        max_concurrency (`int`, *optional*, defaults to `64`):
            Requests in flight at once.
        extra_body (`Mapping[str, Any]`, *optional*):
            More fields for each request, such as `{"chat_template_kwargs": {"enable_thinking": False}}`.
        **prompted:
            Further arguments of [`PromptedJudge`].

    Example:
        ```python
        judge = LLMJudge(model="Qwen/Qwen3-8B", base_url="http://localhost:8000/v1")
        verdict = await judge(turn)
        ```
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        num_votes: int = 3,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
        max_concurrency: int = 64,
        extra_body: Mapping[str, Any] | None = None,
        **prompted: Unpack[PromptedOptions],
    ):
        client = ChatClient(
            model,
            base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            max_concurrency=max_concurrency,
            extra_body=extra_body,
        )
        super().__init__(client, num_votes=num_votes, **prompted)
