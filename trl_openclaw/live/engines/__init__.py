"""Engines: what samples the replies that the gateway passes on."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from .base import Delta, Engine, EngineRequest

if TYPE_CHECKING:
    from ..gateway.settings import ServeSettings

__all__ = ["ENGINES", "Delta", "Engine", "EngineRequest"]


def _vllm(settings: "ServeSettings") -> Engine:
    from .vllm import VllmEngine

    return VllmEngine(
        settings.model, settings.engine_url, api_key=settings.engine_key, logprobs=settings.engine_logprobs
    )


def _transformers(settings: "ServeSettings") -> Engine:
    from .transformers import TransformersEngine

    return TransformersEngine(settings.model, served_name=settings.served_model_name)


ENGINES: "dict[str, Callable[[ServeSettings], Engine]]" = {"transformers": _transformers, "vllm": _vllm}
"""Engines by the name that the command line takes. What an engine needs is imported when it is made."""
