"""Versions change under load: no request fails, none sees two versions, and none waits for it."""

import asyncio
import json
import shutil
import statistics
import time
from dataclasses import dataclass, field

import pytest
from live.gateway_harness import publish, run, save_adapter_stub, serving_stub, wait_for

from trl_openclaw.live.gateway.auth import Keys
from trl_openclaw.live.store import Store

SWAPS = 200
BURSTS = 10


def version(place):
    return f"v{place:06d}"


def current(gateway, user="default"):
    return gateway.gateway.versions.current(user)


@dataclass
class Phase:
    """A time in which versions change or do not, and the seconds of the replies that fell into it as a whole."""

    swapping: bool
    seconds: list[float] = field(default_factory=list)


def test_two_hundred_swaps_under_load(tmp_path, stub):
    """Bursts of swaps and pauses take turns, so that the same clients show what a reply takes without a swap."""
    stub.delay, stub.pause, stub.load_delay = 0.3, 0.005, 0.01
    with serving_stub(tmp_path, stub) as gateway:
        gateway.gateway.versions.poll_seconds = 0.01
        replies, phases = run(under_load(gateway, tmp_path), seconds=280)
        assert gateway.metric("swaps_total") == SWAPS
        turns = gateway.turns()
    assert all(told == said for told, said in replies)  # one version in each
    assert len(set(replies)) > SWAPS / 10  # and many versions in all
    assert not [line for line in stub.log if "mid-reply" in line]
    assert stub.loaded == [f"default-{version(SWAPS)}"]  # the old ones are gone
    assert len(turns) == len(replies)
    for turn in turns:
        name = "stub" if turn.model_version == "base" else f"default-{turn.model_version}"
        assert turn.reply["content"].startswith(f"{name}:")
    assert_none_waited(phases)


