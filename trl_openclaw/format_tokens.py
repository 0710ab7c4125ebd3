"""Which tokens are nothing but layout, and a bound on what they may weigh: hints about form move them most."""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_CHARACTERS = frozenset("*#_`~|>-=•\n")
"""What Markdown lays a text out with. Digits are content: in "1." they number a list, in "about 1." they are the
answer, and most tokenizers keep them apart from the full stop anyway."""


def format_token_ids(tokenizer: "PreTrainedTokenizerBase") -> torch.Tensor:
    r"""Find the tokens that are only layout: one or more of ``* # _ ` ~ | > - = •`` and line feeds, spaces around them.

    Each id is decoded alone. A token of spaces alone does not count, nor does a part of a character (byte-level
    tokenizers have them), nor a special token such as the end of the reply, whatever its text is.

    Args:
        tokenizer: Any tokenizer of transformers; of a processor, its `tokenizer`.

    Returns:
        Mask over the vocabulary (V,), on the CPU. V is `len(tokenizer)`, or one more than the largest id if that is
        larger. Decoding takes a few seconds for 100,000 tokens: do it once.
    """
    ids = sorted(set(tokenizer.get_vocab().values()))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    found = [i for i, text in zip(ids, texts, strict=True) if i not in special and is_format(text)]
    mask = torch.zeros(max(len(tokenizer), max(ids, default=-1) + 1), dtype=torch.bool)
    mask[found] = True
    return mask


def is_format(text: str) -> bool:
    """Whether a text is layout: at least one of `FORMAT_CHARACTERS`, and nothing else but white space."""
    characters = {c for c in text if c in FORMAT_CHARACTERS or not c.isspace()}
    return bool(characters) and characters <= FORMAT_CHARACTERS


def cap_format_tokens(gap: torch.Tensor, ids: torch.Tensor, is_format: torch.Tensor, cap: float) -> torch.Tensor:
    """Bound the log-prob gap where the token is layout, so that form does not drown content.

    Args:
        gap (`(B, T)` or `(B, T, k)`): Teacher minus student log-prob, in nats.
        ids (as `gap`): The tokens that the gaps belong to. Ids outside of `is_format`, such as rows of an embedding
            that was padded, are no layout.
        is_format (`(V,)`): Mask of `format_token_ids`, on the device of `ids`.
        cap: The bound, in nats. 0 takes layout out of the distillation.

    Returns:
        `gap` with the entries at layout tokens clamped to `[-cap, cap]`, all others unchanged. NaN stays NaN.

    Raises:
        ValueError: When `cap` is negative or no number, or the shapes differ.
    """
    if math.isnan(cap) or cap < 0:
        raise ValueError(f"`cap` must be a number of nats, at least 0, got {cap!r}.")
    if gap.shape != ids.shape:
        raise ValueError(f"Each gap needs its token id: `gap` has the shape {gap.shape}, `ids` {ids.shape}.")
    size = len(is_format)
    known = (ids >= 0) & (ids < size)
    at_format = F.pad(is_format, (0, 1))[torch.where(known, ids, size)]  # the place behind the last is no layout
    return torch.where(at_format, gap.clamp(-cap, cap), gap)
