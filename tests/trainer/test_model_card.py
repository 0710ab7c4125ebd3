"""The model card: what it says of each trainer, a header that parses, and a quick start that runs."""

import re

import pytest
from huggingface_hub import HfApi, ModelCard, ModelCardData
from peft import LoraConfig
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import ScriptedTeacher, always_replies, judge_that, make_trainer, prompts

from trl_openclaw import PERSONAS, CombineTrainer, FunctionNextState, OPDTrainer, OutcomeJudge, RuleJudge, __version__

SCORES = {"judge": None, "next_state": None}


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "models" / "tiny-llama"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make(tmp_path):
    def made(trainer_class=OPDTrainer, **settings):
        return make_trainer(tmp_path / "out", trainer_class, **settings)

    return made


def card_of(trainer, **given) -> ModelCard:
    trainer.create_model_card(**given)
    return ModelCard.load(f"{trainer.args.output_dir}/README.md")  # raises where the header is not valid


def setting(card: ModelCard, name: str) -> str:
    """A row of the card's table."""
    return re.search(rf"^\| {re.escape(name)} \| (.*) \|$", card.text, re.MULTILINE)[1]


def settings(card: ModelCard) -> list[str]:
    return [name for name in re.findall(r"^\| ([^|]+) \| .* \|$", card.text, re.MULTILINE) if name.strip("- ")]


def from_the_hub(name: str = "someone/tiny-llama"):
    """A model as if it had come from the Hub."""
    model = tiny_llama()
    model.config._name_or_path = name
    return model


def quick_start(card: ModelCard) -> str:
    return re.search(r"## Quick start\n\n```python\n(.*?)```", card.text, re.DOTALL)[1]


@pytest.mark.parametrize("peft", [None, LoraConfig(r=2, target_modules=["q_proj"])], ids=["full", "lora"])
def test_quick_start_of_a_local_model_runs(make, model_dir, peft, capsys, monkeypatch):
    trainer = make(model=model_dir, peft_config=peft)
    trainer.train()
    trainer.save_model()
    code = quick_start(card_of(trainer))
    calls = {}
    monkeypatch.setattr("builtins.print", lambda *said: calls.update(said=said))
    exec(compile(code, "README.md", "exec"), calls)
    assert f'model="{trainer.args.output_dir}"' in code
    assert isinstance(calls["said"][0], str)
    assert len(calls["said"][0]) > 0


def test_local_model_is_called_by_its_folder(make, model_dir):
    card = card_of(make(model=model_dir))
    assert "# Model Card for tiny-llama-OPD\n" in card.text
    assert "a fine-tuned version of `tiny-llama`, trained with OPD on 8 prompts by trl-openclaw" in card.text
    assert "None" not in card.content
    assert model_dir not in card.content  # where it lies here concerns nobody
    assert card.data.base_model is None  # the Hub takes no folder for a name
    assert card.data.to_dict().keys() == {"library_name", "model_name", "tags"}


