"""Access control of the dashboard: decide which requests and websockets reach the page."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_HEADERS = {
    # NiceGUI's components need inline scripts and eval; the page may not load from or send to another server.
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval'; img-src 'self' data:; "
    "font-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_ASK = "This dashboard has a token: open the address that `instep dashboard` printed."


class Guard:
    """ASGI application that passes on the requests of people who may see the page, and refuses all other requests.

    - The address `/?token=...` sets a cookie. A browser with the cookie may write; the page reads this from
      `scope["may_write"]`.
    - Unless `is_open` is set, all other requests need the cookie, including those for files and websockets.
    - If `hosts` is not None, the Host must be a loopback name or one of `hosts`. This refuses requests under the name
      of another site that resolves to 127.0.0.1.
    - Requests that another site's page makes are refused, except for following a link: the headers Origin and
      Sec-Fetch-Site show them. Websockets are checked too, since browsers let any page open a websocket to any server.

    Args:
        app: the ASGI application of the page.
        token: secret text in the address that sets the cookie.
        hosts: names that a Host may have beside the loopback names; None: all names.
        port: port of the server; its number is in the cookie's name, since browsers share cookies between ports of a
            host.
        is_open: whether everybody who reaches the port may see the page without the token, but not write.

    Raises:
        ValueError: `is_open` is set, and `hosts` allows all names.
    """

    def __init__(self, app: App, token: str, hosts: frozenset[str] | None, port: int, is_open: bool = False) -> None:
        if is_open and hosts is None:
            raise ValueError("a page without a token needs the names that its Host may have")
        self._app, self._token, self._hosts, self._is_open = app, token, hosts, is_open
        self._cookie, self._session = f"instep_dashboard_{port}", secrets.token_urlsafe(32)

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] not in ("http", "websocket"):  # "lifespan": no request, but the server's start and end
            await self._app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        if scope["type"] == "http" and self._brings_token(scope, headers):
            cookie = f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Lax"
            await _answer(send, 303, "", {"location": _without_token(scope), "set-cookie": cookie})
        elif why := self._refusal(scope, headers):
            if scope["type"] == "websocket":
                # If a websocket is closed before it is accepted, the server answers with status 403.
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _answer(send, 403, why, {})
        else:
            await self._app({**scope, "may_write": self._has_cookie(headers)}, receive, _with_headers(send))

    def _refusal(self, scope: Message, headers: dict[str, str]) -> str:
        """Return why a request is refused; "" if it may pass."""
        return self._foreign(scope, headers) or ("" if self._is_open or self._has_cookie(headers) else _ASK)

    def _foreign(self, scope: Message, headers: dict[str, str]) -> str:
        host = headers.get("host", "")
        if self._hosts is not None and not is_loopback(name := _name(host)) and name not in self._hosts:
            return f"This dashboard is not at {_name(host)[:80]!r}: open the address that `instep dashboard` printed."
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return "Another site's page may not use this dashboard."
        opens = scope["type"] == "http" and scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not opens:
            return "Another site's page may not use this dashboard."
        return ""

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return found is not None and _same(found.value, self._session)

    def _brings_token(self, scope: Message, headers: dict[str, str]) -> bool:
        given = [value for key, value in _query(scope) if key == "token"]
        if scope["method"] != "GET" or len(given) != 1 or self._foreign(scope, headers):
            return False
        return _same(given[0], self._token)


def is_loopback(name: str) -> bool:
    """Return True if a name or address means this machine itself.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("127.0.0.1.example.com")
        (True, True, False)
    """
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """Return the name in a Host header without its port; "" if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())


def _query(scope: Message) -> list[tuple[str, str]]:
    return parse_qsl(scope.get("query_string", b"").decode("latin-1"), errors="surrogateescape")


def _without_token(scope: Message) -> str:
    """Return the requested path and query without the token, so that no browser history has the token.

    The result is always a path of this server.
    """
    rest = urlencode([(key, value) for key, value in _query(scope) if key != "token"], errors="surrogateescape")
    return (scope["path"] if scope["path"][1:].isidentifier() else "/") + (f"?{rest}" if rest else "")


async def _answer(send: Any, status: int, text: str, headers: dict[str, str]) -> None:
    fields = {"content-type": "text/plain; charset=utf-8", "cache-control": "no-store", **_HEADERS, **headers}
    raw = [(key.encode(), value.encode("latin-1")) for key, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": text.encode()})


def _with_headers(send: Any) -> Callable[[Message], Awaitable[None]]:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(key.encode(), value.encode()) for key, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await send(message)

    return send_more
