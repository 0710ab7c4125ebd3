"""What `_trl` needs of TRL is there in the installed release, under these names and with these parameters."""

import inspect
from pathlib import Path

import pytest
import torch
import trl
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import SETTINGS, logged, prompts, record_gradients, rollout_by_prompt
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head

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
        "if self.args.gradient_accumulation_steps % generate_every != 0 or (",
        "generate_every = self.args.steps_per_generation * self.num_iterations",
        "self.use_vllm and self.vllm_importance_sampling_correction",
        "is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids]",
        "is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids_list], device=device)",
        "eos_and_pad = [*self.eos_token_ids, self._tokenizer.pad_token_id]",
        "rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
        "prompt_completion_ids = unwrapped_model.generate(",
        "contents = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)",
        'keys = [key for key in inputs[0] if key not in ["prompt", "completion", "completion_ids"]]',
    ],
)
def test_the_lines_that_the_seams_rely_on_are_there(line):
    assert line in Path(grpo_trainer.__file__).read_text(encoding="utf-8")


def test_advantages_are_read_after_the_forward():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert source.index("self._get_per_token_logps_and_entropies(") < source.index('advantages = inputs["advantages"]')


def test_the_pinned_release():
    assert Version("1.16") <= Version(trl.__version__) < Version("1.17")


class Probe(_trl.SeamGRPOTrainer):
    """Gives the tokens of a batch losses of `-A` each, by way of TRL's advantages or beside them."""

    def extend_batch(self, inputs, batch):
        batch["tool_mask"] = (batch["completion_ids"] % 3 != 0).long()
        batch["num_items_in_batch"] = (batch["completion_mask"] * batch["tool_mask"]).sum()
        return batch

    def wanted(self, inputs):
        return (inputs["completion_ids"].float() + torch.arange(inputs["completion_ids"].size(1))).sin()

    def _compute_loss(self, model, inputs):
        """As if vLLM had sampled, which corrects every token's loss."""
        inputs["importance_sampling_ratio"] = 1 + 0.5 * self.wanted(inputs)
        self.use_vllm = True
        loss = super()._compute_loss(model, inputs)
        self.use_vllm = False
        return loss

    def token_advantages(self, inputs, old_per_token_logps):
        return torch.zeros_like(old_per_token_logps) if self.adds_token_losses else self.wanted(inputs)

    def token_losses(self, inputs, per_token_logps, hidden, model):
        ratio = (per_token_logps - per_token_logps.detach()).exp()
        kinds = {"cispo": per_token_logps, "sapo": 4 * torch.sigmoid(ratio - 1)}
        return -self.wanted(inputs) * kinds.get(self.args.loss_type, ratio)


WEIGHED = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2,
    "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.0, "max_grad_norm": 0.0, "epsilon_high": 5.0,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.0,
    "max_completion_length": 9,  # longer than any completion
}  # fmt: skip


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "luspo", "sapo"])
def test_added_token_losses_weigh_as_trls_own_do(tmp_path, loss_type):
    found = []
    for adds in (False, True):
        args = GRPOConfig(str(tmp_path), loss_type=loss_type, **{**SETTINGS, **WEIGHED})
        trainer = Probe(
            tiny_llama(), lambda completions, **_: [0.0] * len(completions), args, train_dataset=prompts(),
            eval_dataset=prompts(4), processing_class=tiny_tokenizer(), rollout_func=rollout_by_prompt,
        )  # fmt: skip
        trainer.adds_token_losses = adds
        steps = record_gradients(trainer)
        trainer.train()
        assert len(steps) == 4
        found.append((steps, logged(trainer, "eval_loss")))
    (own, own_eval), (added, added_eval) = found
    assert len(own_eval) == 1
    assert added_eval == pytest.approx(own_eval, rel=1e-4, abs=1e-6)
    for a, b in zip(own, added, strict=True):
        assert a["loss"] != 0
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4, abs=1e-6)
        for name, gradient in a["gradients"].items():
            torch.testing.assert_close(b["gradients"][name], gradient, atol=1e-6, rtol=1e-3)


def forward(model, keep, read=None):
    """One fused forward of two rows, the second padded on the left; only `keep` positions reach the head."""
    ids = torch.tensor([[258, 5, 6, 7, 8, 9], [257, 258, 3, 4, 10, 11]])
    kwargs = {"input_ids": ids, "attention_mask": (ids != 257).long(), "labels": ids}
    with _trl.completion_positions_only(model, kwargs, keep, read):
        return model(**kwargs, fused_lm_head=True)


@pytest.mark.parametrize("peft", [False, True])
def test_read_sees_the_states_that_the_last_log_probs_were_made_of(peft):
    model = tiny_llama()
    add_fused_lm_head(model)
    bare = model
    if peft:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    before, seen = bare.forward, []

    def read(output, hidden, found):
        seen.append((hidden, found, output.log_probs))
        output.loss = hidden.sum()

    output = forward(model, 3, read)
    ((hidden, found, log_probs),) = seen
    assert found is bare
    assert hidden.shape == (2, 3, 32)
    assert output.loss == hidden.sum()
    sampled = torch.tensor([[7, 8, 9], [4, 10, 11]])
    expected = (hidden @ bare.lm_head.weight.T).log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_probs[:, -3:], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(forward(model, 3).log_probs[:, -3:], expected, atol=1e-5, rtol=1e-5)
    assert bare.forward == before
    assert not bare.base_model._forward_hooks


def test_the_model_is_as_before_when_reading_fails():
    model = tiny_llama()
    add_fused_lm_head(model)
    before = model.forward

    def read(*_):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        forward(model, 3, read)
    assert model.forward == before
    assert not model.base_model._forward_hooks


def test_small_tiles_change_no_number(monkeypatch):
    results = []
    for size in (4096, 128):
        monkeypatch.setattr(_trl.chunked_logprob, "TOKEN_CHUNK_SIZE", 4096)
        monkeypatch.setattr(_trl.chunked_divergence, "TOKEN_CHUNK_SIZE", 4096)
        if size == 128:
            _trl.use_small_tiles()
        assert _trl.chunked_logprob.TOKEN_CHUNK_SIZE == _trl.chunked_divergence.TOKEN_CHUNK_SIZE == size
        model = tiny_llama()
        add_fused_lm_head(model)
        ids = torch.randint(0, 256, (4, 100), generator=torch.Generator().manual_seed(0))
        output = model(input_ids=ids, labels=ids, fused_lm_head=True)
        output.loss.backward()
        results.append((output.log_probs.detach(), model.lm_head.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