def test_local_model_is_called_by_its_folder_from_the_same_place(make, model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "version of `tiny-llama`, trained" in card_of(make(model="models/tiny-llama")).text


def test_model_from_the_hub_is_linked(make):
    card = card_of(make(model=from_the_hub()), model_name="mine", dataset_name="someone/questions")
    assert "# Model Card for mine\n" in card.text
    assert "[someone/tiny-llama](https://huggingface.co/someone/tiny-llama)" in card.text
    assert "8 prompts of [someone/questions](https://huggingface.co/datasets/someone/questions)" in card.text
    assert isinstance(card.data, ModelCardData)
    assert (card.data.base_model, card.data.model_name) == ("someone/tiny-llama", "mine")
    assert card.data.datasets == "someone/questions"
    assert {"trl", "trl-openclaw", "opd", "generated_from_trainer"} <= set(card.data.tags)


def test_model_without_a_name(make):
    card = card_of(make(model=tiny_llama()))
    assert "# Model Card for out\n" in card.text
    assert "a model without a name, trained" in card.text
    assert "None" not in card.content


@pytest.mark.parametrize("path", ["runs/models/gone", "./gone", "/gone/tiny-llama", "no such/name"])
def test_what_is_no_name_on_the_hub_is_not_linked(make, path):
    card = card_of(make(model=from_the_hub(path)), dataset_name=path)
    assert f"https://huggingface.co/{path}" not in card.text
    assert (card.data.base_model, card.data.datasets) == (None, None)


def test_folder_with_data_is_named_but_not_linked(make, tmp_path, monkeypatch):
    (tmp_path / "my" / "questions").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given, named in (("my/questions", "`my/questions`"), (str(tmp_path / "my" / "questions"), "`questions`")):
        card = card_of(make(), dataset_name=given)
        assert f"on 8 prompts of {named} by" in card.text
        assert card.data.datasets is None


def test_says_how_opd_trained(make):
    config = {"learning_rate": 2e-5, "logp_gap_clip": 1.5, "max_steps": 1, "lr_scheduler_type": "constant"}
    trainer = make(judge=OutcomeJudge(), next_state=PERSONAS["one-sentence"], config=config)
    trainer.train()
    card = card_of(trainer)
    assert "Trained with OPD, a method of [OpenClaw-RL: Train Any Agent Simply by Talking](https" in card.text
    assert setting(card, "advantage of a token") == "`A`"
    assert "within plus and minus C = 1.5 nats" in setting(card, "A")
    assert setting(card, "teacher") == "the model itself as it was at the start (`frozen`)"
    assert "drawn by the judge" in setting(card, "hints")
    assert (setting(card, "judge"), setting(card, "next states")) == ("`OutcomeJudge`", "`Persona` (one-sentence)")
    assert (setting(card, "learning rate"), setting(card, "optimizer steps")) == ("2e-05, constant", "1")
    assert setting(card, "replies per step") == "4 (2 to a prompt)"
    assert f"### Framework versions\n\n- trl-openclaw: {__version__}\n- TRL: 1.16" in card.text
    assert "wang2026openclawrl" in card.text


def test_says_how_combine_trained(make):
    trainer = make(
        CombineTrainer,
        judge=RuleJudge(lambda turn: 1),
        reward_funcs=[lambda completions, **kwargs: [1.0] * len(completions)],
        config={"rl_weight": 0.5, "logp_gap_clip": None, "teacher": "live"},
    )
    card = card_of(trainer)
    assert "trained with Combine on" in card.text
    assert setting(card, "advantage of a token") == "`0.5 * r + A`"
    assert setting(card, "A").endswith("under the student")
    assert setting(card, "teacher") == "the model itself as it is at each step (`live`)"
    assert setting(card, "r") == "`<lambda>` + the judge's score"
    assert setting(card, "judge") == "`RuleJudge` (<lambda>)"
    assert setting(card, "next states") == "`always_replies`"
    assert "combine" in card.data.tags


def test_says_which_objective_trained(make):
    config = {"opd_loss": "topk_surrogate", "topk": 2, "reward_scale": 1.5, "opd_reference": "unhinted_teacher"}
    card = card_of(make(CombineTrainer, config={**config, "opd_weight": 0.5, "control": "random_hint"}))
    assert setting(card, "advantage of a token") == "`r`"
    assert setting(card, "distillation loss") == (
        "`topk_surrogate`: the student's best 2 tokens at each position, within plus and minus C = 1 nats, times 0.5"
    )
    assert setting(card, "beyond the teacher") == "lambda 1.5, seen from `unhinted_teacher`"
    assert setting(card, "control arm") == "`random_hint`"
    assert "`sequence` of at most 3" in setting(card, "hints")
    card = card_of(make(config={"opd_loss": "full_divergence", "divergence": "jsd"}))
    assert setting(card, "distillation loss") == "`full_divergence`: jsd (beta 0.5) over the whole vocabulary"
    assert {"advantage of a token", "A", "beyond the teacher", "control arm"}.isdisjoint(settings(card))


def test_an_average_stays_the_model_itself_after_it_has_moved(make):
    trainer = make(config={"teacher": "ema", "teacher_ema_rate": 0.1})
    trainer.train()
    assert setting(card_of(trainer), "teacher") == "the model itself as its moving average, rate 0.1 (`ema`)"


def test_says_how_binary_rl_trained(make):
    trainer = make(CombineTrainer, config={"opd_weight": 0, "reward_baseline": "group"})
    card = card_of(trainer)
    assert "trained with Binary RL on" in card.text
    assert setting(card, "advantage of a token") == "`r`"
    assert setting(card, "r") == "the judge's score, relative to the group"
    assert not {"A", "teacher", "hints"} & set(settings(card))


def test_says_where_hints_came_from_without_a_judge(make):
    rows = prompts().map(lambda row: {"privileged_context": "4"})
    card = card_of(make(data=rows, **SCORES))
    assert setting(card, "hints").startswith("the dataset column `privileged_context`")
    assert not {"judge", "next states", "r"} & set(settings(card))


@pytest.mark.parametrize(
    ("teacher", "named"),
    [
        (lambda: from_the_hub("someone/large"), "[someone/large](https://huggingface.co/someone/large)"),
        (tiny_llama, "another model, without a name"),
        (lambda: ScriptedTeacher(lambda row: 0.0), "`ScriptedTeacher`"),
    ],
)
def test_names_an_external_teacher(make, teacher, named):
    kwargs = {"teacher_model": teacher()}
    if not isinstance(kwargs["teacher_model"], ScriptedTeacher):
        kwargs["teacher_processing_class"] = tiny_tokenizer()
    card = card_of(make(**kwargs, **SCORES))
    assert setting(card, "teacher") == named
    assert setting(card, "hints") == "none (classic on-policy distillation)"


def test_column_of_next_states_and_a_function_are_named(make):
    rows = prompts().map(lambda row: {"next_state": "Hm."})
    card = card_of(make(data=rows, judge=judge_that(), next_state=None))
    assert setting(card, "next states") == "the dataset column `next_state`"

    def run_tests(turn, row):
        return "passed"

    card = card_of(make(next_state=FunctionNextState(run_tests)))
    assert setting(card, "next states") == "`FunctionNextState` (run_tests)"


def test_pushed_card_loads_from_the_hub(make, model_dir, monkeypatch):
    pushed = {}
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **given: pushed.update(given))
    trainer = make(model=model_dir, next_state=always_replies)
    trainer.hub_model_id = "someone/mine"
    trainer.push_to_hub(dataset_name=model_dir, tags="mine")
    card = ModelCard.load(f"{pushed['folder_path']}/README.md")
    assert pushed["repo_id"] == "someone/mine"
    assert 'model="someone/mine"' in quick_start(card)
    assert "mine" in card.data.tags
    assert "someone/mine" in card.text
    assert str(trainer.args.output_dir) not in card.content


def test_card_of_a_checkpoint_loads_that_checkpoint(make, model_dir):
    trainer = make(model=model_dir, config={"save_strategy": "steps", "save_steps": 1})
    trainer.train()
    card = ModelCard.load(f"{trainer.args.output_dir}/README.md")
    assert f'model="{trainer.args.output_dir}/checkpoint-1"' in quick_start(card)
    trainer.save_model()
    assert f'model="{trainer.args.output_dir}"' in quick_start(card_of(trainer))


def test_link_to_the_tracker_is_kept(make, monkeypatch):
    monkeypatch.setattr("trl.trainer.base_trainer.get_comet_experiment_url", lambda: "https://www.comet.com/my/run")
    assert re.search(r"^\[<img .*\]\(https://www\.comet\.com/my/run\)$", card_of(make()).text, re.MULTILINE)


def test_other_processes_write_no_card(make, tmp_path, monkeypatch):
    trainer = make()
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.create_model_card()
    assert not (tmp_path / "out" / "README.md").exists()
