"""A model that runs shared prefixes once, against the same model that runs every row."""

import contextlib
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from model_zoo import LENGTHENED, ZOO, llama_that_refuses_a_cache, llama_with_a_wrong_cache, tokens_counted
from tiny import tiny_llama
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache
from trl.trainer.utils import add_fused_lm_head

from trl_openclaw import prefix_passes, shared_prefix
from trl_openclaw._trl import completion_positions_only
from trl_openclaw._trl.forward import ObservedForward, replaced, shared_prefill
from trl_openclaw.prefix_passes import cache_name_of
from trl_openclaw.prefix_plan import make_groups
from trl_openclaw.shared_prefix import PrefixSharing, SharedRows, evaluating

KEEP = 5
LOGGER = "trl_openclaw.shared_prefix"


def sharing() -> PrefixSharing:
    return PrefixSharing(Accelerator(cpu=True), pass_cost=0)


def batch(prompts=(12, 12, 7, 7, 12), completions=(5, 3, 5, 1, 4)) -> dict[str, torch.Tensor]:
    """Rows with prompts of these lengths, equal where the length is, and all with one ending, as TRL pads them."""
    generator = torch.Generator().manual_seed(0)
    end = torch.tensor([1, 2, 3])
    texts = {n: torch.cat([torch.randint(0, 256, (n,), generator=generator), end])[-n:] for n in dict.fromkeys(prompts)}
    width = max(prompts)
    ids = torch.full((len(prompts), width + KEEP), 257)
    mask = torch.zeros_like(ids)
    for i, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, width - p : width] = texts[p]
        ids[i, width : width + c] = torch.randint(0, 256, (c,), generator=generator)
        mask[i, width - p : width + c] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :width] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def fused(model: nn.Module) -> nn.Module:
    add_fused_lm_head(model)
    return model


