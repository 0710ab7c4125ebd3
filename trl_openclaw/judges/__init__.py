"""Judges: they read what followed a reply and say how good the reply was, and what would have made it better."""

from .base import Judge
from .colocated import ColocatedJudge
from .llm import LLMJudge
from .local import LocalJudge
from .outcome import OutcomeJudge
from .prompted import PromptedJudge
from .rule import RuleJudge

__all__ = ["ColocatedJudge", "Judge", "LLMJudge", "LocalJudge", "OutcomeJudge", "PromptedJudge", "RuleJudge"]
