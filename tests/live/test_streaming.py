"""Replies in pieces are really streamed, recorded before their end, and end when nobody reads them any more."""

import http.client
import itertools
import json
import socket
import time

import pytest
from live.gateway_harness import run, wait_for

MESSAGES = [{"role": "user", "content": "a b c d"}]


def test_pieces_come_as_the_engine_gives_them(gateway, stub):
    stub.pause = 0.3
    with gateway.client() as client:
        stream = client.chat.completions.create(model="stub", messages=MESSAGES, stream=True)
        came = [time.monotonic() for chunk in stream if chunk.choices[0].delta.content]
    gaps = [late - early for early, late in itertools.pairwise(came)]
    assert len(gaps) == 4
    assert min(gaps) > 0.1


def test_small_pieces_are_sent_at_once(gateway, stub):
    """Else each piece waits for the client to confirm the one before, some 40 ms on a connection that is not new."""
    stub.pieces, stub.pause = 3, 0.005
    connection = open_connection(gateway)
    waits = []
    for _ in range(20):
        send(connection, stream=True)
        came = []
        while len(came) < 6:  # the role, three words, the end, and that it was the end
            came += [time.monotonic()] * connection.recv(65536).count(b"data: ")
        waits.append(came[1] - came[0])
    connection.close()
    assert sorted(waits)[10] < 0.02


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_has_a_reply_finds_it_in_the_store(gateway, stream):
    """Also at the very moment of its last bytes, and whatever happens to the gateway then."""
    with gateway.client() as client:
        for place in range(30):
            messages = [{"role": "user", "content": f"n{place}"}]
            reply = client.chat.completions.create(model="stub", messages=messages, stream=stream)
            found = None
            for chunk in reply if stream else ():
                if chunk.choices[0].finish_reason is not None:
                    found = gateway.store.show("default", chunk.id)
            if not stream:
                found = gateway.store.show("default", reply.id)
            assert found.reply["content"] == f"stub: n{place}"


def open_connection(gateway):
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=20)


def send(connection, **fields):
    """A request whose answer is read by hand."""
    body = json.dumps({"model": "stub", "messages": MESSAGES, **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def open_request(gateway, **fields):
    """The same on a connection of its own."""
    connection = open_connection(gateway)
    send(connection, **fields)
    return connection


def test_what_comes_at_once_is_sent_at_once(gateway, stub):
    stub.pieces = 3
    connection = open_request(gateway, stream=True, stream_options={"include_usage": True})
    read = b""
    while not read.endswith(b"\r\n0\r\n\r\n"):
        read += connection.recv(4096)
    head, _, body = read.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    chunks = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    first, last = chunks[0].split(b"\n\n"), chunks[-2].split(b"\n\n")
    assert b'"role":"assistant"' in first[0]
    assert b'"content":"' in first[1]
    assert b'"finish_reason":"stop"' in last[-4]
    assert b'"usage":{' in last[-3]
    assert last[-2:] == [b"data: [DONE]", b""]
    assert chunks[-1] == b""
    assert len(chunks) == b"".join(chunks).count(b"data: ") - 3  # role, reason, usage and end come with others


def test_a_client_that_goes_away_ends_the_generation(gateway, stub):
    stub.pause = 0.2
    stub.pieces = 200
    connection = open_request(gateway, stream=True)
    read = b""
    while b" a" not in read:
        read += connection.recv(4096)
    connection.close()
    wait_for(lambda: stub.aborted == 1, what="the end of the generation")
    wait_for(gateway.turns, what="the record")
    (turn,) = gateway.turns()
    assert (turn.finish_reason, turn.state) == ("disconnect", "unusable")
    assert turn.reply["content"].startswith("stub: a")
    assert len(turn.completion_ids) == len(turn.logprobs) == len(turn.reply["content"])
    assert gateway.metric("disconnects_total") == 1
    wait_for(lambda: gateway.gateway.answering == 0, what="the end of the request")
    assert gateway.metric("requests_total", status="499") == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_client_that_goes_away_before_the_reply_begins(gateway, stub, fields):
    stub.delay = 30
    connection = open_request(gateway, **fields)
    wait_for(lambda: stub.requests)
    connection.close()
    wait_for(lambda: stub.aborted == 1, what="the end of the generation")
    wait_for(lambda: gateway.metric("requests_total", status="499") == 1)
    assert gateway.turns() == []
    assert gateway.gateway.versions._serving["default"].in_flight == 0
    stub.delay = 0
    assert gateway.ask("x").choices[0].message.content == "stub: x"


def test_a_client_that_goes_away_and_has_seen_nothing(gateway, stub):
    """What was sampled for it by then is nobody's turn."""
    stub.pause, stub.pieces = 0.1, 200
    connection = open_request(gateway)
    wait_for(lambda: gateway.metric("first_piece_seconds_count") == 1, what="the first piece")
    time.sleep(0.5)  # words come, too
    connection.close()
    wait_for(lambda: stub.aborted == 1, what="the end of the generation")
    wait_for(lambda: gateway.metric("requests_total", status="499") == 1)
    assert gateway.metric("disconnects_total") == 1
    stub.pause, stub.pieces = 0, 0
    gateway.ask("x")
    assert [turn.reply["content"] for turn in gateway.turns()] == ["stub: x"]  # turns are recorded in their order


def test_a_client_that_reads_slowly_gets_everything(gateway, stub):
    stub.pieces = 20_000
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    body = json.dumps({"model": "stub", "messages": MESSAGES, "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    time.sleep(1)
    text = answer.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    assert " w19994" in text
    connection.close()


def test_the_request_of_a_disconnected_reply_is_still_feedback(gateway, stub):
    first = gateway.ask("hello")
    stub.delay = 30
    messages = [
        {"role": "user", "content": "hello"},
        first.choices[0].message.to_dict(),
        {"role": "user", "content": "no, shorter"},
    ]
    connection = open_request(gateway, messages=messages)
    wait_for(lambda: len(stub.requests) == 2)
    connection.close()
    wait_for(lambda: gateway.turns()[0].next_state)
    assert gateway.turns()[0].next_state == messages[2:]


def test_a_cancelled_task_of_the_async_client(gateway, stub):
    stub.pause, stub.pieces = 0.2, 200

    async def ask():
        async with gateway.async_client() as client:
            stream = await client.chat.completions.create(model="stub", messages=MESSAGES, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()

    run(ask())
    wait_for(lambda: stub.aborted == 1, what="the end of the generation")
