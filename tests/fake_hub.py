"""A Hugging Face hub on this machine, for huggingface_hub's own client over real HTTP: models, branches, commits, LFS.

    with FakeHub() as hub: hub.put("org/draft", {"config.json": b"{}"}); ... HF_ENDPOINT=hub.url

It speaks what huggingface_hub 2.x asks for when it downloads a snapshot and uploads a folder; what it is asked beyond
that is answered 404 and kept in `unknown`, so that a test can see it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_writes"
READ_TOKEN = "hf_reads"


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repo:
    """Files of each branch, and a commit for each."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.branches: dict[str, dict[str, bytes]] = {"main": {}}
        self.messages: list[str] = []

    def sha(self, branch: str) -> str:
        told = sorted((name, git_oid(data)) for name, data in self.branches[branch].items())
        return hashlib.sha1(json.dumps([branch, told]).encode()).hexdigest()

    def branch(self, revision: str) -> str | None:
        """The branch that a revision names, or whose commit it is."""
        if revision in self.branches:
            return revision
        return next((name for name in self.branches if self.sha(name) == revision), None)


class FakeHub:
    """The server. `repos` is its content, `asked` the requests that it got."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.unknown: list[str] = []
        self.cards: list[str] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def put(self, name: str, files: Mapping[str, bytes] | Path, private: bool = False) -> Repo:
        """A repository with these files, or with all of a folder, on `main`."""
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in files.rglob("*") if p.is_file()}
        repo = self.repos.setdefault(name, Repo(private))
        repo.branches["main"] = dict(files)
        return repo


class _Handler(BaseHTTPRequestHandler):
    server_hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, X_Error_Code=code)

    def handle_any(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append((self.command, path))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        writes = token == TOKEN
        if path == "/api/whoami-v2":
            known = token in (TOKEN, READ_TOKEN)
            return self.answer(200, {"name": "me", "type": "user"}) if known else self.refuse(401, "Unauthorized")
        if path == "/api/validate-yaml":  # of a card's front matter
            hub.cards.append(json.loads(self.body)["content"])
            return self.answer(200, {"errors": [], "warnings": []})
        if path.startswith("/lfs/"):
            hub.lfs[path.removeprefix("/lfs/")] = self.body
            return self.answer(200)
        if self.command == "POST" and not writes:
            return self.refuse(403, "Forbidden")
        if path == "/api/repos/create":
            told = json.loads(self.body)
            name = f"{told.get('organization') or 'me'}/{told['name']}"
            if name in hub.repos:
                return self.answer(409, {"error": "exists", "url": f"{hub.url}/{name}"})
            hub.repos[name] = Repo(bool(told.get("private")) or told.get("visibility") == "private")
            return self.answer(200, {"url": f"{hub.url}/{name}", "name": name})
        found = re.match(r"^(?:/api/models)?/([^/]+/[^/]+?)(?:\.git)?(?:/(.*))?$", path)
        repo = hub.repos.get(found[1]) if found else None
        if found is None or repo is None or (repo.private and not writes):
            return self.refuse(404, "RepoNotFound")
        kind, _, rest = (found[2] or "").partition("/")
        act = {"": self.info, "revision": self.info, "tree": self.tree, "resolve": self.resolve, "branch": self.branch,
               "preupload": self.preupload, "info": self.batch, "commit": self.commit}.get(kind)  # fmt: skip
        if act is None:
            hub.unknown.append(f"{self.command} {path}")
            return self.refuse(404, "EntryNotFound")
        return act(found[1], repo, rest)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def files(self, repo: Repo, revision: str) -> dict[str, bytes] | None:
        branch = repo.branch(revision or "main")
        if branch is None:
            self.refuse(404, "RevisionNotFound")
            return None
        return repo.branches[branch]

    def info(self, name: str, repo: Repo, revision: str) -> None:
        files = self.files(repo, revision)
        if files is not None:
            branch = repo.branch(revision or "main")
            assert branch is not None
            self.answer(200, {"id": name, "modelId": name, "sha": repo.sha(branch), "private": repo.private,
                              "siblings": [{"rfilename": f} for f in sorted(files)]})  # fmt: skip

    def tree(self, name: str, repo: Repo, revision: str) -> None:
        files = self.files(repo, revision)
        if files is not None:
            self.answer(200, [{"type": "file", "path": f, "size": len(data), "oid": git_oid(data)}
                              for f, data in sorted(files.items())])  # fmt: skip

    def resolve(self, name: str, repo: Repo, rest: str) -> None:
        revision, _, file = rest.partition("/")
        files = self.files(repo, revision)
        branch = repo.branch(revision)
        if files is None or branch is None:
            return
        if file in files:
            self.answer(200, files[file], X_Repo_Commit=repo.sha(branch), ETag=f'"{git_oid(files[file])}"')
        else:
            self.refuse(404, "EntryNotFound")

    def branch(self, name: str, repo: Repo, branch: str) -> None:
        if branch in repo.branches:
            self.refuse(409, "Conflict")
            return
        repo.branches[branch] = dict(repo.branches["main"])
        self.answer(200, {})

    def preupload(self, name: str, repo: Repo, revision: str) -> None:
        if self.files(repo, revision) is not None:
            told = json.loads(self.body)["files"]
            self.answer(200, {"files": [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False} for f in told
            ]})  # fmt: skip

    def batch(self, name: str, repo: Repo, rest: str) -> None:
        told = json.loads(self.body)
        objects = [{**o, "actions": {"upload": {"href": f"{self.server_hub.url}/lfs/{o['oid']}"}}}
                   for o in told["objects"]]  # fmt: skip
        self.answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, name: str, repo: Repo, revision: str) -> None:
        files = self.files(repo, revision)
        if files is None:
            return
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.server_hub.lfs[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
                files[value["path"]] = data
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = repo.sha(revision)
        url = f"{self.server_hub.url}/{name}/commit/{oid}"
        self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})