def scored(model, shares: PrefixSharing | None, kwargs=None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Log-probs `(B, T)`, the whole gradient of their weighted sum, and how many tokens were embedded."""
    kwargs, seen = dict(batch() if kwargs is None else kwargs), []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].numel()))
    model.zero_grad()
    with completion_positions_only(model, kwargs, KEEP, None, shares):
        logps = model(**kwargs, fused_lm_head=True).log_probs[:, -KEEP:]
    handle.remove()
    if logps.requires_grad:
        (logps * torch.arange(1, logps.numel() + 1).view(logps.shape)).sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logps.detach(), torch.cat(gradients) if gradients else torch.zeros(1), sum(seen)


@pytest.mark.parametrize("family", [*ZOO])
def test_what_is_padding_in_every_row_is_not_run(family):
    model = fused(ZOO[family]()).train()
    wider = {name: F.pad(value, (7, 0), value=-100 if name == "labels" else 0) for name, value in batch().items()}
    narrow, wide = scored(model, None), scored(model, None, wider)
    torch.testing.assert_close(wide[0], narrow[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(wide[1], narrow[1], atol=1e-5, rtol=1e-4)
    assert wide[2] == narrow[2]


@pytest.mark.parametrize("family", [*ZOO])
@pytest.mark.parametrize("gradients", [True, False])
def test_numbers_and_gradients_are_those_of_every_row_alone(family, gradients):
    model = fused(ZOO[family]()).train()
    shares = sharing()
    with torch.set_grad_enabled(gradients):
        scored(model, shares)  # tries the model out
        whole, whole_gradient, every = scored(model, None)
        logps, gradient, tokens = scored(model, shares)
    rounding = 1e-4 if family == "qwen3_next" else 1e-5  # linear attention in chunks, which begin elsewhere
    torch.testing.assert_close(logps, whole, atol=rounding, rtol=rounding)
    assert (gradient - whole_gradient).norm() <= rounding * whole_gradient.norm()
    assert every == 5 * (12 + KEEP)
    assert tokens < every / 1.5
    assert model.training


def test_completions_that_are_masked_as_a_whole_change_nothing():
    model = fused(tiny_llama())
    kwargs = batch(completions=(5, 0, 5, 1, 4))
    torch.testing.assert_close(scored(model, sharing(), kwargs)[0], scored(model, None, kwargs)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("gradients", [True, False])
def test_equal_rows_are_run_once(gradients):
    model = fused(tiny_llama())
    kwargs = batch(prompts=(12, 12, 12), completions=(5, 5, 5))
    for name in ("input_ids", "labels"):
        kwargs[name][1:] = kwargs[name][0]
    with torch.set_grad_enabled(gradients):
        scored(model, shares := sharing(), kwargs)  # tries the model out
        whole, logps = scored(model, None, kwargs), scored(model, shares, kwargs)
    assert logps[2] == whole[2] / 3
    torch.testing.assert_close(logps[0], whole[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(logps[1], whole[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "qwen3_next"])
def test_a_hybrid_has_gradients_where_all_completions_are_masked(family):
    """What is left to run is the last prompt token, and one token would be run as in decoding."""
    model = fused(ZOO[family]()).train()
    kwargs = batch(prompts=(12, 12), completions=(0, 0))
    kwargs["input_ids"][0, 11] += 1
    shares = sharing()
    scored(model, shares, kwargs)
    whole, logps = scored(model, None, kwargs), scored(model, shares, kwargs)
    assert logps[2] < whole[2]
    assert (logps[1] - whole[1]).norm() <= 1e-5


@pytest.mark.parametrize("passes", [1, 3])
def test_a_process_that_shares_less_runs_as_many_passes(passes):
    """One that has nothing to share, and one that shares in two passes, beside one that needs more of them."""
    model = fused(tiny_llama())
    whole, whole_gradient, _ = scored(model, None)
    for own in (False, True):
        shares = sharing()
        found = shares.find(model, batch(), KEEP)
        assert found is not None
        assert found.passes == 4
        rows = SharedRows(found.ids, found.starts, found.groups if own else (), passes + 3)
        shares.find = lambda *args, rows=rows: rows
        calls = []
        handle = model.model.layers[0].register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        backward = []
        model.model.layers[0].register_full_backward_hook(lambda *args, backward=backward: backward.append(1))
        scored(model, shares)  # tries the model out
        calls.clear()
        backward.clear()
        logps, gradient, _ = scored(model, shares)
        handle.remove()
        assert len(calls) == passes + 3
        assert len(backward) == passes + 3
        torch.testing.assert_close(logps, whole, atol=1e-5, rtol=1e-5)
        assert (gradient - whole_gradient).norm() <= 1e-5 * whole_gradient.norm()


class TestRefused:
    def stock(self, model, caplog, message: str, times: int = 3) -> None:
        """All calls are run as they are, with the same numbers, and this is said once."""
        caplog.set_level(logging.WARNING, LOGGER)
        whole, _, every = scored(model, None)
        shares = sharing()
        scored(model, shares)
        for _ in range(times):
            logps, _, tokens = scored(model, shares)
            torch.testing.assert_close(logps, whole)
            assert tokens == every
        assert [message in record.getMessage() for record in caplog.records if record.name == LOGGER] == [True]

    def test_a_cache_that_cannot_be_expanded(self, caplog, monkeypatch):
        def refuse(*args):
            raise NotImplementedError("no beams here")

        monkeypatch.setattr(DynamicCache, "reorder_cache", refuse)
        self.stock(fused(tiny_llama()), caplog, "cannot be expanded (NotImplementedError: no beams here)")

    def test_a_cache_that_gives_other_numbers(self, caplog, monkeypatch):
        reorder = DynamicCache.reorder_cache

        def shuffle(cache, index):
            reorder(cache, index)
            for layer in cache.layers:
                layer.values = layer.values * 1.01

        monkeypatch.setattr(DynamicCache, "reorder_cache", shuffle)
        self.stock(fused(tiny_llama()), caplog, "cache gives other numbers")

    def test_a_backbone_without_cache(self, caplog):
        model = fused(tiny_llama())
        forward = model.model.forward
        model.model.forward = lambda input_ids, attention_mask=None, position_ids=None, use_cache=None: forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
        )
        self.stock(model, caplog, "cannot be expanded (TypeError")

    def test_what_two_models_have_in_common_is_said_once(self, caplog, monkeypatch):
        monkeypatch.delattr("transformers.cache_utils.Cache.reorder_cache")
        shares = sharing()
        for _ in range(2):
            scored(fused(tiny_llama()), shares)
        assert len(caplog.records) == 1

    def test_what_cannot_be_shared_is_not_looked_for_again(self, monkeypatch):
        model, looked = fused(tiny_llama()).train(), []
        model.gradient_checkpointing_enable()
        monkeypatch.setattr("trl_openclaw.shared_prefix.make_groups", lambda *a: looked.append(1) or make_groups(*a))
        shares = sharing()
        for _ in range(3):
            scored(model, shares)
        assert len(looked) == 1

    @pytest.mark.parametrize("kind", LENGTHENED)
    def test_a_rotary_embedding_of_the_length(self, caplog, monkeypatch, kind):
        model = fused(LENGTHENED[kind]())
        self.stock(model, caplog, f"`rope_type='{kind.split()[0]}'` turns positions by the length of a call")
        assert not sharing().works_for(model)  # so that a teacher's rows are batched as without sharing
        monkeypatch.setattr(shared_prefix, "_rope_of_the_length", lambda config: None)
        model, shares, whole = fused(LENGTHENED[kind]()), sharing(), scored(model, None)[0]
        logps = scored(model, shares)[0]
        assert shares.works_for(model)  # trying it out, on less tokens, showed nothing
        assert (logps - whole).abs().max() > 1e-3  # rounding makes 1e-5

    def test_copies_that_have_a_part_of_the_rows_each(self):
        model = fused(tiny_llama())
        shares = sharing()
        tokens = []
        for wrapped in (model, nn.DataParallel(model)):  # which calls the model itself, where there is no GPU
            observed = ObservedForward(wrapped, shares.accelerator, KEEP, sharing=shares)
            observed(**batch(), fused_lm_head=True)
            with tokens_counted(model) as counts:
                observed(**batch(), fused_lm_head=True)
            tokens.append(counts[True])
        assert tokens[0] < tokens[1] == 5 * (12 + KEEP)

    def test_activation_checkpointing(self, caplog):
        model = fused(tiny_llama())
        model.gradient_checkpointing_enable()
        self.stock(model.train(), caplog, "activation checkpointing")
        model.eval()
        shares = sharing()
        scored(model, shares)
        assert scored(model, shares)[2] < scored(model, None)[2]

    def test_dropout(self, caplog):
        model = fused(tiny_llama(attention_dropout=0.5)).train()
        caplog.set_level(logging.WARNING, LOGGER)
        assert scored(model, sharing())[2] == scored(model, None)[2]
        assert "dropout is on" in caplog.text

    def test_more_than_text(self, caplog):
        kwargs = batch()
        assert sharing().find(tiny_llama(), kwargs | {"pixel_values": torch.zeros(1)}, KEEP) is None
        assert "more than text (`pixel_values`)" in caplog.text

    def test_router_loss(self, caplog):
        assert sharing().find(tiny_llama(), batch() | {"output_router_logits": True}, KEEP) is None
        assert "load-balancing loss" in caplog.text

    def test_nothing_is_said_where_nothing_could_be_shared(self, caplog):
        model = fused(tiny_llama()).train()
        model.gradient_checkpointing_enable()
        kwargs = batch(prompts=(12, 7, 3, 4, 5))
        assert sharing().find(model, kwargs, KEEP) is None
        assert not caplog.records

    def test_a_mask_with_holes_and_an_empty_prompt(self):
        for row, column in ((0, 12), (2, slice(0, 12))):
            kwargs = batch()
            kwargs["attention_mask"][row, column] = 0
            assert sharing().find(tiny_llama(), kwargs, KEEP) is None

    def test_the_model_is_as_before_when_its_forward_fails(self):
        model = fused(tiny_llama()).train()
        before = dict(vars(model.model))
        kwargs = batch()
        with (
            pytest.raises(RuntimeError, match="no"),
            completion_positions_only(model, kwargs, KEEP, None, sharing()),
        ):
            raise RuntimeError("no")
        assert dict(vars(model.model)) == before
        assert model.training


@pytest.mark.parametrize("gradients", [True, False])
def test_the_cache_is_gone_before_the_head_runs(monkeypatch, gradients):
    made, held = [], []

    class Watched(DynamicCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    def look(*args):
        gc.collect()
        held.extend(cache() is not None for cache in made)

    model, shares = fused(tiny_llama()), sharing()
    with torch.set_grad_enabled(gradients):
        scored(model, shares)  # tries the model out
        monkeypatch.setattr(prefix_passes, "DynamicCache", Watched)
        model.model.register_forward_hook(look)
        scored(model, shares)
    assert held == [False] * (2 if gradients else 1)  # with gradients one for each length of prompt


def test_weights_that_were_cast_to_try_the_model_out_are_cast_again_for_the_call(monkeypatch):
    """Some releases of PyTorch would give them to the call from autocast's cache, without a graph."""
    happened, forget = [], torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: happened.append("forgotten") or forget())
    model = fused(tiny_llama())
    model.model.layers[0].register_forward_pre_hook(lambda *args: happened.append(torch.is_grad_enabled()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scored(model, sharing())
    assert happened[: happened.index(True)] == [False] * 3 + ["forgotten"]


def test_a_model_is_in_training_afterwards_as_far_as_it_was_before():
    model = tiny_llama().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    scored(fused(model), sharing())
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("own", [{}, {"name": None}, {"name": 1}])
def test_an_attribute_is_replaced_for_a_while(own):
    thing = SimpleNamespace(**own)
    with replaced(thing, "name", 2):
        assert thing.name == 2
    assert vars(thing) == own


class TestPrefill:
    def generated(self, model, shares, **kwargs) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        seen = []
        handle = model.model.layers[0].register_forward_pre_hook(lambda m, args: seen.append(tuple(args[0].shape[:2])))
        inputs = batch()
        torch.manual_seed(1)
        with shared_prefill(model, shares):
            ids = model.generate(
                input_ids=inputs["input_ids"][:, :12], attention_mask=inputs["attention_mask"][:, :12],
                max_new_tokens=8, **kwargs,
            )  # fmt: skip
        handle.remove()
        return ids, seen

    @pytest.mark.parametrize("family", ["llama", "mistral", "lfm2"])
    @pytest.mark.parametrize("kwargs", [{"do_sample": True}, {"do_sample": False}, {"num_beams": 2}], ids=str)
    def test_the_same_tokens_and_each_prompt_once(self, family, kwargs):
        model = ZOO[family]()
        self.generated(model, shares := sharing(), **kwargs)  # tries the model out
        ids, seen = self.generated(model, shares, **kwargs)
        expected, every = self.generated(model, None, **kwargs)
        assert torch.equal(ids, expected)
        assert seen[0] == (2, 12)
        assert every[0][0] % 5 == 0
        assert seen[1:] == every[1:]

    def test_a_cache_that_gives_other_numbers_is_not_used(self, monkeypatch, caplog):
        reorder = DynamicCache.reorder_cache

        def spoil(cache, index):
            reorder(cache, index)
            for layer in cache.layers:
                layer.values = layer.values.roll(1, dims=-2)

        monkeypatch.setattr(DynamicCache, "reorder_cache", spoil)
        model = tiny_llama()
        expected = self.generated(model, None, do_sample=False)
        ids, seen = self.generated(model, shares := sharing(), do_sample=False)
        assert torch.equal(ids, expected[0])
        assert [size for size in seen if size not in expected[1]] == [(3, 16), (1, 12), (3, 4)]  # tried out
        assert not shares.works_for(model)
        monkeypatch.setattr(PrefixSharing, "_problems", lambda *args: {False: None})
        assert not torch.equal(self.generated(model, sharing(), do_sample=False)[0], expected[0])

    @pytest.mark.parametrize("make", [llama_that_refuses_a_cache, llama_with_a_wrong_cache])
    def test_a_model_is_tried_out_where_no_rows_are_equal(self, make):
        """What processes find out together, they find out whatever their rows."""
        model, shares = make(), sharing()
        forward = model.model.forward
        with torch.no_grad(), shared_prefill(model, shares), contextlib.suppress(NotImplementedError):
            kwargs = {cache_name_of(forward): DynamicCache(config=model.config)}
            model.model(input_ids=torch.tensor([[1, 2], [3, 4]]), **kwargs)
        assert not shares.works_for(model)

    def test_hidden_states_that_were_asked_for_have_all_rows(self):
        model, inputs = tiny_llama(), batch()
        with torch.no_grad(), shared_prefill(model, sharing()):
            found = model.generate(
                input_ids=inputs["input_ids"][:, :12], attention_mask=inputs["attention_mask"][:, :12],
                max_new_tokens=1, output_hidden_states=True, return_dict_in_generate=True,
            )  # fmt: skip
        assert {len(states) for states in found.hidden_states[0]} == {5}

    def test_without_a_cache_every_row_is_run(self):
        model = tiny_llama()
        ids, seen = self.generated(model, sharing(), do_sample=False, use_cache=False)
        assert torch.equal(ids, self.generated(model, None, do_sample=False)[0])
        assert seen[0] == (5, 12)

    def test_a_cache_that_holds_something_is_gone_on_from(self):
        """Equal tokens after different ones are not the same beginning."""
        model = tiny_llama()
        begun, rest = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [5, 6]])
        found = []
        for shares in (sharing(), None):
            cache = DynamicCache(config=model.config)
            with torch.no_grad(), shared_prefill(model, shares):
                kwargs = {cache_name_of(model.model.forward): cache}
                model.model(input_ids=begun, **kwargs)
                found.append(model.model(input_ids=rest, **kwargs).last_hidden_state)
        torch.testing.assert_close(*found)

    def test_nothing_is_left_on_the_model(self):
        model = tiny_llama()
        before = dict(vars(model.model))
        self.generated(model, sharing(), do_sample=False)
        assert dict(vars(model.model)) == before
