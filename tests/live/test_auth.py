"""Who may ask: keys, addresses, and pages of other sites."""

import hashlib
import http.client
import json

import openai
import pytest
from live.gateway_harness import serving_stub
from live.stub_engine import StubEngine

from trl_openclaw.live.gateway import auth
from trl_openclaw.live.gateway.app import GatewayOptions
from trl_openclaw.live.gateway.auth import Keys, check_bind, is_loopback
from trl_openclaw.live.gateway.guard import LOCAL_NAMES

ADA, BOB = "ada-key-0123456789", "bob-key-0123456789"


def keys_file(folder, text, mode=0o600):
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def keys(tmp_path):
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    return Keys.read(keys_file(tmp_path, f"# who may ask\nada: {ADA}\n\nbob: sha256:{digest}\n"))


@pytest.fixture
def guarded(tmp_path, keys):
    with StubEngine() as stub, serving_stub(tmp_path, stub, keys=keys) as gateway:
        yield gateway


def test_users_by_their_keys(keys):
    assert keys.users == ["ada", "bob"]
    assert keys.user_of(f"Bearer {ADA}") == "ada"
    assert keys.user_of(f"bearer  {BOB}") == "bob"
    for wrong in (None, "", ADA, "Bearer", "Bearer ", f"Basic {ADA}", f"Bearer {ADA}x", f"Bearer {ADA[:-1]}"):
        assert keys.user_of(wrong) is None
    assert Keys().user_of(None) == "default"
    assert Keys().users == ["default"]


def test_every_key_is_compared_whichever_fits(keys, monkeypatch):
    compared = []
    real = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    for key in (ADA, BOB, "neither"):
        compared.clear()
        keys.user_of(f"Bearer {key}")
        assert len(compared) == 2
        assert all(len(a) == len(b) == 32 for a, b in compared)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (f"ada: {ADA}", 0o640, "chmod 600"),
        (f"ada: {ADA}", 0o604, "chmod 600"),
        ("", 0o600, "holds no key"),
        ("ada", 0o600, "keys:1: write `user: key`"),
        ("ada:", 0o600, "0 characters"),
        ("ada: short", 0o600, "5 characters"),
        (f"../ada: {ADA}", 0o600, "write `user: key`"),
        ("ada: sha256:12", 0o600, "64 hex digits"),
        (f"ada: sha256:{hashlib.sha256(b'').hexdigest()}", 0o600, "empty key"),
        (f"ada: {ADA}\nbob: {ADA}", 0o600, "keys:2: two users"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, mode, said):
    with pytest.raises(ValueError, match=said):
        Keys.read(keys_file(tmp_path, text, mode))
    with pytest.raises(ValueError, match="cannot be read"):
        Keys.read(tmp_path / "none")


def test_users_are_kept_apart(guarded):
    with guarded.client(ADA) as ada, guarded.client(BOB) as bob:
        reply = ada.chat.completions.create(model="stub", messages=[{"role": "user", "content": "hi"}])
        said = reply.choices[0].message.to_dict()
        messages = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "and?"}]
        bob.chat.completions.create(model="stub", messages=messages)  # the same words, by somebody else
        with pytest.raises(openai.NotFoundError):
            bob.post("/feedback", body={"id": reply.id, "thumb": "down"}, cast_to=object)
        assert ada.post("/feedback", body={"id": reply.id, "thumb": "up"}, cast_to=object)["new"]
    (of_ada,), (of_bob,) = guarded.turns("ada"), guarded.turns("bob")
    assert of_ada.next_state is None
    assert of_bob.parent is None


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/feedback", "/metrics"])
def test_without_a_key_there_is_nothing(guarded, path):
    for key in ("", "wrong", ADA + "x"):
        status, answer, headers = ask(guarded.port, path, {"Authorization": f"Bearer {key}"})
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
        assert headers["WWW-Authenticate"] == "Bearer"
    with guarded.client("wrong-key-0123456789") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_health_tells_strangers_no_details(guarded):
    assert ask(guarded.port, "/health")[:2] == (200, {"status": "ok"})
    status, answer, _ = ask(guarded.port, "/health", {"Authorization": f"Bearer {ADA}"})
    assert (status, answer["model"], answer["problems"]) == (200, "stub", {})


