"""Alarms on the logs, alone and in a real training whose completions have a scripted length."""

import math

import pytest
import yaml
from accelerate import PartialState
from trainer_harness import judge_that, logged, make_trainer, prompts
from transformers import TrainerControl, TrainerState

from trl_openclaw.trainer.alarms import WATCHED, BandAlarm, parse_bands

EOS = 256


def lengths_by_step(*lengths: int):
    """A rollout whose completions have this many tokens at each step, the end among them."""

    def rollout(prompts, trainer):
        length = lengths[min(trainer.state.global_step, len(lengths) - 1)]
        ids = [[65] * (length - 1) + [EOS]] * len(prompts)
        return {
            "prompt_ids": trainer.tokenize_prompts(prompts),
            "completion_ids": ids,
            "logprobs": [[-1.0] * length] * len(prompts),
        }

    return rollout


def train(tmp_path, alarm, *lengths, **kwargs):
    config = {"max_steps": len(lengths), **kwargs.pop("config", {})}
    trainer = make_trainer(tmp_path, callbacks=[alarm], rollout_func=lengths_by_step(*lengths), config=config, **kwargs)
    trainer.train()
    return trainer


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("trainer.alarms")]


class TestInTraining:
    def test_warns_once_per_excursion_and_again_after_a_return(self, tmp_path, caplog):
        trainer = train(tmp_path, BandAlarm({"length": (2, 4)}), 3, 6, 5, 2, 6, 4, 1)
        assert logged(trainer, "completions/mean_length") == [3, 6, 5, 2, 6, 4, 1]  # the name is TRL's
        first, second, third = warned(caplog)
        assert (
            "`completions/mean_length` is 6 at step 2, outside of its band from 2 to 4. Usual cause: replies grow when "
            in first
        )
        assert "is 6 at step 5" in second
        assert "is 1 at step 7, outside of its band from 2 to 4. Usual cause: replies shrink when " in third

    def test_patience_counts_logs_in_a_row(self, tmp_path, caplog):
        train(tmp_path, BandAlarm({"length": (None, 4)}, patience=2), 6, 3, 6, 5, 6)
        (message,) = warned(caplog)
        assert "is 5 at step 4, outside of its band from no bound to 4, in 2 logs in a row." in message

    def test_stop_ends_the_training_after_the_step(self, tmp_path, caplog):
        trainer = train(tmp_path, BandAlarm({"length": (2, None)}, "stop", patience=2), 3, 1, 1, 1, 1)
        assert trainer.state.global_step == 3
        (message,) = warned(caplog)
        assert message.endswith("Training stops here.")
        assert "at step 3, outside of its band from 2 to no bound" in message

    def test_inside_the_bands_nothing_happens(self, tmp_path, caplog):
        bands = {"length": (1, 6), "entropy": (0, 100), "truncation": (0, 1)}
        trainer = train(tmp_path, BandAlarm(bands, "stop"), 2, 6)
        assert trainer.state.global_step == 2
        assert warned(caplog) == []

    @pytest.mark.parametrize(("name", "band"), [("entropy", (100, None)), ("truncation", (0.5, None))])
    def test_the_other_names_are_what_trl_logs(self, tmp_path, caplog, name, band):
        train(tmp_path, BandAlarm({name: band}), 3)
        (message,) = warned(caplog)
        assert f"`{WATCHED[name].metric}` is " in message
        assert WATCHED[name].below in message

    def test_evaluations_are_not_watched(self, tmp_path, caplog):
        trainer = train(
            tmp_path,
            BandAlarm({"length": (None, 4), "truncation": (0, 1)}, "stop"),
            *(3, 3),
            eval_dataset=prompts(4),
            config={"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        )
        trainer.rollout_func = lengths_by_step(6)
        trainer.evaluate()
        assert logged(trainer, "eval_completions/mean_length")[-1] == 6
        assert trainer.state.global_step == 2
        assert warned(caplog) == []

    def test_a_batch_without_signal_has_no_entropy(self, tmp_path, caplog):
        trainer = train(tmp_path, BandAlarm({"entropy": (0.01, None)}), 3, 3, judge=judge_that(hint=None))
        assert logged(trainer, "entropy") == [0, 0]  # TRL's mean over no token
        assert warned(caplog) == []

    def test_each_training_starts_anew(self, tmp_path, caplog):
        alarm = BandAlarm({"length": (None, 4)}, patience=2)
        train(tmp_path / "a", alarm, 6)
        train(tmp_path / "b", alarm, 6)
        assert warned(caplog) == []


class TestAlone:
    @pytest.fixture(autouse=True)
    def _logger_state(self):
        PartialState()  # accelerate's logger wants to know which process it is

    def feed(self, alarm, *logs) -> bool:
        """Whether it stops the training."""
        control = TrainerControl()
        for step, entry in enumerate(logs, start=1):
            alarm.on_log(None, TrainerState(global_step=step), control, logs=entry)
        return control.should_training_stop

    @pytest.mark.parametrize("value", [math.nan, None])  # TRL logs None where every value was NaN
    @pytest.mark.parametrize("band", [(0.1, None), (None, 5.0)])
    def test_what_is_no_number_is_outside(self, caplog, value, band):
        assert self.feed(BandAlarm({"entropy": band}, "stop"), {"entropy": value})
        (message,) = warned(caplog)
        assert "`entropy` is nan at step 1" in message
        assert "numbers overflow" in message

    def test_bounds_belong_to_the_band(self):
        logs = [{"completions/mean_length": 2}, {"completions/mean_length": 4}]
        assert not self.feed(BandAlarm({"length": (2, 4)}, "stop"), *logs)

    def test_a_log_without_the_metric_neither_counts_nor_ends_an_excursion(self, caplog):
        alarm = BandAlarm({"length": (None, 4)}, patience=2)
        self.feed(alarm, {"completions/mean_length": 6}, {"loss": 1.0}, {"completions/mean_length": 6})
        assert len(warned(caplog)) == 1
        assert "at step 3" in warned(caplog)[0]

    def test_metrics_are_counted_apart(self, caplog):
        alarm = BandAlarm({"length": (None, 4), "truncation": (None, 0.5)}, patience=2)
        length, truncation = "completions/mean_length", "completions/clipped_ratio"
        self.feed(alarm, {length: 6, truncation: 0}, {length: 3, truncation: 0.9}, {length: 6, truncation: 0.9})
        (message,) = warned(caplog)
        assert "`completions/clipped_ratio` is 0.9 at step 3" in message

    def test_entropy_counts_again_once_there_is_a_signal(self, caplog):
        silent, later = {"entropy": 0.0, "train_rows/share": 0.0}, {"entropy": 0.0}  # later steps of that batch
        alarm = BandAlarm({"entropy": (0.1, None)})
        self.feed(alarm, silent, later, {"entropy": 0.0, "train_rows/share": 0.5})
        (message,) = warned(caplog)
        assert "at step 3" in message


class TestSettings:
    def test_from_a_configuration(self):
        text = "{length: [20, 400], entropy: [0.3, null], truncation: [null, 0.2]}"
        bands = {"length": (20, 400), "entropy": (0.3, None), "truncation": (None, 0.2)}
        assert parse_bands(yaml.safe_load(text)) == bands
        assert parse_bands('{"length": [20, 400], "entropy": [0.3, null], "truncation": [null, 0.2]}') == bands
        assert parse_bands(bands) == bands
        assert parse_bands(None) == parse_bands({}) == parse_bands("null") == {}

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("length: 3", r"`alarms` must be a mapping, or one as JSON, got 'length: 3'"),
            ([20, 400], r"`alarms` must map length, entropy, truncation to \[low, high\], got \[20, 400\]"),
            ("[20, 400]", r"`alarms` must map length"),
            (True, r"`alarms` must map length"),
            ({"lenght": [1, 2]}, r"`alarms.lenght`: no such metric is watched. Use length, entropy, truncation\."),
            ({1: [1, 2]}, r"`alarms.1`: no such metric is watched"),
            ({"length": 20}, r"`alarms.length` must be \[low, high\], .* got 20"),
            ({"length": "20, 400"}, r"`alarms.length` must be \[low, high\], .* got '20, 400'"),
            ({"length": "ab"}, r"`alarms.length` must be \[low, high\], .* got 'ab'"),
            ({"length": None}, r"`alarms.length` must be \[low, high\]"),
            ({"length": [20]}, r"`alarms.length` must be \[low, high\]"),
            ({"length": [1, 2, 3]}, r"`alarms.length` must be \[low, high\]"),
            ({"length": ["20", 400]}, r"`alarms.length\[0\]` must be a finite number at least 0 or None, got '20'"),
            (yaml.safe_load("entropy: [1e-3, 2]"), r"`alarms.entropy\[0\]` must be .* got '1e-3'"),  # YAML's text
            ({"length": [1, True]}, r"`alarms.length\[1\]` must be .* got True"),
            ({"length": [1, float("nan")]}, r"`alarms.length\[1\]` must be .* got nan"),
            ('{"length": [1, Infinity]}', r"`alarms.length\[1\]` must be .* got inf"),
            ({"entropy": [-1, None]}, r"`alarms.entropy\[0\]` must be a finite number at least 0"),
            ({"truncation": [None, 20]}, r"`alarms.truncation\[1\]` must be .* at most 1 or None, got 20"),
            ({"length": [400, 20]}, r"`alarms.length` .* got \[400, 20\]: the low bound is above the high one"),
            ({"length": [None, None]}, r"`alarms.length` has neither a low nor a high bound"),
        ],
    )
    def test_a_bad_entry_is_named(self, value, message):
        with pytest.raises(ValueError, match=message):
            parse_bands(value, "alarms")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"bands": {}}, "`bands` holds nothing to watch. Give a band to one of length, entropy, truncation"),
            ({"bands": {"length": (2, 1)}}, r"`bands.length` must be \[low, high\], got \(2, 1\)"),
            ({"action": "halt"}, "`action` must be one of warn, stop, got 'halt'"),
            ({"action": True}, "`action` must be one of warn, stop, got True"),
            ({"patience": 0}, "`patience` must be a whole number at least 1, got 0"),
            ({"patience": "2"}, "`patience` must be a whole number at least 1, got '2'"),
        ],
    )
    def test_wrong_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            BandAlarm(**{"bands": {"length": (1, 2)}, **arguments})
