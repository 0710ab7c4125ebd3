"""A teacher's embedding must hold every id that the student's tokenizer can give."""

import pytest
import torch
from tiny import tiny_llama, tiny_tokenizer

from trl_openclaw.errors import VocabularyMismatchError
from trl_openclaw.teachers import check_same_vocabulary


def test_the_last_id_needs_a_row():
    tokenizer = tiny_tokenizer()  # ids reach 258
    check_same_vocabulary(tokenizer, tiny_llama(vocab_size=259), tokenizer)
    with pytest.raises(VocabularyMismatchError, match="embeds 258 tokens but ids reach 258"):
        check_same_vocabulary(tokenizer, tiny_llama(vocab_size=258), tokenizer)


def test_an_embedding_that_is_sharded_away_is_left_to_the_tokenizers():
    model = tiny_llama()
    model.get_input_embeddings().weight = torch.nn.Parameter(torch.empty(0, 32))
    check_same_vocabulary(tiny_tokenizer(), model, tiny_tokenizer())


def test_model_without_a_name_is_not_looked_up_by_its_class(monkeypatch):
    def looked_up(name, **kwargs):
        raise AssertionError(f"looked up {name!r}")

    monkeypatch.setattr("trl_openclaw.teachers.vocabulary.AutoTokenizer.from_pretrained", looked_up)
    with pytest.raises(VocabularyMismatchError, match=r"No tokenizer could be loaded.*Pass `teacher_processing_class`"):
        check_same_vocabulary(tiny_tokenizer(), tiny_llama())
