"""What recipes are run with in tests: a tiny model in a folder, and a server that plays both judge and user."""

import re
from pathlib import Path

from tiny import tiny_llama, tiny_tokenizer

JUDGE_MODEL = "Qwen/Qwen3-8B"
"""The judge that the recipes' configs name."""


def save_tiny_model(folder: Path) -> None:
    """A tiny model and its tokenizer, as `from_pretrained` reads them."""
    tiny_llama(max_position_embeddings=4096).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def judge_or_user(messages) -> str:
    """A judge that is never content where a verdict is asked for, with the marker of the call; else a user."""
    question = messages[-1]["content"]
    marker = re.search(r"The marker is (\w+)\.", question)
    if marker is None:
        return "Shorter, please."
    hint = f"HINT-{marker[1]}: Be brief.\nEND-{marker[1]}" if "HINT-" in question else ""
    return f"The user complains.\nVERDICT-{marker[1]}: -1\n{hint}"