def ask(port, path, headers=None, body=None, method=None):
    """Status, JSON and headers of a plain request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    method = method or ("POST" if path in ("/v1/chat/completions", "/v1/feedback") else "GET")
    default = {"Content-Type": "application/json"} if method == "POST" else {}
    data = json.dumps(body or {}) if method == "POST" else None
    connection.request(method, path, data, {**default, **(headers or {})})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if text.startswith("{") else text, answer.headers


@pytest.fixture
def local(tmp_path, stub):
    with serving_stub(tmp_path, stub, options=GatewayOptions(hosts=LOCAL_NAMES)) as gateway:
        yield gateway


CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1:8700", ""])
def test_foreign_host_names_are_refused(local, host):
    for path in ("/v1/chat/completions", "/v1/models", "/health", "/metrics"):
        assert ask(local.port, path, {"Host": host}, CHAT)[0] == 403
    assert local.turns() == []


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:8700", "[::1]:8700", "[::1]"])
def test_the_names_of_this_machine_are_fine(local, host):
    assert ask(local.port, "/v1/chat/completions", {"Host": host}, CHAT)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_pages_of_other_sites_are_refused(local, headers):
    for path in ("/v1/chat/completions", "/v1/feedback"):
        assert ask(local.port, path, headers, CHAT)[0] == 403
    assert local.turns() == []


def test_our_own_page_is_not(local):
    headers = {"Origin": f"http://127.0.0.1:{local.port}", "Sec-Fetch-Site": "same-origin"}
    status, _, answered = ask(local.port, "/v1/chat/completions", headers, CHAT)
    assert status == 200
    assert "Access-Control-Allow-Origin" not in answered
    assert ask(local.port, "/v1/models", {"Origin": "https://evil.example"})[2]["Access-Control-Allow-Origin"] is None


APP, OTHER = "app://obsidian.md", "http://localhost:3000"


@pytest.fixture
def allowing(tmp_path, stub):
    hosts = (*LOCAL_NAMES, "host.docker.internal")
    options = GatewayOptions(hosts=hosts, origins=(APP, OTHER, "null"))
    with serving_stub(tmp_path, stub, options=options) as gateway:
        yield gateway


def cors(headers):
    """What an answer tells browsers of other pages."""
    return {name.lower(): value for name, value in headers.items() if name.lower().startswith("access-control-")}


@pytest.mark.parametrize("origin", [APP, OTHER, "null"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_that_are_allowed_use_the_api(allowing, origin, site):
    headers = {"Origin": origin, "Sec-Fetch-Site": site}
    for path, body, status in (
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404),
        ("/v1/models", None, 200),
        ("/v1/feedback", {"id": "none", "thumb": "up"}, 404),
    ):
        found, _, answered = ask(allowing.port, path, headers, body)
        assert found == status
        assert answered["Access-Control-Allow-Origin"] == origin
        assert "x-request-id" in answered["Access-Control-Expose-Headers"]
        assert answered["Vary"] == "Origin"
    found, _, answered = ask(allowing.port, "/v1/chat/completions", {**headers, "Content-Type": "text/plain"}, CHAT)
    assert (found, answered["Access-Control-Allow-Origin"]) == (415, origin)


def asking_first(**more):
    """What a browser asks with before it lets a page send something."""
    asked = "authorization,content-type,x-session-id,x-stainless-os"
    return {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked, **more}


def test_browsers_ask_first_and_without_a_key(tmp_path, stub, keys):
    options = GatewayOptions(hosts=LOCAL_NAMES, origins=(APP,))
    with serving_stub(tmp_path, stub, keys=keys, options=options) as gateway:
        asked = asking_first(Origin=APP, **{"Access-Control-Request-Private-Network": "true"})
        status, body, headers = ask(gateway.port, "/v1/chat/completions", asked, method="OPTIONS")
        assert (status, body) == (204, "")
        assert cors(headers) == {
            "access-control-allow-origin": APP,
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": asked["Access-Control-Request-Headers"],
            "access-control-allow-private-network": "true",
            "access-control-max-age": "600",
            "access-control-expose-headers": "x-request-id, retry-after",
        }
        status, _, headers = ask(gateway.port, "/v1/chat/completions", {"Origin": APP}, CHAT)
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, APP)  # being allowed is no key


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:3001", "https://localhost:3000", f"{APP}.evil", "file://", ""]
)
def test_no_other_page_is_told_anything(allowing, origin):
    for path in ("/v1/chat/completions", "/v1/feedback"):
        for headers in ({"Origin": origin}, {"Origin": origin, "Sec-Fetch-Site": "cross-site"}):
            status, answer, answered = ask(allowing.port, path, headers, CHAT)
            assert (status, cors(answered)) == (403, {})
            assert f"{origin!r} is one. `--allow-origin` allows" in answer["error"]["message"]
        status, _, answered = ask(allowing.port, path, asking_first(Origin=origin), method="OPTIONS")
        assert (status, cors(answered)) == (403, {})
    assert cors(ask(allowing.port, "/v1/models", {"Origin": origin})[2]) == {}
    assert allowing.turns() == []


@pytest.mark.parametrize("path", ["/status/delete", "/status/opt-out", "/v1", "/v10/x", "/status/v1/x"])
def test_what_is_not_the_api_is_for_our_own_page_alone(allowing, path):
    for method, headers in (("POST", {"Origin": APP}), ("OPTIONS", asking_first(Origin=APP))):
        status, _, answered = ask(allowing.port, path, headers, {"all": True}, method=method)
        assert (status, cors(answered)) == (403, {})
    assert cors(ask(allowing.port, "/status/overview", {"Origin": APP})[2]) == {}


def test_names_that_are_allowed_and_no_others(allowing):
    for host in ("host.docker.internal", "Host.Docker.Internal:8700", "localhost:1"):
        assert ask(allowing.port, "/v1/chat/completions", {"Host": host}, CHAT)[0] == 200
    for host in ("evil.example", "host.docker.internal.evil.example", "docker.internal"):
        for headers in ({"Host": host}, {"Host": host, "Origin": APP}, {"Host": host, "Origin": f"http://{host}"}):
            for method in ("GET", "POST", "OPTIONS"):
                found = ask(allowing.port, "/v1/chat/completions", {**asking_first(), **headers}, CHAT, method)
                assert (found[0], cors(found[2])) == (403, {})
                assert "`--allow-host`" in found[1]["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_can_send_is_refused(local, kind):
    assert ask(local.port, "/v1/chat/completions", {"Content-Type": kind}, CHAT)[0] == 415


def test_addresses_that_others_can_reach_need_keys(keys):
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        assert is_loopback(host)
        check_bind(host, Keys())
    for host in ("0.0.0.0", "::", "10.1.2.3", "", "no-such-name.invalid"):
        assert not is_loopback(host)
        check_bind(host, keys)
        with pytest.raises(ValueError, match="--keys FILE"):
            check_bind(host, Keys())
