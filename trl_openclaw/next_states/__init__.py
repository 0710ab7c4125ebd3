"""Next states: where what follows a reply comes from.

A provider is anything with `async def __call__(turn, row) -> NextState | None`. Here are three: a scripted `Persona`, a
`UserSimulator` in which a model plays the user, and `FunctionNextState` around a Python function such as a test runner.

A provider answers the completion that was just sampled. Logged conversations cannot do that: the user's logged message
was about another reply, and attached to a fresh completion it would be feedback on words nobody read. They are a source
of rollouts instead, where the logged reply itself is the completion and is trained under its own log-probs.

What is no message becomes text that a judge can read by `terminal_view` (what a command printed) and `gui_view` (an
accessibility tree); `clip` keeps head and tail of a text and says what it cut.

The column `next_state` of a dataset (see `trl_openclaw.feedback`) is for next states that hold whatever the reply, such
as a reference answer that a tool returns.
"""

from .base import NextStateProvider
from .function import FunctionNextState
from .persona import PERSONAS, Persona, make_persona
from .simulator import UserSimulator
from .views import clip, gui_view, terminal_view

__all__ = [
    "PERSONAS",
    "FunctionNextState",
    "NextStateProvider",
    "Persona",
    "UserSimulator",
    "clip",
    "gui_view",
    "make_persona",
    "terminal_view",
]
