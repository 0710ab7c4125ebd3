import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_openclaw.format_tokens import FORMAT_CHARACTERS, cap_format_tokens, format_token_ids, is_format


@pytest.mark.parametrize(
    "text",
    ["*", "**", " - ", "###", "\n", "\n\n\n", "\n    ", "\r\n", "```\n", " |", "|---|", "> ", "•", "__", "~~", "="],
)  # fmt: skip
def test_layout(text):
    assert is_format(text)


@pytest.mark.parametrize(
    "text", ["", " ", "   ", "\t", "\r", "a", "- a", "1", "1.", "2)", ".", ".\n", ":", "\ufffd", "*\ufffd", "—", "中"]
)  # fmt: skip
def test_no_layout(text):
    assert not is_format(text)


@given(st.text(), st.sampled_from(sorted(FORMAT_CHARACTERS)))
def test_layout_never_holds_letters_or_digits(text, character):
    if is_format(text + character):
        assert not any(c.isalnum() for c in text)
    assert is_format(f"  {character} \t{character}")


def found(tokenizer) -> set[str]:
    """The tokens that count, as the vocabulary writes them."""
    mask = format_token_ids(tokenizer)
    assert mask.dtype == torch.bool
    return {tokenizer.convert_ids_to_tokens(i) for i in mask.nonzero().flatten().tolist()}


def test_a_tokenizer_of_bytes():
    tokenizer = tiny_tokenizer()
    assert found(tokenizer) == {*"*#_`~|>-=", "Ċ"}  # "•" is three bytes, none of which is a character
    assert format_token_ids(tokenizer).shape == (len(tokenizer),)


def byte_level(*merged: str, added=(), **special) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose vocabulary ends in `merged`, each made of two tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    merges = []
    for text in merged:
        ((token, _),) = encode(text)
        merges.append((token[:-1], token[-1]))
        vocab[token] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.add_tokens(list(added))
    return tokenizer


def ids_of(tokenizer, *texts: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(text) for text in texts]


def test_byte_level_bpe_has_spaces_parts_of_characters_and_merged_signs():
    tokenizer = byte_level("**", " -", "\n\n", "  ", "ab", "*a", "1.", "\n ")
    assert found(tokenizer) == {*"*#_`~|>-=", "Ċ", "**", "Ġ-", "ĊĊ", "ĊĠ"}


def test_a_whole_character_of_several_bytes_counts():
    vocab = {"â": 0, "Ģ": 1, "¢": 2, "âĢ": 3, "âĢ¢": 4, "Ġ": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("â", "Ģ"), ("âĢ", "¢")]))
    backend.decoder = decoders.ByteLevel()
    assert found(PreTrainedTokenizerFast(tokenizer_object=backend)) == {"âĢ¢"}


def test_special_tokens_never_count_whatever_they_look_like():
    added = [AddedToken("===", special=True), AddedToken("~~~", special=False)]
    tokenizer = byte_level("**", eos_token="\n", pad_token="|", additional_special_tokens=["--"], added=added)
    mask = format_token_ids(tokenizer)
    assert not mask[ids_of(tokenizer, "\n", "|", "--", "===")].any()
    assert mask[ids_of(tokenizer, "~~~", "**")].all()


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A unigram model with bytes to fall back on, and a gap in its ids."""
    pieces = ["<unk>", "</s>", "▁", "▁-", "▁**", "**", "▁▁", "<0x0A>", "<0xE2>", "▁a", "#", "▁1."]
    backend = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def test_sentencepiece_like():
    assert found(sentencepiece_like()) == {"▁-", "▁**", "**", "<0x0A>", "#"}


def test_the_mask_reaches_to_the_largest_id():
    backend = Tokenizer(models.WordLevel({"*": 0, "a": 1, "-": 7}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert len(tokenizer) == 3
    assert format_token_ids(tokenizer).tolist() == [True, False, False, False, False, False, False, True]


GAP = torch.tensor([[3.0, -3.0, 0.5, -4.0]])
IS_FORMAT = torch.tensor([True, False])


def test_only_layout_is_capped():
    ids = torch.tensor([[0, 0, 0, 1]])
    assert cap_format_tokens(GAP, ids, IS_FORMAT, 1.0).tolist() == [[1.0, -1.0, 0.5, -4.0]]
    assert cap_format_tokens(GAP, ids, IS_FORMAT, 0.0).tolist() == [[0.0, 0.0, 0.0, -4.0]]
    assert GAP.tolist() == [[3.0, -3.0, 0.5, -4.0]]


def test_candidates_per_position():
    ids = torch.tensor([[[0, 1], [1, 0]]])
    gap = torch.tensor([[[3.0, 3.0], [-3.0, -3.0]]])
    assert cap_format_tokens(gap, ids, IS_FORMAT, 1.0).tolist() == [[[1.0, 3.0], [-3.0, -1.0]]]


@pytest.mark.parametrize("mask", [IS_FORMAT, torch.zeros(0, dtype=torch.bool), torch.ones(1, dtype=torch.bool)])
def test_ids_beyond_the_mask_are_no_layout(mask):
    ids = torch.tensor([[2, 100, -1, -100]])
    assert torch.equal(cap_format_tokens(GAP, ids, mask, 1.0), GAP)


def test_a_missing_gap_stays_missing_and_the_gradient_flows():
    gap = torch.tensor([[float("nan"), 0.5, 3.0, 3.0]], requires_grad=True)
    capped = cap_format_tokens(gap, torch.tensor([[0, 0, 0, 1]]), IS_FORMAT, 1.0)
    assert capped[0, 0].isnan()
    capped[0, 1:].sum().backward()
    assert gap.grad[0, 1:].tolist() == [1.0, 0.0, 1.0]


def test_wrong_arguments():
    ids = torch.tensor([[0, 0, 0, 1]])
    for cap in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"`cap` must be a number of nats, at least 0, got"):
            cap_format_tokens(GAP, ids, IS_FORMAT, cap)
    with pytest.raises(ValueError, match="Each gap needs its token id"):
        cap_format_tokens(GAP, ids[:, :3], IS_FORMAT, 1.0)


@given(st.integers(0, 2**32 - 1), st.floats(0, 5))
def test_capped_within_the_bound_and_nothing_else_moved(seed, cap):
    generator = torch.Generator().manual_seed(seed)
    gap = 3 * torch.randn(2, 5, 3, generator=generator)
    ids = torch.randint(0, 9, (2, 5, 3), generator=generator)
    is_layout = torch.rand(7, generator=generator) < 0.5
    capped = cap_format_tokens(gap, ids, is_layout, cap)
    for before, after, i in zip(gap.flatten().tolist(), capped.flatten().tolist(), ids.flatten().tolist(), strict=True):
        if i < 7 and is_layout[i]:
            assert after == pytest.approx(max(-cap, min(cap, before)))
        else:
            assert after == before
