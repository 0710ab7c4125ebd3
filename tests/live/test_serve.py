"""`trl-openclaw serve`: its settings, what it refuses, and that it starts without torch where no model runs in it."""

import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import openai
import pytest
from live.gateway_harness import wait_for
from tiny import tiny_llama, tiny_tokenizer

from trl_openclaw import LLMJudge, cli
from trl_openclaw.judges.named import build_judge
from trl_openclaw.live.gateway.serve import listen, main
from trl_openclaw.live.gateway.settings import ServeSettings, read_settings
from trl_openclaw.live.store import Store


def complaint(capsys, *args):
    """The one line that a wrong command line is answered with."""
    assert main(args) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "`--model` is missing"),
        (["--model", "m", "--host", "0.0.0.0"], "Give `--keys FILE`"),
        (["--model", "m", "--keys", "/no/such/file"], "cannot be read"),
        (["--model", "/no/such/model"], "cannot be used"),
        (["--model", "m", "--judge", "llm"], "needs `judge_model`"),
        (["--model", "m", "--judge", "no.such.judge"], "cannot be imported"),
        (["--model", "m", "--engine", "vllm", "--engine-url", "localhost:1"], "must start with http://"),
        (["--model", "m", "--engine", "vllm", "--served-model-name", "x"], "vLLM's own setting"),
        (["--model", "m", "--top-p", "2"], "`top_p`"),
        (["--model", "m", "--port", "99999"], "`port`"),
        (["--model", "m", "--max-in-flight", "0"], "`max_in_flight` must be at least 1"),
        (["--model", "m", "--judge-extra-body", "{"], "is no JSON"),
        (["--model", "m", "--allow-origin", "*"], "`allow_origin` names pages"),
        (["--model", "m", "--allow-origin", "null,http://*"], "`allow_origin` names pages"),
        (["--model", "m", "--allow-origin", "http://localhost:3000/page"], "`allow_origin` names pages"),
        (["--model", "m", "--allow-host", "*"], "`allow_host` names hosts"),
        (["--model", "m", "--allow-host", "http://localhost"], "`allow_host` names hosts"),
        (["--model", "m", "--config", "/no/such/file"], "cannot be read as YAML"),
    ],
    ids=str,
)
def test_one_line_says_what_is_wrong(capsys, monkeypatch, tmp_path, args, said):
    monkeypatch.chdir(tmp_path)  # where the default folder is nobody else's
    assert said in complaint(capsys, *args)


def test_a_port_that_is_taken(capsys):
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "Cannot listen at 127.0.0.1" in complaint(capsys, "--model", "m", "--engine", "vllm", "--port", port)


def test_a_store_that_is_none(capsys, tmp_path):
    (tmp_path / "store.db").write_text("this is no database, though it is long enough to be one" * 100)
    said = complaint(capsys, "--model", "m", "--engine", "vllm", "--port", "0", "--live-dir", str(tmp_path))
    assert "store.db" in said


def test_a_store_that_another_gateway_serves(capsys, tmp_path, stub):
    args = ("--engine", "vllm", "--model", "stub", "--engine-url", stub.base_url, "--live-dir", str(tmp_path))
    with served(*args) as (process, _):
        said = complaint(capsys, *args, "--port", "0")
        assert f"Another gateway (process {process.pid}) already serves {tmp_path}" in said
        process.kill()
        process.wait()
        with served(*args) as (_, said):  # free again
            assert "Ready." in said


def test_a_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").touch()
    said = complaint(capsys, "--engine", "vllm", "--model", "m", "--port", "0", "--live-dir", str(tmp_path / "file"))
    assert str(tmp_path / "file") in said


