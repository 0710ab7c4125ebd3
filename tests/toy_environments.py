"""Small TRL environments to wrap: importable, as a worker process needs them to be."""

import asyncio
import gc
import os
import socket
import subprocess
import sys
import time

from trl_openclaw.types import NextState, ToolResult


class Counter:
    """Counts."""

    def __init__(self, start: int = 0):
        self.start = start

    def reset(self, **row) -> str:
        """Begin."""
        self.count = self.start
        self.verdict = "begun"
        if row.get("refuse"):
            raise ValueError("no such row")
        return f"Row {row.get('prompt')}."

    def add(self, amount: int, times: int = 1) -> str:
        """Add to the count.

        Args:
            amount: How much.
            times: How often.
        """
        self.count += amount * times
        return f"It is {self.count} in process {os.getpid()}."

    async def wait(self, seconds: float) -> str:
        """Wait for a while.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    def judge(self) -> str:
        """Say what is known."""
        return ToolResult("Wrong.", satisfied=False, info={"wish": "Do better."})

    def picture(self) -> list:
        """Show something."""
        from PIL import Image

        return [{"type": "text", "text": "See:"}, {"type": "image", "image": Image.new("RGB", (2, 2), "red")}]

    def misbehave(self, how: str) -> object:
        """Do what a tool must not do.

        Args:
            how: What.
        """
        if how == "raise":
            raise KeyError("missing")
        if how == "exit":
            sys.exit(3)
        if how == "die":
            os._exit(3)
        if how == "hang":
            time.sleep(100)
        if how == "hang with a child":
            subprocess.run([sys.executable, "-c", "import time; time.sleep(100)", "child-of-counter"])
        if how == "print":
            for stream in (sys.stdout, sys.stderr):
                stream.write("x" * (20 << 20))
                stream.flush()
            os.write(1, b"x" * (1 << 20))
            return "printed"
        if how == "answer much":
            return "head" + "x" * 10**7 + "tail"
        if how == "answer an object":
            return Counter()
        return lambda: None

    def _hidden(self) -> None:
        pass

    def get_reward(self) -> float:
        """The count."""
        return float(self.count)

    @property
    def next_state(self) -> NextState:
        """What followed."""
        return NextState(f"The count is {self.count}.", role="tool", satisfied=self.count > 0, info={"n": self.count})


class Unstartable:
    """Cannot be made."""

    def __init__(self):
        raise RuntimeError("no licence")

    def reset(self, **row) -> None:
        """Begin."""


class Plain:
    """Has nothing but what TRL asks for."""

    def reset(self, **row) -> None:
        """Begin."""

    def act(self) -> int:
        """Act."""
        return 5


class Forger:
    """Answers in the place of its worker process."""

    def reset(self, **row) -> None:
        """Begin."""

    def write(self, data: bytes, seconds: float = 100.0, times: int = 1) -> str:
        """Write to whoever asks, and wait.

        Args:
            data: What.
            seconds: How long to wait after each time.
            times: How often.
        """
        for _ in range(times):
            for channel in [thing for thing in gc.get_objects() if isinstance(thing, socket.socket)]:
                os.write(channel.fileno(), data)
            time.sleep(seconds)
        return "written"


class Slow:
    """Takes its time to say what followed."""

    def reset(self, **row) -> str:
        """Begin."""
        return "Begun."

    def act(self) -> str:
        """Act."""
        return "done"

    @property
    def next_state(self) -> NextState:
        """What followed."""
        time.sleep(1)
        return NextState("late")
