"""Train chat models on what happens after they speak, inside TRL's own trainer.

Every public name can be imported from here. Each is looked up when it is first used, so importing this package costs
next to nothing until a trainer is touched, and a piece that is used alone brings only its own dependencies.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Public name -> the module that defines it. The TYPE_CHECKING block below says the same to type checkers.
_MODULES = {
    # Values
    "Feedback": "trl_openclaw.types",
    "NextState": "trl_openclaw.types",
    "ToolResult": "trl_openclaw.types",
    "Turn": "trl_openclaw.types",
    "Verdict": "trl_openclaw.types",
    "Vote": "trl_openclaw.types",
    # Judges
    "ColocatedJudge": "trl_openclaw.judges",
    "Judge": "trl_openclaw.judges",
    "LLMJudge": "trl_openclaw.judges",
    "LocalJudge": "trl_openclaw.judges",
    "OutcomeJudge": "trl_openclaw.judges",
    "RuleJudge": "trl_openclaw.judges",
    # Next states
    "NextStateProvider": "trl_openclaw.next_states",
    "UserSimulator": "trl_openclaw.next_states",
    "Persona": "trl_openclaw.next_states",
    "PERSONAS": "trl_openclaw.next_states",
    "make_persona": "trl_openclaw.next_states",
    "FunctionNextState": "trl_openclaw.next_states",
    # Teachers
    "ServerTeacher": "trl_openclaw.teachers",
    # Chat clients
    "ChatClient": "trl_openclaw.chat",
    "LocalChat": "trl_openclaw.local_chat",
    # Environments and conversations for agents
    "CodeEnvironment": "trl_openclaw.environments",
    "ShellEnvironment": "trl_openclaw.environments",
    "wrap_environment": "trl_openclaw.environments",
    "ConversationRollout": "trl_openclaw.environments",
    # Pieces to use alone
    "insert_hint": "trl_openclaw.hints",
    "collect_feedback": "trl_openclaw.feedback",
    "HindsightReward": "trl_openclaw.rewards",
    # Trainers
    "OPDConfig": "trl_openclaw.trainer",
    "OPDTrainer": "trl_openclaw.trainer",
    "CombineConfig": "trl_openclaw.trainer",
    "CombineTrainer": "trl_openclaw.trainer",
}

__all__ = [
    "Feedback",
    "NextState",
    "ToolResult",
    "Turn",
    "Verdict",
    "Vote",
    "ColocatedJudge",
    "Judge",
    "LLMJudge",
    "LocalJudge",
    "OutcomeJudge",
    "RuleJudge",
    "NextStateProvider",
    "UserSimulator",
    "Persona",
    "PERSONAS",
    "make_persona",
    "FunctionNextState",
    "ServerTeacher",
    "ChatClient",
    "LocalChat",
    "CodeEnvironment",
    "ShellEnvironment",
    "wrap_environment",
    "ConversationRollout",
    "insert_hint",
    "collect_feedback",
    "HindsightReward",
    "OPDConfig",
    "OPDTrainer",
    "CombineConfig",
    "CombineTrainer",
    "__version__",
]

if TYPE_CHECKING:
    from trl_openclaw.chat import ChatClient
    from trl_openclaw.environments import CodeEnvironment, ConversationRollout, ShellEnvironment, wrap_environment
    from trl_openclaw.feedback import collect_feedback
    from trl_openclaw.hints import insert_hint
    from trl_openclaw.judges import ColocatedJudge, Judge, LLMJudge, LocalJudge, OutcomeJudge, RuleJudge
    from trl_openclaw.local_chat import LocalChat
    from trl_openclaw.next_states import (
        PERSONAS,
        FunctionNextState,
        NextStateProvider,
        Persona,
        UserSimulator,
        make_persona,
    )
    from trl_openclaw.rewards import HindsightReward
    from trl_openclaw.teachers import ServerTeacher
    from trl_openclaw.trainer import CombineConfig, CombineTrainer, OPDConfig, OPDTrainer
    from trl_openclaw.types import Feedback, NextState, ToolResult, Turn, Verdict, Vote


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
