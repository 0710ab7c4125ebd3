"""What the benchmarks share: all trainers get the same work."""

import subprocess

import pytest
from benchmark_script import save_tiny_model
from tiny import tiny_tokenizer

from benchmarks import common
from benchmarks.common import KINDS, PeakMeter, Shape, StepTimer, in_fresh_process, make_trainer, prompt_of
from trl_openclaw.trainer.step_profile import GIB, memory_key, seconds_key


@pytest.fixture
def model(tmp_path):
    return save_tiny_model(tmp_path / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_does_the_same_work(kind, model, tmp_path):
    shape = Shape(prompt=160, completions=4, tokens=4, rows=2)
    trainer = make_trainer(kind, model, shape, 4, str(tmp_path))
    sampled, micro_batches = [], []
    generate, step = trainer.model.generate, trainer.training_step

    def generating(*args, **kwargs):
        ids = generate(*args, **kwargs)
        before = kwargs["input_ids"].size(1)
        sampled.append((len(ids), before, ids.size(1) - before))
        return ids

    def stepping(*args, **kwargs):
        micro_batches.append(trainer.state.global_step)
        return step(*args, **kwargs)

    trainer.model.generate, trainer.training_step = generating, stepping
    timer = StepTimer()
    trainer.add_callback(timer)
    trainer.train()
    timer.check(kind, shape)
    template = tiny_tokenizer().apply_chat_template
    lengths = [
        len(template(prompt_of(tiny_tokenizer(), tokens), add_generation_prompt=True)["input_ids"])
        for tokens in (40, 160)
    ]
    assert lengths[1] == pytest.approx(160, abs=2)
    assert sampled == [(4, length, 4) for length in (lengths[0], *[lengths[1]] * 4)]
    assert trainer.generation_config.min_new_tokens == 4  # a tiny model seldom ends by itself
    assert micro_batches == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (len(timer.seconds), len(timer.logs)) == (4, 4)  # the first step warms up


def test_a_short_prompt_is_the_question_alone():
    (message,) = prompt_of(tiny_tokenizer(), 0)
    assert message["content"] == common.PROMPT


def test_stock_has_the_split_too(model):
    timer = StepTimer()
    common.run_steps("profiled_grpo", model, Shape(completions=2, tokens=4), 1, timer, meter=PeakMeter)
    (log,) = timer.logs
    assert all(log[seconds_key(part)] > 0 for part in ("generate", "tokenize", "rewards", "student", "optimizer"))
    assert log[seconds_key("teacher")] == 0
    assert 0.1 < log[memory_key("student")] < 8


def test_the_meter_forgets_what_it_has_told():
    torch = pytest.importorskip("torch")
    meter = PeakMeter(torch.device("cpu"))
    block = torch.ones(64 * 2**20 // 4)
    with_block = meter()
    del block
    meter()
    assert with_block - meter() > GIB / 32


def test_a_fresh_process_answers_in_json_or_says_why_not(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, json, time\npoint = json.loads(sys.argv[2])\ntime.sleep(point['sleep'])\n"
                      "print('words')\nprint(json.dumps({'twice': 2 * point['n']}))\n")  # fmt: skip
    assert in_fresh_process(str(script), {"n": 4, "sleep": 0}) == {"twice": 8}
    with pytest.raises(RuntimeError, match=r"(?s)exit status 1: .*KeyError: 'n'"):
        in_fresh_process(str(script), {"sleep": 0})
    with pytest.raises(subprocess.TimeoutExpired):
        in_fresh_process(str(script), {"n": 4, "sleep": 60}, timeout=0.5)


def test_a_micro_batch_has_no_more_rows_than_a_step():
    assert [Shape(completions=8, rows=rows).micro_batch for rows in (0, 4, 8, 16)] == [8, 4, 8, 8]
    said = "8 completions of 64 tokens of a prompt of 1,024 tokens, 4 in a micro-batch"
    assert str(Shape(1024, 8, 64, rows=4)) == said
    assert str(Shape(completions=2, rows=4)) == "2 completions of 64 tokens of a short prompt"
