"""Versions change under load: no request fails, none sees two versions, and none waits for it."""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field

import pytest
from live.gateway_harness import publish, run, save_adapter_stub, serving_stub, wait_for

from trl_openclaw.live.gateway.auth import Keys

SWAPS = 200


def version(place):
    return f"v{place:06d}"


def current(gateway, user="default"):
    return gateway.gateway.versions.current(user)


@dataclass
class Load:
    """What clients saw: of each reply its version as the gateway names it, who spoke, and how long it took."""

    replies: list[tuple[str, str]] = field(default_factory=list)
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Whether versions changed at that time, and the seconds."""


def test_two_hundred_swaps_under_load(tmp_path, stub):
    """With pauses between, so that the same clients in the same minute show what a reply takes without a swap."""
    stub.pause, stub.load_delay = 0.05, 0.01
    with serving_stub(tmp_path, stub) as gateway:
        gateway.gateway.versions.poll_seconds = 0.01
        load = run(under_load(gateway, tmp_path), seconds=280)
        assert gateway.metric("swaps_total") == SWAPS
        turns = gateway.turns()
    assert all(told == said for told, said in load.replies)  # one version in each
    assert len(set(load.replies)) > SWAPS / 10  # and many versions in all
    assert not [line for line in stub.log if "mid-reply" in line]
    assert list(stub.adapters) == [f"default-{version(SWAPS)}"]  # the old ones are gone
    assert len(turns) == len(load.replies)
    for turn in turns:
        name = "stub" if turn.model_version == "base" else f"default-{turn.model_version}"
        assert turn.reply["content"].startswith(f"{name}:")
    usual, slowest, noise = statistics.median(load.seconds[True]), max(load.seconds[True]), max(load.seconds[False])
    print(f"{len(load.replies)} replies; median {usual:.3f} s, slowest {slowest:.3f} s, without swaps {noise:.3f} s")
    assert slowest < max(2 * usual, 1.5 * noise)  # the second where the machine itself is that busy


async def under_load(gateway, folder):
    """`SWAPS` versions are published while eight clients ask, in ten bursts with pauses of the same length."""
    load, swapping, over = Load(), asyncio.Event(), asyncio.Event()

    async def client(place):
        async with gateway.async_client() as client:
            while not over.is_set():
                began, started = swapping.is_set(), time.monotonic()
                load.replies.append(await ask(client, place % 2))
                if began == swapping.is_set():
                    load.seconds[began].append(time.monotonic() - started)

    async def swaps():
        for place in range(1, SWAPS + 1):
            if place % (SWAPS // 10) == 1:
                swapping.set()
                started = time.monotonic()
            publish(gateway.store, folder, version(place), parent=version(place - 1))
            await gateway_has(gateway, version(place))
            if place % (SWAPS // 10) == 0:
                swapping.clear()
                await asyncio.sleep(time.monotonic() - started)
        over.set()

    await asyncio.gather(swaps(), *(client(place) for place in range(8)))
    return load


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
        assert list(stub.adapters) == ["default-v000001", "default-v000002"]
        assert {chunk.system_fingerprint for chunk in stream} == {"v000001"}
    wait_for(lambda: list(stub.adapters) == ["default-v000002"], what="the unloading")
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
    wait_for(lambda: list(stub.adapters) == ["default-v000002"])


@pytest.mark.parametrize("reason", ["refused", "no folder"])
def test_a_version_that_cannot_be_loaded(gateway, stub, tmp_path, reason):
    publish(gateway.store, tmp_path, "v000001")
    wait_for(lambda: current(gateway) == "v000001")
    stub.refuses.add("default-v000002")
    path = tmp_path / "none" if reason == "no folder" else save_adapter_stub(tmp_path, "bad")
    gateway.store.add_version("default", "v000002", "v000001", str(path))
    gateway.store.publish("default", "v000002")
    problems = wait_for(lambda: gateway.gateway.versions.problems, what="the problem")
    assert problems[0].startswith("v000002: ")
    assert gateway.ask("x").system_fingerprint == "v000001"
    health = gateway.health()
    assert (health["status"], health["problems"]["versions"]) == ("degraded", problems)

    def events():
        found = next(info for info in gateway.store.versions("default") if info.version == "v000002")
        return [event.event for event in found.events]

    wait_for(lambda: "load_failed" in events())
    time.sleep(0.6)  # a few more looks into the store
    assert events().count("load_failed") == 1
    publish(gateway.store, tmp_path, "v000003", parent="v000001")
    wait_for(lambda: current(gateway) == "v000003")
    assert gateway.gateway.versions.problems == []


def test_an_engine_that_is_down_for_a_moment_gets_the_version_later(gateway, stub, tmp_path):
    stub.stop()
    publish(gateway.store, tmp_path, "v000001")
    wait_for(lambda: gateway.gateway.versions.problems)
    assert current(gateway) == "base"
    stub.start()
    wait_for(lambda: current(gateway) == "v000001")
    assert gateway.ask("x").choices[0].message.content == "default-v000001: x"


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


def test_a_gateway_that_starts_serves_what_is_published(tmp_path, stub):
    with serving_stub(tmp_path, stub) as gateway:
        publish(gateway.store, tmp_path, "v000001")
        wait_for(lambda: current(gateway) == "v000001")
    with serving_stub(tmp_path, stub) as gateway:  # the stub still has it loaded
        assert gateway.ask("x").system_fingerprint == "v000001"
    assert stub.log == ["load default-v000001"]


def test_an_engine_that_takes_no_adapters_says_so(gateway, stub, tmp_path):
    stub.takes_adapters = False
    publish(gateway.store, tmp_path, "v000001")
    problems = wait_for(lambda: gateway.gateway.versions.problems)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in problems[0]


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
    assert said == {"ada": "ada-v000001: x", "bob": "stub: x"}
    assert json.dumps(stub.requests).count("ada-v000001") == 1
