"""The LM head as tensors, against full logits in float64 and against TRL's own fused head."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_llama
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
)

from trl_openclaw import lm_head
from trl_openclaw._trl import add_fused_lm_head
from trl_openclaw.lm_head import LMHead, TokenStates, full_divergence

N, K, HIDDEN, VOCABULARY = 6, 4, 5, 13

TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "all": {"temperature": 1.3, "scale": 3.0, "softcap": 4.0},
}


def random_head(seed=0, bias=True, hidden_size=HIDDEN, dtype=torch.float64, **settings):
    """Hidden states `(N, H)` and a head, both with gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    head = LMHead(normal(VOCABULARY, hidden_size), normal(VOCABULARY) if bias else None, dtype=dtype, **settings)
    return normal(N, hidden_size), head


def random_ids(*shape, seed=0):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def dense_logits(hidden, head):
    """All logits `(N, V)`, as the model would give them."""
    logits = hidden @ head.weight.T
    logits = logits if head.bias is None else logits + head.bias
    logits = head.scale * logits
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits / head.temperature


def dense_log_probs(hidden, head):
    return torch.log_softmax(dense_logits(hidden, head), dim=-1)


def states_of(hidden, head, token_ids):
    """What a forward pass that gave these hidden states would know."""
    logps = dense_log_probs(hidden, head).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return TokenStates(hidden, token_ids, logps, head)


def gradients(values, hidden, head):
    """Gradients to hidden states, weight and bias, of a sum in which every number has its own weight."""
    weights = torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype).view(values.shape)
    wanted = [tensor for tensor in (hidden, head.weight, head.bias) if tensor is not None]
    return torch.autograd.grad((values * weights).sum(), wanted, retain_graph=True)


def assert_same_with_gradients(got, expected, hidden, head):
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradients(got, hidden, head), gradients(expected, hidden, head))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_chosen_logits_equal_the_dense_ones(name, bias):
    hidden, head = random_head(bias=bias, **TRANSFORMS[name])
    ids = random_ids(N, K)
    got, expected = head.logits_at(hidden, ids), dense_logits(hidden, head).gather(-1, ids)
    assert_same_with_gradients(got, expected, hidden, head)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_log_probs_equal_the_dense_ones(name, bias):
    hidden, head = random_head(bias=bias, **TRANSFORMS[name])
    states = states_of(hidden, head, random_ids(N, seed=1))
    ids = random_ids(N, K)
    got, expected = states.log_probs_at(ids), dense_log_probs(hidden, head).gather(-1, ids)
    assert_same_with_gradients(got, expected, hidden, head)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_topk_finds_the_best_of_the_dense_logits(name, bias):
    hidden, head = random_head(bias=bias, **TRANSFORMS[name])
    assert torch.equal(head.topk(hidden, K), dense_logits(hidden, head).topk(K).indices)
    assert head.topk(hidden, VOCABULARY).sort().values.tolist() == [list(range(VOCABULARY))] * N


def test_log_probs_by_hand():
    # Logits are the hidden state itself: ln(1, 2, 1), so the probabilities are (1/4, 1/2, 1/4).
    hidden = torch.tensor([[1.0, 2.0, 1.0]]).log()
    states = TokenStates(hidden, torch.tensor([0]), torch.tensor([0.25]).log(), LMHead(torch.eye(3)))
    assert states.log_probs_at(torch.tensor([[1, 0, 2]])).exp().tolist() == [pytest.approx([0.5, 0.25, 0.25])]
    # At temperature 1/2 the logits are doubled, ln(1, 4, 1): (1/6, 2/3, 1/6).
    states = replace(states, per_token_logps=torch.tensor([1 / 6]).log(), head=LMHead(torch.eye(3), temperature=0.5))
    assert states.log_probs_at(torch.tensor([[1, 0, 2]])).exp().tolist() == [pytest.approx([2 / 3, 1 / 6, 1 / 6])]