def test_settings_of_a_file_and_of_the_command_line(tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text("model: m\nport: 1234\ntemperature: 1\njudge_extra_body: {seed: 3}\nlog_content: true\n")
    found = read_settings(["--config", str(config), "--port", "99", "--no-log-content"])
    assert (found.model, found.port, found.temperature, found.log_content) == ("m", 99, 1, False)
    assert found.judge_extra_body == {"seed": 3}
    assert read_settings(["--model", "m", "--max_tokens", "7"]).max_tokens == 7  # as recipes write their options
    for text, said in (
        ("model: m\nprot: 1", "prot"),
        ("model: m\nport: high", "`port`"),
        ("model: m\nport: true", "`port`"),
        ("model: m\nengine: sglang", "`engine`"),
        ("model: m\nlog_content: 1", "`log_content`"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_settings(["--config", str(config)])


def test_what_the_gateway_gets_of_the_settings():
    options = ServeSettings(model="m", max_body_mb=0.5, timeout=3, judge_concurrency=2).options
    assert (options.max_body, options.timeout, options.judge_concurrency) == (2**19, 3, 2)
    assert "127.0.0.1" in options.hosts
    assert ServeSettings(model="m", host="0.0.0.0").options.hosts is None


def test_names_and_pages_that_are_allowed(tmp_path):
    args = ["--model", "m", "--allow-origin", "app://Obsidian.md, null", "--allow-origin", "http://localhost:3000/"]
    with pytest.raises(ValueError, match="`allow_origin: null` needs `keys`"):
        read_settings(args)
    args += ["--keys", "keys.txt"]
    options = read_settings([*args, "--allow_host", "host.docker.internal:8700,nas"]).options
    assert options.origins == ("app://obsidian.md", "null", "http://localhost:3000")
    assert options.hosts[-2:] == ("host.docker.internal", "nas")
    assert "127.0.0.1" in options.hosts
    config = tmp_path / "serve.yaml"
    for text, found in (("file://", ("file://",)), ("[file:///, 'null']", ("file://", "null")), ("", ())):
        config.write_text(f"model: m\nkeys: keys.txt\nallow_origin: {text}\n")
        assert read_settings(["--config", str(config)]).options.origins == found
    config.write_text("model: m\nallow_host: [nas, 3]\n")
    with pytest.raises(ValueError, match="`allow_host` is a text, or a list of texts"):
        read_settings(["--config", str(config)])
    assert ServeSettings(model="m").options.origins == ()
    assert ServeSettings(model="m", host="0.0.0.0", allow_host="nas").options.hosts is None  # any is fine there


def test_the_judge_is_that_of_the_recipes():
    settings = read_settings(["--model", "m", "--judge", "llm", "--judge-model", "j", "--judge-num-votes", "5"])
    judge = build_judge(settings)
    assert isinstance(judge, LLMJudge)
    assert (judge.client.model, judge.num_votes) == ("j", 5)


def test_our_command_lists_it_and_passes_on_the_rest(capsys):
    assert cli.main([]) == 0
    assert "serve" in capsys.readouterr().out
    assert cli.main(["serve"]) == 2
    assert "`--model` is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["serv"])
    assert "did you mean 'serve'?" in capsys.readouterr().err


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "trl_openclaw.live.gateway.serve")
    assert cli.main(["serve"]) == 2
    assert "pip install 'trl-openclaw[live]'" in capsys.readouterr().err


def test_nothing_heavy_is_loaded_where_vllm_samples():
    heavy = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy", "pandas")
    code = (
        "import sys\nimport trl_openclaw.live.gateway.serve, trl_openclaw.live.engines.vllm\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@contextmanager
def served(*options, until="Ready."):
    """`trl-openclaw serve` in a process of its own: the process, and what it said up to the line that begins so."""
    command = [sys.executable, "-m", "trl_openclaw.cli", "serve", "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        said = [""]
        while not said[-1].startswith(until) and process.poll() is None:
            said.append(process.stdout.readline())
        yield process, "".join(said)
    finally:
        process.kill()
        process.wait()


def address(said):
    return said.split(" at ")[1].split()[0]


def client_of(said):
    return openai.OpenAI(base_url=f"{address(said)}/v1", api_key="any", max_retries=0)


def test_a_model_in_the_process(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    options = ("--model", tmp_path / "model", "--served-model-name", "tiny", "--live-dir", tmp_path, "--max-tokens", 5)
    with served(*options) as (_, said), client_of(said) as client:
        assert "in this process, on" in said
        with urllib.request.urlopen(f"{address(said)}/", timeout=30) as page:
            assert b"<!doctype html>" in page.read().lower()
        reply = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert reply.usage.completion_tokens <= 5
    (turn,) = Store(tmp_path / "store.db").all_turns()
    assert (turn.turn_id, turn.model) == (reply.id, "tiny")
    assert (tmp_path / "store.db").stat().st_mode & 0o077 == 0


def test_a_gateway_that_is_killed_loses_no_reply(tmp_path, stub):
    """Whatever a client has in full is in the store, and the next gateway goes on with it."""
    answered = {}
    options = ("--engine", "vllm", "--model", "stub", "--engine-url", stub.base_url, "--live-dir", tmp_path)
    for generation in range(3):
        with served(*options) as (process, said), client_of(said) as client:
            for place in range(10 * generation, 10 * generation + 10):
                messages = [{"role": "user", "content": f"n{place}"}]
                reply = client.chat.completions.create(model="stub", messages=messages)
                answered[reply.id] = reply.choices[0].message.content
            os.kill(process.pid, signal.SIGKILL)  # at once after the last byte
            process.wait()
    store = Store(tmp_path / "store.db")
    assert {turn.turn_id: turn.reply["content"] for turn in store.all_turns()} == answered


def test_what_it_says_when_it_starts_and_how_it_ends(tmp_path, stub):
    options = ("--engine", "vllm", "--model", "stub", "--engine-url", stub.base_url, "--live-dir", tmp_path)
    with served(*options) as (process, said):
        lines = ("serves stub", stub.base_url, "without a key", str(tmp_path), f"OPENAI_BASE_URL={address(said)}/v1")
        assert [line for line in lines if line not in said] == []
        with client_of(said) as client:
            stub.pause, stub.pieces = 0.1, 10
            messages = [{"role": "user", "content": "hi"}]
            stream = client.chat.completions.create(model="stub", messages=messages, stream=True)
            next(stream)
            process.send_signal(signal.SIGTERM)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text.endswith("w7")  # what was begun is brought to its end
        assert process.wait(30) == -signal.SIGTERM
    assert len(list(Store(tmp_path / "store.db").all_turns())) == 1


def test_an_engine_that_is_not_up_yet_keeps_nothing_from_starting(tmp_path, stub):
    stub.stop()
    options = ("--engine", "vllm", "--model", "stub", "--engine-url", stub.base_url, "--live-dir", tmp_path)
    with served(*options, until="The engine cannot reply yet") as (_, said):
        assert "cannot be reached" in said
        stub.start()
        with client_of(said) as client:
            reply = client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "hi"}])
        assert reply.choices[0].message.content == "stub: hi"


def test_a_judge_that_is_not_up_yet_keeps_nothing_from_starting(tmp_path, stub):
    options = ("--engine", "vllm", "--model", "stub", "--engine-url", stub.base_url, "--live-dir", tmp_path)
    nobody = "http://127.0.0.1:9/v1"
    judge = ("--judge", "llm", "--judge-model", "j", "--judge-base-url", nobody)
    with served(*options, *judge, until="Nothing is judged yet") as (_, said), client_of(said) as client:
        assert f"{nobody} (model 'j') cannot be reached" in said
        reply = client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "hi"}])
        assert reply.choices[0].message.content == "stub: hi"


def test_the_model_that_is_served_as_judge(tmp_path):
    tiny_llama(max_position_embeddings=8192).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    model = ("--model", tmp_path / "model", "--served-model-name", "tiny", "--live-dir", tmp_path, "--max-tokens", 5)
    judge = ("--judge", "local", "--judge-model", tmp_path / "model", "--judge-max-tokens", 4)
    store = Store(tmp_path / "store.db")
    with served(*model, *judge) as (_, said), client_of(said) as client:
        assert f"local: {tmp_path / 'model'}" in said
        messages = [{"role": "user", "content": "hi"}]
        reply = client.chat.completions.create(model="tiny", messages=messages).choices[0].message
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "go on"}]
        client.chat.completions.create(model="tiny", messages=messages)
        wait_for(lambda: any(turn.verdict for turn in store.all_turns()), seconds=120, what="a verdict")
        client.chat.completions.create(model="tiny", messages=messages)
    verdicts = [turn.verdict for turn in store.all_turns() if turn.verdict]
    assert [verdict.outcome for verdict in verdicts] == ["failed"]  # so small a model says nothing that can be read
    assert {vote.failure for vote in verdicts[0].votes} <= {"truncated", "unparseable"}