def assert_none_waited(phases):
    """None is slower than twice the median. A machine that others use may hold one up, but not in every burst."""
    swapping = [phase.seconds for phase in phases if phase.swapping and phase.seconds]
    usual = statistics.median([seconds for phase in swapping for seconds in phase])
    noise = max(seconds for phase in phases if not phase.swapping for seconds in phase.seconds)
    slowest = sorted(max(phase) for phase in swapping)
    print(f"median {usual:.3f} s, slowest of each burst {[round(s, 3) for s in slowest]}, without swaps {noise:.3f} s")
    assert len(slowest) > BURSTS / 2
    assert slowest[len(slowest) // 2] < max(2 * usual, noise)


async def under_load(gateway, folder):
    """What eight clients see while versions are published: who spoke in each reply, and the phases."""
    replies, phases, over = [], [Phase(False)], asyncio.Event()

    async def client(place):
        async with gateway.async_client() as client:
            while not over.is_set():
                phase, started = phases[-1], time.monotonic()
                replies.append(await ask(client, place % 2))
                if phase is phases[-1]:
                    phase.seconds.append(time.monotonic() - started)

    async def swaps():
        for burst in range(BURSTS):
            started = time.monotonic()
            phases.append(Phase(True))
            for place in range(burst * SWAPS // BURSTS + 1, (burst + 1) * SWAPS // BURSTS + 1):
                publish(gateway.store, folder, version(place), parent=version(place - 1))
                await gateway_has(gateway, version(place))
            phases.append(Phase(False))
            await asyncio.sleep(time.monotonic() - started)
        over.set()

    await asyncio.gather(swaps(), *(client(place) for place in range(8)))
    return replies, phases


async def ask(client, stream):
    """Which version the gateway names, and which the stub spoke with."""
    messages = [{"role": "user", "content": "a b c"}]
    answer = await client.chat.completions.create(model="stub", messages=messages, stream=bool(stream))
    if not stream:
        told, text = answer.system_fingerprint, answer.choices[0].message.content
    else:
        chunks = [chunk async for chunk in answer]
        (told,) = {chunk.system_fingerprint for chunk in chunks}
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    speaker, rest = text.split(": ")
    assert rest == "a b c"
    return told, "base" if speaker == "stub" else speaker.removeprefix("default-")


async def gateway_has(gateway, name):
    async with asyncio.timeout(30):
        while current(gateway) != name:
            await asyncio.sleep(0.005)


def test_a_request_in_flight_ends_on_its_version(gateway, stub, tmp_path):
    publish(gateway.store, tmp_path, "v000001")
    wait_for(lambda: current(gateway) == "v000001")
    stub.pause = 0.3
    with gateway.client() as client:
        messages = [{"role": "user", "content": "a b c"}]
        stream = client.chat.completions.create(model="stub", messages=messages, stream=True)
        next(stream)
        publish(gateway.store, tmp_path, "v000002", parent="v000001")
        wait_for(lambda: current(gateway) == "v000002")
        assert stub.loaded == ["default-v000001", "default-v000002"]
        assert {chunk.system_fingerprint for chunk in stream} == {"v000001"}
    wait_for(lambda: stub.loaded == ["default-v000002"], what="the unloading")
    assert not [line for line in stub.log if "mid-reply" in line]
    assert gateway.ask("x").system_fingerprint == "v000002"
    with gateway.client() as client:
        assert client.models.list().data[0].version == "v000002"


def test_going_back_and_forth(gateway, stub, tmp_path):
    for name, parent in (("v000001", "base"), ("v000002", "v000001")):
        publish(gateway.store, tmp_path, name, parent=parent)
        wait_for(lambda name=name: current(gateway) == name)
    for target in ("v000001", "base"):
        assert gateway.store.roll_back("default") == target
        wait_for(lambda target=target: current(gateway) == target)
        assert gateway.ask("x").system_fingerprint == target
    gateway.store.publish("default", "v000002")
    wait_for(lambda: current(gateway) == "v000002")
    assert gateway.ask("x").choices[0].message.content == "default-v000002: x"
    wait_for(lambda: stub.loaded == ["default-v000002"])


@pytest.mark.parametrize("reason", ["refused", "no folder"])
def test_a_version_that_cannot_be_loaded(gateway, stub, tmp_path, reason):
    publish(gateway.store, tmp_path, "v000001")
    wait_for(lambda: current(gateway) == "v000001")
    stub.refuses.add("default-v000002")
    path = tmp_path / "none" if reason == "no folder" else save_adapter_stub(tmp_path, "bad")
    gateway.store.add_version("default", "v000002", "v000001", str(path))
    gateway.store.publish("default", "v000002")
    problem = wait_for(lambda: gateway.gateway.versions.problem("default"), what="the problem")
    assert problem.startswith("v000002: ")
    assert gateway.ask("x").system_fingerprint == "v000001"
    health = gateway.health()
    assert (health["status"], health["problems"]["version"]) == ("degraded", problem)

    def events():
        found = next(info for info in gateway.store.versions("default") if info.version == "v000002")
        return [event.event for event in found.events]

    wait_for(lambda: "load_failed" in events())
    time.sleep(0.6)  # a few more looks into the store
    assert events().count("load_failed") == 1
    assert gateway.gateway.versions.problem("default") == problem  # said until another version is there
    assert gateway.store.published_version("default") == "v000001"
    publish(gateway.store, tmp_path, "v000003", parent="v000001")
    wait_for(lambda: current(gateway) == "v000003")
    assert gateway.gateway.versions.problem("default") is None


def test_versions_that_cannot_be_loaded_make_no_turn_older(gateway, stub, tmp_path):
    for place in range(1, 6):
        stub.refuses.add(f"default-{version(place)}")
        publish(gateway.store, tmp_path, version(place), parent=version(place - 1) if place > 1 else "base")
        wait_for(lambda place=place: (gateway.gateway.versions.problem("default") or "").startswith(version(place)))
    assert gateway.ask("x").system_fingerprint == gateway.store.published_version("default") == "base"
    assert wait_for(gateway.turns)[0].lag == 0
    stub.refuses.clear()
    assert gateway.store.publish("default", version(5))  # news
    wait_for(lambda: current(gateway) == version(5), seconds=5)


def test_a_gateway_that_starts_serves_the_last_version_that_can_be_loaded(tmp_path, stub):
    stub.refuses |= {"default-v000002", "default-v000003"}
    store = Store(tmp_path / "store.db")
    for place in (1, 2, 3):
        publish(store, tmp_path, version(place), parent="base")
    with serving_stub(tmp_path, stub) as gateway:
        wait_for(lambda: current(gateway) == "v000001")
        assert gateway.ask("x").choices[0].message.content == "default-v000001: x"
        assert gateway.gateway.versions.problem("default") is None
    assert store.published_version("default") == "v000001"


def test_an_engine_that_is_down_for_a_moment_gets_the_version_later(gateway, stub, tmp_path):
    stub.stop()
    publish(gateway.store, tmp_path, "v000001")
    wait_for(lambda: gateway.gateway.versions.problem("default"))
    assert current(gateway) == "base"
    stub.start()
    wait_for(lambda: current(gateway) == "v000001")
    assert gateway.ask("x").choices[0].message.content == "default-v000001: x"


def test_an_engine_that_fails_by_itself_is_asked_again_with_growing_pauses(gateway, stub, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_openclaw.live.gateway.versions.RETRY_SECONDS", 0.2)
    stub.sick = True
    publish(gateway.store, tmp_path, "v000001")
    wait_for(lambda: len(stub.log) >= 3)
    times = []
    for count in (4, 5):
        wait_for(lambda count=count: len(stub.log) >= count)
        times.append(time.monotonic())
    assert times[1] - times[0] > 1.4  # 0.2, 0.4, 0.8, 1.6 seconds
    assert "EngineCore" in gateway.gateway.versions.problem("default")
    assert gateway.ask("x").system_fingerprint == "base"
    stub.sick = False
    wait_for(lambda: current(gateway) == "v000001")
    assert gateway.gateway.versions.problem("default") is None
    (info,) = gateway.store.versions("default")
    assert [event.event for event in info.events] == ["published"]


def test_an_engine_that_was_restarted_gets_its_adapter_again(gateway, stub, tmp_path):
    publish(gateway.store, tmp_path, "v000001")
    wait_for(lambda: current(gateway) == "v000001")
    messages = [{"role": "user", "content": "x"}]
    with gateway.client() as client:
        stub.adapters.clear()
        reply = client.chat.completions.create(model="stub", messages=messages)
        assert reply.choices[0].message.content == "default-v000001: x"
        stub.adapters.clear()
        chunks = client.chat.completions.create(model="stub", messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "default-v000001: x"


@pytest.mark.parametrize("trouble", ["takes no adapters", "no folder", "refused"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_was_restarted_and_cannot_take_the_version(gateway, stub, tmp_path, trouble, stream):
    """Another one answers, and people are told; what is the engine's own fault is tried again."""
    for name, parent in (("v000001", "base"), ("v000002", "v000001")):
        publish(gateway.store, tmp_path, name, parent=parent)
        wait_for(lambda name=name: current(gateway) == name)
    wait_for(lambda: stub.loaded == ["default-v000002"])
    stub.adapters.clear()
    stub.takes_adapters = trouble != "takes no adapters"
    if trouble == "no folder":
        shutil.rmtree(tmp_path / "default-v000002")
    if trouble == "refused":
        stub.refuses.add("default-v000002")
    left = "v000001" if stub.takes_adapters else "base"
    told, said = run(ask_at_once(gateway, stream))
    assert told == said == {left}
    problem = gateway.health()["problems"]["version"]
    assert problem.startswith("v000002: ")
    assert gateway.store.published_version("default") == ("v000001" if stub.takes_adapters else "v000002")
    assert {turn.model_version for turn in gateway.turns()} == {left}
    if not stub.takes_adapters:
        stub.takes_adapters = True
        wait_for(lambda: current(gateway) == "v000002")
        assert "version" not in gateway.health()["problems"]


async def ask_at_once(gateway, stream):
    """Which versions the gateway names in several replies, and which ones spoke."""
    async with gateway.async_client() as client:
        found = await asyncio.gather(*(ask(client, stream) for _ in range(4)))
    return tuple(map(set, zip(*found, strict=True)))


def test_a_gateway_that_starts_serves_what_is_published(tmp_path, stub):
    with serving_stub(tmp_path, stub) as gateway:
        publish(gateway.store, tmp_path, "v000001")
        wait_for(lambda: current(gateway) == "v000001")
    with serving_stub(tmp_path, stub) as gateway:  # the stub still has it loaded
        assert gateway.ask("x").system_fingerprint == "v000001"
        time.sleep(0.5)  # a few looks into the store
        assert gateway.ask("x").choices[0].message.content == "default-v000001: x"
    assert stub.log == ["load default-v000001"]


@pytest.mark.parametrize("what", ["the store", "the adapter"])
def test_what_lies_anew_where_something_was_is_loaded_anew(tmp_path, stub, what):
    """A server that goes on has the old one still, under the name of the same user and version."""
    for _ in range(2):
        with serving_stub(tmp_path, stub) as gateway:
            if gateway.store.published_version("default") == "base":
                publish(gateway.store, tmp_path, "v000001")
            wait_for(lambda gateway=gateway: current(gateway) == "v000001")
            assert gateway.ask("x").choices[0].message.content == "default-v000001: x"
        shutil.rmtree(tmp_path / "default-v000001")
        if what == "the store":
            for file in tmp_path.glob("store.db*"):
                file.unlink()
        else:
            save_adapter_stub(tmp_path, "default-v000001")
    assert stub.log.count("load default-v000001") == 2


def test_what_an_earlier_gateway_left_is_unloaded(tmp_path, stub):
    """Of its own store alone: others may use the same server."""
    stub.adapters["default-v000001@0123456789ab-01234567"] = "/of/another/store"
    stub.adapters["somebody's"] = "/own"
    with serving_stub(tmp_path, stub) as gateway:
        publish(gateway.store, tmp_path, "v000001")
        wait_for(lambda: current(gateway) == "v000001")
        store = gateway.store
    publish(store, tmp_path, "v000002", parent="v000001")
    with serving_stub(tmp_path, stub) as gateway:
        wait_for(lambda: stub.loaded == ["default-v000001", "somebody's", "default-v000002"], what="the unloading")
        assert gateway.ask("x").choices[0].message.content == "default-v000002: x"
    assert "default-v000001@0123456789ab-01234567" in stub.adapters


def test_an_engine_that_takes_no_adapters_says_so(gateway, stub, tmp_path):
    stub.takes_adapters = False
    publish(gateway.store, tmp_path, "v000001")
    problem = wait_for(lambda: gateway.gateway.versions.problem("default"))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in problem
    assert gateway.store.published_version("default") == "v000001"  # it is not the adapter's fault
    stub.takes_adapters = True
    wait_for(lambda: current(gateway) == "v000001")


def test_users_have_their_own_versions(tmp_path, stub):
    keys = tmp_path / "keys"
    keys.write_text("ada: ada-key-0123456789\nbob: bob-key-0123456789\n")
    keys.chmod(0o600)
    with serving_stub(tmp_path, stub, keys=Keys.read(keys)) as gateway:
        publish(gateway.store, tmp_path, "v000001", user="ada")
        wait_for(lambda: current(gateway, "ada") == "v000001")
        said = {}
        for name in ("ada", "bob"):
            with gateway.client(f"{name}-key-0123456789") as client:
                answer = client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "x"}])
                said[name] = answer.choices[0].message.content
        stub.refuses.add("ada-v000002")
        publish(gateway.store, tmp_path, "v000002", user="ada")
        wait_for(lambda: gateway.gateway.versions.problem("ada"))
        assert "version" in gateway.health("ada-key-0123456789")["problems"]
        assert "ada" not in str(gateway.health("bob-key-0123456789"))
    assert said == {"ada": "ada-v000001: x", "bob": "stub: x"}
    assert json.dumps(stub.requests).count("ada-v000001") == 1
