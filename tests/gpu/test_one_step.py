"""The device check: each teacher and each objective trains in bfloat16 on a GPU, and as a tiny model on a CPU."""

import math

import pytest
import torch
from device_check import CASES, PRECISIONS, REAL, TINY, Case, Scale, measured, model_of, table, trainer_of
from trainer_harness import logged, moved, snapshot

from trl_openclaw.scoring import TeacherRow
from trl_openclaw.trainer.self_test import TOLERANCE_HALF, default_tolerance

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the device check needs a CUDA device"),
]


@pytest.fixture(params=[pytest.param(TINY, id="cpu"), pytest.param(REAL, id="gpu", marks=ON_GPU)])
def scale(request) -> Scale:
    return request.param


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_one_step(tmp_path, scale, show, name, precision):
    trainer = trainer_of(CASES[name, precision], precision, scale, tmp_path)
    assert trainer.accelerator.device.type == scale.device
    assert trainer.accelerator.mixed_precision == "bf16"
    assert default_tolerance(trainer) == TOLERANCE_HALF
    before = snapshot(trainer.model)
    show(measured(name, precision, trainer))

    assert 0 <= logged(trainer, "self_test/max_gap")[0] < 20 * TOLERANCE_HALF
    assert logged(trainer, "hint/accepted") == [1.0, 1.0]
    for metric in ("loss", "grad_norm", "opd/gap_abs_mean"):
        assert all(math.isfinite(value) and value for value in logged(trainer, metric)), metric
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    changed = {name for name, is_new in moved(trainer.model, before).items() if is_new}
    assert trained <= changed
    assert not [name for name in changed - trained if ".teacher." not in name]  # an average moves, too
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_probs_are_sums_in_float32(tmp_path, scale, precision):
    """Whatever the weights are kept in: a sum over a vocabulary in bfloat16 would be a multiple of 1/16 or so."""
    trainer = trainer_of(Case(), precision, scale, tmp_path)
    rows = [TeacherRow(list(range(60, 60 + scale.prompt)), list(range(100, 100 + n))) for n in (20, 12)]
    found = trainer.scorer.score(trainer.teacher.model, rows)
    assert found.per_token_logps.dtype == torch.float32
    model = model_of(scale, PRECISIONS[precision])
    for row, logps in zip(rows, found.per_token_logps, strict=True):
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]], device=scale.device)
        with torch.no_grad(), trainer.accelerator.autocast():
            logits = model(ids).logits[0, scale.prompt - 1 : -1].float() / trainer.temperature
        expected = logits.log_softmax(-1)[range(len(logits)), row.completion_ids]
        logps = logps[: len(expected)]
        assert (logps.bfloat16() == logps).float().mean() < 0.1
        assert (logps - expected).abs().mean() < 0.02


def test_the_table_has_a_line_for_each_case():
    row = {"case": "live", "device": "cuda", "precision": "autocast", "step_seconds": 1.234, "peak_gib": 12.5}
    rows = [{**row, "loss": 0.5, "gap": 1.25}, {**row, "case": "another model", "loss": -0.5, "gap": 0.25}]
    assert table(rows) == [
        "case           precision  step s  peak GiB     loss     gap",
        "live           autocast     1.23     12.50    0.500   1.250",
        "another model  autocast     1.23     12.50   -0.500   0.250",
    ]
