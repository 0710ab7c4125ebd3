"""Environments for tool-calling agents. None runs an agent's program, or a tool's, in the trainer process.

| environment | tools | the next state |
|---|---|---|
| [`CodeEnvironment`] | `run_tests` | the verdict of real unit tests on the agent's code |
| [`ShellEnvironment`] | `run_command` | exit code and output of a command in a scratch directory |
| [`wrap_environment`] | those of another TRL environment | what they return, from a process of their own |

A class is what TRL's `environment_factory` takes. Beside `reset`, `get_reward` and its tools, an environment may have
`next_state`: what followed the last assistant turn when no tool's answer did. A tool may answer with a
[`~trl_openclaw.types.ToolResult`].

[`ConversationRollout`] is no environment but a `rollout_func`: a user, simulated or scripted, answers each turn.

A new environment is one file, and a line in the table below.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public name -> the module that defines it, looked up when it is first used: a sandbox's child process starts here.
_MODULES = {
    "CodeEnvironment": ".code",
    "ConversationRollout": ".conversation",
    "ShellEnvironment": ".shell",
    "wrap_environment": ".wrapped",
    "Limits": ".sandbox",
    "Sandbox": ".sandbox",
    "SandboxResult": ".sandbox",
    "Scratch": ".scratch",
}

__all__ = [
    "CodeEnvironment",
    "ConversationRollout",
    "Limits",
    "Sandbox",
    "SandboxResult",
    "Scratch",
    "ShellEnvironment",
    "wrap_environment",
]

if TYPE_CHECKING:
    from .code import CodeEnvironment
    from .conversation import ConversationRollout
    from .sandbox import Limits, Sandbox, SandboxResult
    from .scratch import Scratch
    from .shell import ShellEnvironment
    from .wrapped import wrap_environment


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
