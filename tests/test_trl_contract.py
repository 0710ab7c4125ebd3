"""What `_trl.py` needs of TRL is there in the installed release, under these names and with these parameters."""

import inspect
from pathlib import Path

import pytest
import trl
from packaging.version import Version
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from trl_openclaw import _trl


@pytest.mark.parametrize("name", _trl.SIGNATURES)
def test_private_methods_have_the_expected_parameters(name):
    found = tuple(inspect.signature(inspect.unwrap(getattr(GRPOTrainer, name))).parameters)
    assert found == _trl.SIGNATURES[name]


def test_every_overridden_private_method_is_under_contract():
    own = {name for name, value in vars(_trl.SeamGRPOTrainer).items() if inspect.isfunction(value)}
    overridden = {
        name for name in own if name.startswith("_") and not name.startswith("__") and hasattr(GRPOTrainer, name)
    }
    assert overridden <= set(_trl.SIGNATURES)


@pytest.mark.parametrize(
    "line",
    [
        _trl.UNREWARDED_WARNING,
        'advantages = inputs["advantages"]',
        "if advantages.dim() == 1:",
        "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)",
        "all_logps.append(outputs.log_probs[:, -logits_to_keep:])",
        'mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]',
        'normalizer = inputs["num_items_in_batch"].clamp(min=1.0)',
        "is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids]",
    ],
)
def test_the_lines_that_the_seams_rely_on_are_there(line):
    assert line in Path(grpo_trainer.__file__).read_text(encoding="utf-8")


def test_advantages_are_read_after_the_forward():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert source.index("self._get_per_token_logps_and_entropies(") < source.index('advantages = inputs["advantages"]')


def test_the_pinned_release():
    assert Version("1.16") <= Version(trl.__version__) < Version("1.17")
