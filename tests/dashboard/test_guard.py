from __future__ import annotations

import asyncio
from typing import Any

import pytest

from instep.dashboard.guard import Guard

TOKEN = "the-token"


async def inner(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"page"})


def ask(guard: Guard, path: str = "/", kind: str = "http", method: str = "GET", **headers: str) -> dict[str, Any]:
    """The first thing that is answered, its headers as a dict."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    fields = {"host": "localhost:8899", **{key.replace("_", "-"): value for key, value in headers.items()}}
    raw = [(key.encode(), value.encode("latin-1")) for key, value in fields.items()]
    scope = {"type": kind, "method": method, "path": path, "query_string": query.encode(), "headers": raw}
    asyncio.run(guard(scope, None, send))
    return {**sent[0], "headers": dict(sent[0].get("headers", ()))}


def status(answer: dict[str, Any]) -> Any:
    return answer.get("status", answer["type"])


@pytest.fixture
def on_loopback() -> Guard:
    return Guard(inner, TOKEN, frozenset({"127.0.0.1"}), 8899, is_open=True)


@pytest.fixture
def with_token() -> Guard:
    return Guard(inner, TOKEN, None, 8899)


@pytest.mark.parametrize("host", ["localhost:8899", "127.0.0.1:8899", "[::1]:8899", "127.0.0.1", "localhost:1234"])
def test_this_machine_sees_the_page(on_loopback, host):
    assert status(ask(on_loopback, host=host)) == 200
    assert status(ask(on_loopback, kind="websocket", host=host, origin=f"http://{host}")) == "websocket.accept"


@pytest.mark.parametrize(
    "host", ["evil.example:8899", "127.0.0.1.evil.example", "", "localhost.evil", "[::1", "10.0.0.7"]
)
def test_a_name_that_was_bound_to_loopback_is_turned_away(on_loopback, host):
    assert status(ask(on_loopback, host=host)) == 403
    assert status(ask(on_loopback, kind="websocket", host=host, origin=f"http://{host}")) == "websocket.close"


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},  # another server of this machine
        {"origin": "http://localhost:8899.evil.example"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "websocket"},
    ],
)
def test_another_sites_page_is_turned_away(on_loopback, with_token, kind, headers):
    cookie = ask(with_token, f"/?token={TOKEN}")["headers"][b"set-cookie"].decode().partition(";")[0]
    for guard in (on_loopback, with_token):
        assert status(ask(guard, kind=kind, cookie=cookie, **headers)) in (403, "websocket.close")


def test_a_link_from_another_site_opens_the_page(on_loopback):
    assert status(ask(on_loopback, sec_fetch_site="cross-site", sec_fetch_mode="navigate")) == 200


@pytest.mark.parametrize(
    "path", ["/", "/_nicegui/3.0.0/static/nicegui.css", "/_nicegui_ws/socket.io/", "/?token=", "/?token=x"]
)
@pytest.mark.parametrize("cookie", ["", "instep_dashboard_8899=", "instep_dashboard_8899=the-token", "a=b; ;=", "\xff"])
def test_without_the_token_there_is_nothing(with_token, path, cookie):
    for kind in ("http", "websocket"):
        assert status(ask(with_token, path, kind, cookie=cookie)) in (403, "websocket.close")


@pytest.mark.parametrize(
    "query", ["token=the-toke", "token=the-token1", "token=%FF", "TOKEN=the-token", f"token=x&token={TOKEN}"]
)
def test_a_wrong_token_gets_no_cookie(with_token, query):
    answer = ask(with_token, f"/?{query}")
    assert status(answer) == 403
    assert b"set-cookie" not in answer["headers"]


def test_the_token_makes_a_cookie_and_leaves_the_address(with_token):
    answer = ask(with_token, f"//evil.example/?run=a%26b&token={TOKEN}")
    assert status(answer) == 303
    assert answer["headers"][b"location"] == b"/?run=a%26b"
    cookie, _, rest = answer["headers"][b"set-cookie"].decode().partition("; ")
    assert TOKEN not in cookie
    assert rest == "Path=/; HttpOnly; SameSite=Lax"
    page = ask(with_token, "/", cookie=f"other=1; {cookie}")
    assert status(page) == 200
    assert b"frame-ancestors 'none'" in page["headers"][b"content-security-policy"]
    assert (
        status(ask(with_token, kind="websocket", cookie=cookie, origin="http://localhost:8899")) == "websocket.accept"
    )
    assert status(ask(with_token, f"/?token={TOKEN}", method="POST")) == 403
    assert status(ask(with_token, f"/?token={TOKEN}", kind="websocket")) == "websocket.close"


def test_on_an_open_page_who_has_the_token_alone_may_write(on_loopback):
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["may_write"])
        await inner(scope, receive, send)

    guard = Guard(app, TOKEN, frozenset({"127.0.0.1"}), 8899, is_open=True)
    cookie = ask(guard, f"/?token={TOKEN}")["headers"][b"set-cookie"].decode().partition(";")[0]
    for sent in ("", "instep_dashboard_8899=the-token", cookie):
        for kind in ("http", "websocket"):
            ask(guard, kind=kind, cookie=sent)
    assert seen == [False] * 4 + [True] * 2


def test_a_page_without_a_token_has_names():
    with pytest.raises(ValueError, match="without a token"):
        Guard(inner, TOKEN, None, 8899, is_open=True)