def test_any_leading_dimensions():
    hidden, head = random_head()
    token_ids, ids = random_ids(N, seed=1), random_ids(N, K)
    flat = states_of(hidden, head, token_ids)
    rows = TokenStates(hidden.view(2, 3, -1), token_ids.view(2, 3), flat.per_token_logps.view(2, 3), head)
    assert torch.equal(rows.log_probs_at(ids.view(2, 3, K)), flat.log_probs_at(ids).view(2, 3, K))
    some = torch.tensor([[True, False, True], [False, False, True]])
    assert torch.equal(rows[some].log_probs_at(ids.view(2, 3, K)[some]), flat.log_probs_at(ids)[some.flatten()])


def test_no_positions_are_no_trouble():
    hidden, head = random_head()
    none = states_of(hidden, head, random_ids(N))[torch.zeros(N, dtype=torch.bool)]
    assert none.log_probs_at(random_ids(0, K)).shape == (0, K)
    assert head.topk(none.hidden, K).shape == (0, K)
    teacher_hidden, teacher = random_head(seed=1)
    for values in (none.log_probs_at(random_ids(0, K)), full_divergence(none, teacher_hidden[:0], teacher, 1.0)):
        assert torch.autograd.grad(values.sum(), hidden, retain_graph=True)[0].eq(0).all()


def everything(hidden, head, token_ids, ids, teacher_hidden, teacher):
    """All that is computed of some positions, with gradients, by name."""
    states = states_of(hidden, head, token_ids)
    results = {"topk": head.topk(hidden, K)}
    for name, values in [
        ("log_probs", states.log_probs_at(ids)),
        ("divergence", full_divergence(states, teacher_hidden, teacher, 0.3)),
    ]:
        results[name] = values.detach()
        results[f"{name}_grad_hidden"], results[f"{name}_grad_weight"], results[f"{name}_grad_bias"] = (
            torch.autograd.grad(values.square().sum(), [hidden, head.weight, head.bias], retain_graph=True)
        )
    return results


@pytest.mark.parametrize("elements", [1, 50, 200])
def test_slices_change_nothing(monkeypatch, elements):
    case = (*random_head(dtype=torch.float32), random_ids(N, seed=1), random_ids(N, K), *random_head(1))
    whole = everything(*case)
    monkeypatch.setattr(lm_head, "_ELEMENTS", elements)
    parts = everything(*case)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_the_size_of_slices_is_bounded(monkeypatch):
    monkeypatch.setattr(lm_head, "_ELEMENTS", 100)
    for rows, width in [(7, 30), (7, 100), (7, 1000), (0, 3), (250, 1)]:
        slices = list(lm_head._parts(rows, width))
        assert [i for part in slices for i in range(part.start, part.stop)] == list(range(rows))
        assert all((part.stop - part.start) * width <= max(100, width) for part in slices)


def test_other_rows_and_their_order_change_nothing():
    hidden, head = random_head(dtype=torch.float32)
    teacher_hidden, teacher = random_head(1)
    token_ids, ids = random_ids(N, seed=1), random_ids(N, K)
    whole = everything(hidden, head, token_ids, ids, teacher_hidden, teacher)
    order = torch.tensor([4, 0, 3])
    chosen = hidden[order].detach().requires_grad_()
    some = everything(chosen, head, token_ids[order], ids[order], teacher_hidden[order], teacher)
    for name in ("topk", "log_probs", "log_probs_grad_hidden", "divergence", "divergence_grad_hidden"):
        torch.testing.assert_close(some[name], whole[name][order], rtol=1e-5, atol=1e-6, msg=name)


# Against TRL's fused head

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**SMALL, final_logit_softcapping=4.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
    "granite": GraniteConfig(**SMALL, logits_scaling=4.0),
    "falcon_h1": FalconH1Config(
        **SMALL, lm_head_multiplier=0.5, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
        mamba_chunk_size=8,
    ),
}  # fmt: skip


