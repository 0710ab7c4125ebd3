"""Bodies that come slowly, or not to their end, and users who want more than their share of the gateway."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from live.gateway_harness import USER, serving_stub, wait_for

from trl_openclaw.live.gateway.api_errors import ApiError
from trl_openclaw.live.gateway.app import GatewayOptions
from trl_openclaw.live.gateway.auth import Keys
from trl_openclaw.live.gateway.places import Places

ADA, BOB = "ada-key-0123456789", "bob-key-0123456789"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"ada: {ADA}\nbob: {BOB}\n")
    path.chmod(0o600)
    return Keys.read(path)


def begun(gateway, key="any", path="/v1/chat/completions"):
    """A request whose body has not come yet, but for its first byte."""
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{".encode())
    return connection


def answer_of(connection):
    """Status and JSON of an answer that ends its connection."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def status(gateway, key="any"):
    """The status of a request that does nothing wrong."""
    with gateway.client(key) as client:
        answer = client.chat.completions.with_raw_response.create
        try:
            return answer(model="stub", messages=[USER]).status_code
        except Exception as error:
            return error.status_code


def is_read(gateway, count):
    wait_for(lambda: gateway.gateway.uploads.taken == count, what=f"the reading of {count} bodies")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
def test_a_body_that_does_not_come_is_not_waited_for(tmp_path, stub, path):
    with serving_stub(tmp_path, stub, options=GatewayOptions(upload_seconds=0.5)) as gateway:
        with begun(gateway, path=path) as connection:
            told, body = answer_of(connection)
        assert (told, body["error"]["code"]) == (408, "request_timeout")
        is_read(gateway, 0)
        stub.delay = 1.0
        assert status(gateway) == 200  # an answer may take longer than a body


def test_requests_that_are_not_there_yet_keep_nobody_from_being_answered(tmp_path, stub, keys):
    options = GatewayOptions(max_in_flight=4)
    with serving_stub(tmp_path, stub, options=options, keys=keys) as gateway, ExitStack() as stack:
        for count in (1, 2, 3):
            stack.enter_context(begun(gateway, ADA))
            is_read(gateway, count)
        assert gateway.gateway.answering == 0
        assert (status(gateway, ADA), status(gateway, BOB)) == (429, 200)


def test_no_user_takes_all_places(tmp_path, stub, keys):
    stub.delay = 2.0
    options = GatewayOptions(max_in_flight=4)
    with serving_stub(tmp_path, stub, options=options, keys=keys) as gateway, ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(status, gateway, ADA) for _ in range(5)]
        wait_for(lambda: gateway.gateway.answering == 3, what="all that one user may have")
        assert status(gateway, BOB) == 200
        assert sorted(one.result() for one in waiting) == [200, 200, 200, 429, 429]
        assert gateway.gateway.answering == 0


@pytest.mark.parametrize(("most", "users", "of_one"), [(256, 1, 256), (256, 3, 224), (4, 2, 3), (1, 2, 1)])
def test_the_share_of_one_user(most, users, of_one):
    places = Places(most, users)
    with ExitStack() as stack:
        for _ in range(of_one):
            places.check("ada")
            stack.enter_context(places.taken_by("ada"))
        with pytest.raises(ApiError, match="Try again"):
            places.check("ada")
        if of_one < most:
            places.check("bob")
    assert places.taken == 0


def test_a_client_that_goes_away_in_the_middle_of_its_body(gateway, caplog):
    with begun(gateway):
        is_read(gateway, 1)
    is_read(gateway, 0)
    wait_for(lambda: gateway.metric("requests_total", status="499") == 1, what="its count")
    time.sleep(0.2)
    assert "Traceback" not in caplog.text
    assert "Exception" not in caplog.text
    assert status(gateway) == 200
