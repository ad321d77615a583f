"""A loopback server with the endpoints of the Hugging Face Hub that its client needs to download a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files by commit and path, and the commit of each branch or tag; `access`: open, gated or private."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    access: str = "open"

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit and move the branch to it; return its hash."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[digest] = files
        self.refs[branch] = digest
        return digest


class HubServer:
    """The server; `requests` are the methods and paths that it answered, `tokens` the tokens that it got."""

    def __init__(self, token: str = "hf_secret") -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.token = token
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def repository(self, name: str) -> Repository:
        """Return the repository `ORG/NAME` or `datasets/ORG/NAME`, new if there is none."""
        return self.repositories.setdefault(name, Repository())

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token:
            self.tokens.add(token)
        is_api = path.startswith("/api/")
        parts = path.removeprefix("/api/").strip("/").split("/")
        if parts[0] == "models":
            parts = parts[1:]
        length = 3 if parts[0] == "datasets" else 2
        repository = self.repositories.get("/".join(parts[:length]))
        action, rest = parts[length] if len(parts) > length else "", parts[length + 1 :]
        if repository is None or (repository.access == "private" and token != self.token):
            self._error(request, 401, "RepoNotFound", "Repository not found")
        elif not is_api and repository.access == "gated" and token != self.token:
            self._error(request, 403, "GatedRepo", "Access to this repository is restricted")
        elif is_api and action in ("revision", "tree", ""):
            commit = self._commit(repository, rest[0] if rest else "main")
            if commit is None:
                self._error(request, 404, "RevisionNotFound", "Invalid rev id")
                return
            files = repository.commits[commit]
            rows = [
                {"type": "file", "path": name, "size": len(body), "oid": self._oid(body)}
                for name, body in files.items()
            ]
            info = {
                "id": "/".join(parts[length - 2 : length]),
                "sha": commit,
                "siblings": [{"rfilename": name} for name in files],
            }
            self._send(request, json.dumps(rows if action == "tree" else info).encode(), {})
        else:
            commit = self._commit(repository, rest[0])
            body = repository.commits.get(commit or "", {}).get("/".join(rest[1:]))
            if body is None:
                self._error(request, 404, "EntryNotFound", "Entry not found")
                return
            self._send(request, body, {"X-Repo-Commit": str(commit), "ETag": f'"{self._oid(body)}"'})

    def _commit(self, repository: Repository, revision: str) -> str | None:
        found = repository.refs.get(revision, revision)
        return found if found in repository.commits else None

    def _oid(self, body: bytes) -> str:
        return hashlib.sha1(body).hexdigest()

    def _send(self, request: BaseHTTPRequestHandler, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def _error(self, request: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
        self._send(request, b"{}", {"X-Error-Code": code, "X-Error-Message": message}, status)