def with_head_bias(model):
    """The same model with a bias in its head, as a few families have one."""
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.linspace(-1, 1, head.weight.size(0)))
    return model


def small_model(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family]).eval()


def fused_states(model, ids, temperature, **settings):
    """The states of all positions but the last, and the model's fused head for any labels."""
    add_fused_lm_head(model, temperature=temperature, cast_lm_head_to_fp32=settings.get("in_float32", False))
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, :-1]
    head = LMHead.of(model, hidden, temperature, **settings)

    def fused(labels):
        return model(ids, labels=labels, fused_lm_head=True).log_probs[:, -labels.size(1) + 1 :]

    return TokenStates(hidden, ids[:, 1:], fused(ids), head), fused


def some_ids(model, *shape):
    return torch.randint(3, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_fused_head(family, temperature):
    model = small_model(family)
    ids, others = some_ids(model, 2, 9), some_ids(model, 3, 2, 9).flip(0)
    states, fused = fused_states(model, ids, temperature)
    got = states.log_probs_at(others[:, :, 1:].movedim(0, -1))
    for j in range(len(others)):
        torch.testing.assert_close(got[..., j], fused(others[j]), rtol=1e-5, atol=1e-5)
    # The model's own logits, which know nothing of either.
    logits = model(ids).logits[:, :-1] / temperature
    best = states.head.topk(states.hidden.flatten(0, 1), 3).view(*ids[:, 1:].shape, 3)
    assert torch.equal(best, logits.topk(3).indices)
    torch.testing.assert_close(states.log_probs_at(best), logits.log_softmax(-1).gather(-1, best), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_are_those_of_the_fused_head_under_autocast(in_float32, bias):
    model = tiny_llama(vocab_size=61, pad_token_id=0, eos_token_id=2)
    model = with_head_bias(model) if bias else model
    ids, others = some_ids(model, 2, 9), some_ids(model, 3, 2, 9).flip(0)
    with torch.autocast("cpu", torch.bfloat16):
        states, fused = fused_states(model, ids, 0.8, in_float32=in_float32)
        assert states.head.dtype == (torch.float32 if in_float32 else torch.bfloat16)
        got = states.log_probs_at(others[:, :, 1:].movedim(0, -1))
        expected = torch.stack([fused(labels) for labels in others], dim=-1)
        own = states.log_probs_at(ids[:, 1:, None]).squeeze(-1)
        best = states.head.topk(states.hidden.flatten(0, 1), 3)
        inside = gradients(got, states.hidden, states.head)
    assert got.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, states.per_token_logps)
    # Neither the search nor the backward pass depends on where autocast is on.
    assert torch.equal(best, states.head.topk(states.hidden.flatten(0, 1), 3))
    assert all(map(torch.equal, inside, gradients(got, states.hidden, states.head)))


def test_topk_in_float32_tells_apart_what_autocast_would_not():
    head = LMHead(torch.tensor([[1.0], [1.001], [1.002]]))  # all 1 in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert head.topk(torch.ones(1, 1), 3).tolist() == [[2, 1, 0]]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradients_are_those_of_the_fused_head(family):
    model = small_model(family)
    ids, others = some_ids(model, 2, 9), some_ids(model, 1, 2, 9).flip(1)
    states, fused = fused_states(model, ids, 0.9)
    got = states.log_probs_at(others[0, :, 1:].unsqueeze(-1)).squeeze(-1)
    weights = torch.linspace(0.5, 1.5, got.size(1))
    ours, expected = (
        torch.autograd.grad((logps * weights).sum(), list(model.parameters()), retain_graph=True)
        for logps in (got, fused(others[0]))
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


# The whole vocabulary


def dense_divergence(student, teacher, beta):
    """From all log-probs `(N, V)` of both."""

    def kl(p, q):
        return (p.exp() * (p - q)).sum(dim=-1)

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergence_equals_the_dense_reference(beta, name):
    settings = TRANSFORMS[name]
    hidden, head = random_head(dtype=torch.float32, **settings)
    # The teacher is wider, without a bias, and shares the temperature alone.
    temperature = settings.get("temperature", 1.0)
    teacher_hidden, teacher = random_head(
        1, bias=False, hidden_size=HIDDEN + 3, dtype=torch.float32, temperature=temperature, softcap=3.0
    )
    got = full_divergence(states_of(hidden, head, random_ids(N)), teacher_hidden, teacher, beta)

    wide = [t.detach().double().requires_grad_() for t in (hidden, head.weight, head.bias)]
    wide_head = replace(head, weight=wide[1], bias=wide[2])
    wide_teacher = dense_log_probs(teacher_hidden.detach().double(), replace(teacher, weight=teacher.weight.double()))
    expected = dense_divergence(dense_log_probs(wide[0], wide_head), wide_teacher.detach(), beta)
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)
    for mine, reference in zip(gradients(got, hidden, head), gradients(expected, wide[0], wide_head), strict=True):
        torch.testing.assert_close(mine, reference.float(), rtol=1e-4, atol=1e-5)

    got.sum().backward()
    assert teacher_hidden.grad is None
    assert teacher.weight.grad is None


def test_divergence_by_hand():
    # Logits are the hidden states: the student gives (1/2, 1/4, 1/4), the teacher (1/4, 1/4, 1/2).
    head = LMHead(torch.eye(3))
    student = TokenStates(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([0]), torch.tensor([0.5]).log(), head)
    teacher = torch.tensor([[0.25, 0.25, 0.5]]).log()
    # Both ways: 1/2 ln 2 - 1/4 ln 2. With the mixture (3/8, 1/4, 3/8) both have 1/2 ln(4/3) + 1/4 ln(2/3).
    for beta, expected in [(0.0, 0.173287), (1.0, 0.173287), (0.5, 0.042475)]:
        assert full_divergence(student, teacher, head, beta).item() == pytest.approx(expected, abs=1e-6)


def test_a_head_shared_with_the_teacher_learns_from_the_student_alone():
    hidden, head = random_head(dtype=torch.float32)
    teacher_hidden, _ = random_head(1, dtype=torch.float32)
    frozen = replace(head, weight=head.weight.detach().clone(), bias=head.bias.detach().clone())
    states = states_of(hidden, head, random_ids(N))
    shared, apart = (full_divergence(states, teacher_hidden, teacher, 1.0) for teacher in (head, frozen))
    assert torch.equal(shared, apart)
    for one, other in zip(gradients(shared, hidden, head), gradients(apart, hidden, head), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("in_float32", [False, True])
def test_divergence_keeps_the_precision_of_the_head_under_autocast(in_float32):
    hidden, head = random_head(dtype=torch.float32)
    teacher_hidden, teacher = random_head(1, dtype=torch.float32)
    dtype = torch.float32 if in_float32 else torch.bfloat16
    states = states_of(hidden, replace(head, dtype=dtype), random_ids(N))
    with torch.autocast("cpu", torch.bfloat16):
        got = full_divergence(states, teacher_hidden, replace(teacher, dtype=dtype), 1.0)
    rounded = [
        dense_log_probs(h.to(dtype).double(), replace(m, weight=m.weight.to(dtype).double(), bias=m.bias.double()))
        for h, m in [(hidden, head), (teacher_hidden, teacher)]
    ]
    torch.testing.assert_close(got, dense_divergence(*rounded, 1.0).float(), rtol=1e-4, atol=1e-5)


def test_different_temperatures_cannot_be_compared():
    hidden, head = random_head(dtype=torch.float32, temperature=0.7)
    states = states_of(hidden, head, random_ids(N))
    with pytest.raises(ValueError, match=r"one temperature, got 0\.7 and 1\.0"):
        full_divergence(states, hidden, replace(head, temperature=1.0), 1.0)
