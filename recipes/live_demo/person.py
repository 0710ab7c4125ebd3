"""The demo's scripted user, who talks through the official OpenAI client and says what is wrong with each reply."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import openai

from trl_openclaw import Persona, Turn

SIDE_TRAFFIC = {"X-Turn-Type": "side"}
"""Headers of a question that shall not be learned from."""


@dataclass
class Session:
    """One question and what came of it.

    Args:
        question: The question.
        replies: The replies, the first of which counts.
        satisfied: Whether each of them pleased.
        turn_ids: The ids under which the client got them.
        errors: What went wrong, as the client was told.
    """

    question: str
    replies: list[str] = field(default_factory=list)
    satisfied: list[bool] = field(default_factory=list)
    turn_ids: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def first_satisfied(self) -> bool:
        """Whether the first reply pleased."""
        return bool(self.satisfied) and self.satisfied[0]


class Person:
    """A user of an OpenAI client.

    Args:
        client: The client, pointed at the gateway.
        model: The model's name there.
        persona: What the person wants, and how it says so.
        max_replies: Replies after which the person gives up.
    """

    def __init__(self, client: openai.AsyncOpenAI, model: str, persona: Persona, max_replies: int):
        self.client, self.model, self.persona, self.max_replies = client, model, persona, max_replies

    async def ask(self, question: str) -> Session:
        """Ask once and say nothing, as side traffic: nobody learns from it."""
        return await self._talk(question, 1, SIDE_TRAFFIC)

    async def talk(self, question: str) -> Session:
        """Ask, and react to each reply until one pleases; the last reaction is sent and its answer not waited for."""
        return await self._talk(question, self.max_replies, {})

    async def _talk(self, question: str, replies: int, headers: dict[str, str]) -> Session:
        session, messages = Session(question), [{"role": "user", "content": question}]
        try:
            while len(session.replies) < replies and not any(session.satisfied):
                answer = await self.client.chat.completions.create(
                    model=self.model, messages=messages, extra_headers=headers
                )
                text = answer.choices[0].message.content or ""
                prompt, messages = messages, [*messages, {"role": "assistant", "content": text}]
                reaction = await self.persona(Turn(prompt, messages[-1:]), {})
                session.replies.append(text)
                session.turn_ids.append(answer.id)
                session.satisfied.append(bool(reaction.satisfied))
                messages = [*messages, {"role": "user", "content": reaction.text}]
            if not headers:
                await self._say_and_leave(messages)
        except openai.OpenAIError as error:
            session.errors.append(f"{type(error).__name__}: {error}")
        return session

    async def _say_and_leave(self, messages: Sequence[dict]) -> None:
        """Send the last reaction, and hang up as soon as the answer begins."""
        stream = await self.client.chat.completions.create(model=self.model, messages=list(messages), stream=True)
        async with stream:
            async for _ in stream:
                return
