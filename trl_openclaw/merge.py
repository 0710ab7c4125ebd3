"""`trl-openclaw merge ADAPTER OUT`: an adapter merged into its base model, for whoever loads models without PEFT.

    trl-openclaw merge runs/opd runs/opd-merged

Run by one process on what was saved, so it makes no difference under which engine the adapter was trained. A few tokens
are scored before and after: what does not compute the same is not kept.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.2
"""Accepted mean difference of log-probs in nats; half precision rounds the sums of weights and updates."""

SAMPLE = "What is saved is what was trained: the same words, in the same order, are as likely as they were before."
"""What is scored."""

NOTE = "An adapter was merged into the weights, so it loads without PEFT."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser("trl-openclaw merge", description="Merge an adapter into its base model.")
    parser.add_argument("adapter", help="the folder that training saved, or a name on the Hub")
    parser.add_argument("out", type=Path, help="a folder for the merged model, which must not exist yet")
    parser.add_argument("--base", help="the base model, where it is no longer what the adapter names")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the merged weights (default: of the base model)"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the base model")
    given = parser.parse_args(argv)
    try:
        gap = merge_adapter(
            given.adapter, given.out, base=given.base, dtype=given.dtype, trust_remote_code=given.trust_remote_code
        )
    except ModuleNotFoundError as error:
        parser.exit(2, f"{parser.prog}: error: {error.name} is missing: pip install 'trl-openclaw[peft]'\n")
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")
    sys.stdout.write(f"Merged model saved to {given.out}; its log-probs differ by {gap:.2g} nats in the mean.\n")
    return 0


def merge_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> float:
    """Write the base model with an adapter merged into its weights, and the tokenizer and card that fit.

    Args:
        adapter: The folder with `adapter_config.json`, or a name on the Hub.
        out: The folder to write.
        base: The base model; by default what the adapter's config names.
        dtype: Of the weights; by default that of the base model's checkpoint.
        trust_remote_code: Whether code that comes with the base model may run.

    Returns:
        The mean difference of a few tokens' log-probs between base model with adapter and what was written, in nats.

    Raises:
        ValueError: If it is no adapter that can be merged, or damaged, the base model is quantised, unknown or of
            another size, `out` exists, or the merged model computes something else.
    """
    from peft import PeftConfig, PeftModel

    out = Path(out)
    if out.exists():
        raise ValueError(f"`{out}` exists. Name a folder that does not.")
    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except ValueError as error:
        raise ValueError(f"`{adapter}` holds no adapter: {error}") from error
    if config.is_prompt_learning:
        raise ValueError(f"An adapter of the type {config.peft_type.value} is no change of weights: nothing to merge.")
    revision = None if base else config.revision  # of the model that the adapter names
    base = base or config.base_model_name_or_path
    if not base:
        raise ValueError(f"`{adapter}` does not name its base model. Name it with `--base`.")
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    if getattr(AutoConfig.from_pretrained(base, **options), "quantization_config", None) is not None:
        raise ValueError(f"The weights of `{base}` are quantised. Name the model they were made of with `--base`.")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto", **options)
    try:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    except SafetensorError as error:
        raise ValueError(f"The weights of `{adapter}` are damaged: {error}.") from error
    except RuntimeError as error:  # what PyTorch says of every single weight
        raise ValueError(
            f"`{adapter}` does not fit `{base}`, whose weights have other sizes than those that it was trained on. "
            "Name its base model with `--base`."
        ) from error
    tokenizer = _tokenizer(str(adapter), base, options)
    expected = _scores(model, tokenizer)
    model = model.merge_and_unload(safe_merge=True)
    try:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        del model
        merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto", trust_remote_code=trust_remote_code)
        gap = (_scores(merged, tokenizer) - expected).abs().mean().item()
        if not gap <= (HALF_TOLERANCE if merged.dtype.itemsize < 4 else TOLERANCE):
            raise ValueError(
                f"Merged into its base model, the adapter computes something else: log-probs differ by {gap:.2g} nats. "
                "Is a layer that it changes tied to one that it does not?"
            )
        _write_card(str(adapter), base, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return gap


@torch.no_grad()
def _scores(model: Any, tokenizer: Any) -> torch.Tensor:
    """Log-probs of some tokens, each after all before it."""
    ids = torch.tensor([tokenizer(SAMPLE).input_ids], device=model.device)
    logps = model.eval()(input_ids=ids).logits.float().log_softmax(-1)
    return logps[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)


def _tokenizer(adapter: str, base: str, options: dict[str, Any]) -> Any:
    """The one that was saved with the adapter, else the base model's."""
    try:
        return AutoTokenizer.from_pretrained(adapter, trust_remote_code=options["trust_remote_code"])
    except (OSError, ValueError):
        return AutoTokenizer.from_pretrained(base, **options)


def _write_card(adapter: str, base: str, out: Path) -> None:
    """The adapter's card where there is one, made one of a whole model, else a short one."""
    known = Path(adapter, "README.md")
    if known.is_file():
        card = ModelCard.load(known, ignore_metadata_errors=True)
        about_adapters = ("lora", "peft", "base_model:")
        card.data.tags = [tag for tag in card.data.tags or [] if not tag.startswith(about_adapters)]
        title, _, text = card.text.strip().partition("\n")
        text = text.replace(f'model="{Path(adapter).as_posix()}"', f'model="{out.as_posix()}"')
        card.text = f"\n{title}\n\n{NOTE}\n{text}\n"
    else:
        card = ModelCard(f"---\n---\n\n# {out.name}\n\n`{Path(base).name}`, trained. {NOTE}\n")
    card.data.library_name = "transformers"
    card.save(out / "README.md")
