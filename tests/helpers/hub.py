"""A small stand-in for the Hugging Face hub, on this machine: real HTTP, for the real huggingface_hub client.

It knows what the client asks for to make a repository, to send files (small ones within the commit, large ones by the
LFS protocol) and to get them. Repositories and their commits are in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_of_the_tests"


class FakeHub:
    """Hub of a test, as a context; `url` is its address.

    Attributes:
        log: method and path of each request.
        commits: by repository, the files of each commit by its id; the last one is `main`.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.objects: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environment(self, home: Path | str) -> dict[str, str]:
        """Return the variables by which the client, loaded after they are set, knows this hub alone."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a commit."""
        commits = self.commits[repo]
        return commits[revision] if revision in commits else commits[list(commits)[-1]]

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Add a commit with exactly these files; also for what no client would send."""
        number = len(self.commits.setdefault(repo, {}))
        name = hashlib.sha1(f"{repo} {number}".encode()).hexdigest()
        self.commits[repo][name] = dict(files)
        return name


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        path, body = self._start()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.hub.commits.setdefault(repo, {"0" * 40: {}})
            self._json({"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/.+", path):
            modes = {True: "lfs", False: "regular"}
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [
                {"path": name, "uploadMode": modes[name.endswith(".safetensors")], "shouldIgnore": False}
                for name in names
            ]
            self._json({"files": files})
        elif match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [
                {
                    **{key: each[key] for key in ("oid", "size")},
                    "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}},
                }
                for each in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")
        elif match := re.fullmatch(r"/api/models/(.+)/commit/.+", path):
            self._commit(match[1], body)
        else:
            self._json({"error": f"this stand-in has no {path}"}, 404)

    def _commit(self, repo: str, body: bytes) -> None:
        files = dict(self.hub.files(repo))
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        name = self.hub.commit(repo, files)
        self._json({"commitUrl": f"{self.hub.url}/{repo}/commit/{name}", "commitOid": name, "success": True})

    def do_PUT(self) -> None:
        path, body = self._start()
        oid = path.removeprefix("/lfs/")
        if hashlib.sha256(body).hexdigest() != oid:
            self._json({"error": "not what was announced"}, 400)
            return
        self.hub.objects[oid] = body
        self._json({})

    def do_HEAD(self) -> None:
        self._get(with_body=False)

    def do_GET(self) -> None:
        self._get(with_body=True)

    def _get(self, with_body: bool) -> None:
        path, _ = self._start()
        if match := re.fullmatch(r"/api/models/(.+?)(?:/(?:tree|revision)/([^/?]+))?", path):
            self._about(match[1], match[2] or "main", tree="/tree/" in path)
            return
        match = re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path)
        if match is None or match[1] not in self.hub.commits:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
            return
        repo, revision, name = match.groups()
        commits = self.hub.commits[repo]
        if revision not in ("main", *commits):
            self._json({"error": "no such revision"}, 404, {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
            return
        commit = revision if revision in commits else list(commits)[-1]
        content = commits[commit].get(name)
        if content is None:
            there = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            self._json({"error": "Entry not found"}, 404, there, with_body=with_body)
            return
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        self._send(content, 200, "application/octet-stream", headers, with_body=with_body)

    def _about(self, repo: str, revision: str, tree: bool) -> None:
        if repo not in self.hub.commits:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return
        files = self.hub.files(repo, revision)
        if tree:
            self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
            )
            return
        last = list(self.hub.commits[repo])[-1]
        self._json({"id": repo, "sha": last, "siblings": [{"rfilename": name} for name in files]})

    def _start(self) -> tuple[str, bytes]:
        path = self.path.partition("?")[0]
        self.hub.log.append(f"{self.command} {path}")
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return path, body
        return path, self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(
        self,
        value: Any,
        status: int = 200,
        headers: dict[str, str] | None = None,
        kind: str = "application/json",
        with_body: bool = True,
    ) -> None:
        self._send(json.dumps(value).encode(), status, kind, headers or {}, with_body=with_body)

    def _send(self, content: bytes, status: int, kind: str, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)
