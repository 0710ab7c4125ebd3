"""A model plays the user and answers the reply."""

import re
import secrets
from collections.abc import Iterator, Mapping
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from ..calls import runs_in_process
from ..errors import ChatError
from ..hints import unquote
from ..types import Message, NextState, Turn, message_text
from .persona import Persona

if TYPE_CHECKING:
    from ..chat import Chat

_PROMPTS = files(__package__) / "prompts"
_LABEL = re.compile(r"^[*_]{0,2}(?:the )?(?:user|human|person|customer|me|you)[*_]{0,2}\s*:[*_]{0,2}\s*", re.I)
# A model that plays on writes the assistant's next line too, or another one of its own.
_PLAYS_ON = re.compile(r"\n\s*\W{0,3}(?:assistant|ai|bot|user|human|person)\W{0,3}:", re.I)
_CUT_OFF = "\n(The assistant's last reply broke off there, in the middle.)\n"


class UserSimulator:
    """A next-state provider in which a chat model plays the user.

    The model sees what the user would have seen: the user's and the assistant's texts, not system prompts or tool
    traffic. Every message, and the lines around them all, start with a marker drawn afresh for each call: a reply can
    neither end the transcript and give orders nor make up a message of the user's. Whether the reply pleased is left to
    the judge: `NextState.satisfied` stays `None`.

    Args:
        client ([`~trl_openclaw.chat.Chat`]):
            The model, for instance a judge's `client`.
        persona (`str` or [`Persona`]):
            Whom to play and what that person wants, such as `"I dislike bold text and bullet lists."`.
        max_tokens (`int`, *optional*, defaults to `1024`):
            Room for the user's message, thinking included. The prompt asks for a short message; the rest is for models
            that think.
        temperature (`float`, *optional*, defaults to `0.8`):
            Sampling temperature.
    """

    def __init__(self, client: "Chat", persona: str | Persona, *, max_tokens: int = 1024, temperature: float = 0.8):
        self.persona = persona.description if isinstance(persona, Persona) else persona
        if not self.persona.strip():
            raise ValueError("`persona` is empty: say in a sentence what the user wants.")
        self.client = client
        self.max_tokens = max_tokens
        self.temperature = temperature
        self._system = Template((_PROMPTS / "user_system.txt").read_text(encoding="utf-8"))
        self._turn = Template((_PROMPTS / "user_turn.txt").read_text(encoding="utf-8"))

    async def __call__(self, turn: Turn, row: Mapping[str, Any]) -> NextState:
        """The user's next message. Raises `ChatError` when the model gives none."""
        reply = await self.client.complete(
            self.build_messages(turn), max_tokens=self.max_tokens, temperature=self.temperature
        )
        text = spoken_text(reply.text)
        if not text:
            raise ChatError("error", f"the simulated user said nothing; the model wrote {reply.text[:200]!r}")
        return NextState(text)

    @property
    def runs_in_process(self) -> bool:
        """Whether the model is one in this process."""
        return runs_in_process(self.client)

    async def check(self) -> None:
        """Raise `JudgeUnavailableError` when the model cannot be reached."""
        await self.client.check()

    def build_messages(self, turn: Turn) -> list[Message]:
        """The request for one turn, with a fresh marker."""
        marker = secrets.token_hex(8)
        system = self._system.substitute(persona=self.persona.strip(), marker=marker)
        transcript = "\n\n".join(f"[{marker}] {line}" for line in _lines(turn))
        note = _CUT_OFF if turn.truncated else ""
        content = self._turn.substitute(transcript=transcript, marker=marker, note=note)
        return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def _lines(turn: Turn) -> Iterator[str]:
    """The conversation as the user saw it, one text per message, the sampled reply last."""
    if isinstance(turn.prompt, str):
        yield f"Person: {turn.prompt}"
    else:
        names = {"user": "Person", "assistant": "Assistant"}
        for message in turn.prompt:
            text = message_text(message)
            if text and message.get("role") in names:
                yield f"{names[message['role']]}: {text}"
    yield f"Assistant: {turn.reply or '(an empty reply)'}"


def spoken_text(text: str) -> str:
    """The user's message alone: without a name in front, quotation marks around it, or what others say next."""
    text = text.strip()
    while True:
        before = text
        text = _LABEL.sub("", text, count=1).strip()
        text = unquote(_PLAYS_ON.split(text, maxsplit=1)[0])
        if text == before:
            return text
