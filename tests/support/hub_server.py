"""A stand-in for the Hugging Face Hub on this machine, for tests of what is downloaded and streamed.

    with HubServer() as hub:
        hub.add("models", "owner/name", {"config.json": b"{}"})
        hub.faults["model.safetensors"] = Fault(cut=1000)
        subprocess.run(command, env=os.environ | hub.environment(cache))
        hub.requests                             # [("HEAD", "/owner/name/resolve/main/config.json"), ...]

It answers what huggingface_hub, transformers and datasets ask: repositories, revisions, trees, paths and files, and
uploads by whoever has the token, of large files by the protocol of git LFS (`HF_HUB_DISABLE_XET=1`). Small files come
from the Hub itself after a relative redirect, large ones from another host, as on huggingface.co.
`HF_ENDPOINT` is read when huggingface_hub is imported, so that clients run in a process of their own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Fault", "HubServer", "read_folder"]

LARGE = 10_000  # bytes from which a file is kept outside git, and served by another host
MISSING_REPOSITORY = (401, "RepoNotFound", "Repository not found")
MISSING_REVISION = (404, "RevisionNotFound", "Invalid rev id")
MISSING_FILE = (404, "EntryNotFound", "Entry not found")
NOT_SIGNED_IN = (401, "GatedRepo", "Access to this model is restricted. Please log in.")
NO_TOKEN = (401, "", "Invalid username or password.")
NOT_ADMITTED = (403, "GatedRepo", "Access to this model is restricted and you are not in the authorized list.")


@dataclass
class Fault:
    """What goes wrong with the content of a file.

    Attributes:
        cut: close the connection after this many bytes of a response.
        times: how many responses are concerned; later ones are right.
        stall: seconds to wait before the content.
        status: answer with this status instead.
        replace: bytes that are served instead.
    """

    cut: int | None = None
    times: int = 10**9
    stall: float = 0.0
    status: int | None = None
    replace: bytes | None = None


@dataclass
class _Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_hash(content: bytes) -> str:
    """The ETag of a file: of a large one SHA-256, of a small one git's hash."""
    return hashlib.sha256(content).hexdigest() if len(content) >= LARGE else git_hash(content)


class HubServer:
    """A Hub that serves repositories from memory.

    Attributes:
        faults: what goes wrong, by pattern of paths in a repository, or of paths of the API that begin with "/".
        requests: method and path of every request.
        authorized: what the requests for large files had in their Authorization header; it must not leave the Hub.
        token: opens gated repositories, and lets upload.
        received: large files that were uploaded, by their SHA-256.
    """

    token = "hf_right"

    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}
        self.requests: list[tuple[str, str]] = []
        self.authorized: list[str | None] = []
        self._repositories: dict[tuple[str, str], _Repository] = {}
        self._blobs: dict[str, tuple[str, bytes]] = {}
        self.received: dict[str, bytes] = {}
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.cdn = f"http://localhost:{self._server.server_port}/cdn/"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(
        self, kind: str, name: str, files: Mapping[str, bytes], *, branch: str = "main", gated: bool = False
    ) -> str:
        """Commit files as the newest state of a branch, and return the commit.

        Args:
            kind: "models" or "datasets".
            name: OWNER/NAME.
        """
        repository = self._repositories.setdefault((kind, name), _Repository())
        listing = "".join(f"{path} {file_hash(content)}\n" for path, content in sorted(files.items()))
        commit = hashlib.sha1(f"{kind} {name} {branch}\n{listing}".encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.branches[branch] = commit
        repository.gated = gated
        return commit

    def files(self, name: str) -> dict[str, bytes]:
        """The files of a model's repository, on its branch main."""
        repository = self._repositories["models", name]
        return repository.commits[repository.branches["main"]]

    def make(self, name: str, *, private: bool) -> bool:
        """Make an empty repository of a model; False: there is one."""
        if ("models", name) in self._repositories:
            return False
        self.add("models", name, {})
        self._repositories["models", name].private = private
        return True

    def is_private(self, name: str) -> bool:
        """Whether a model's repository is private."""
        return self._repositories["models", name].private

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """Environment variables under which a process asks this Hub, and keeps what it gets below `cache`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_ETAG_TIMEOUT": "2",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "NO_PROXY": "127.0.0.1,localhost",
            **more,
        }

    def find(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | tuple[int, str, str]:
        """The commit and files of a revision, or the status, error code and message of an answer without it."""
        repository = self._repositories.get((kind, name))
        if repository is None:
            return MISSING_REPOSITORY
        commit = repository.branches.get(revision, revision)
        return (commit, repository.commits[commit]) if commit in repository.commits else MISSING_REVISION

    def is_gated(self, kind: str, name: str) -> bool:
        """Whether the files of a repository are for those who were admitted."""
        repository = self._repositories.get((kind, name))
        return repository is not None and repository.gated

    def take_fault(self, path: str) -> Fault | None:
        """The fault that this request meets, which counts it."""
        with self._lock:
            for pattern, fault in self.faults.items():
                if fnmatch(path, pattern) and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def publish(self, path: str, content: bytes) -> str:
        """The address of a large file on the other host."""
        digest = file_hash(content)
        self._blobs[digest] = (path, content)
        return f"{self.cdn}{digest}"

    def published(self, digest: str) -> tuple[str, bytes] | None:
        return self._blobs.get(digest)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def do_PUT(self) -> None:
        self._respond()

    def _respond(self) -> None:
        address = urlsplit(self.path)
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub = self.server_hub
        hub.requests.append((self.command, address.path))
        try:
            self._route(address.path, parse_qs(address.query))
        except (BrokenPipeError, ConnectionResetError):  # the client went away
            self.close_connection = True

    def _route(self, path: str, query: Mapping[str, list[str]]) -> None:
        hub = self.server_hub
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if path.startswith("/api/") and "resolve-cache" not in parts and (fault := hub.take_fault(path)) is not None:
            time.sleep(fault.stall)
            if fault.status is not None:
                self._fail(fault.status, "", "the Hub has a fault")
                return
        match parts:
            case [""]:
                self._answer(b"the Hub", {})
            case ["api", "whoami-v2" | "repos" | "validate-yaml", *_] | [_, _, "info", *_] if not self._signed_in():
                self._fail(*NO_TOKEN)
            case ["api", "whoami-v2"]:
                self._json({"type": "user", "name": "me"})
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                asked = json.loads(self._body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                made = hub.make(name, private=asked.get("visibility") == "private")
                self._json({"url": f"{hub.endpoint}/{name}"}, status=200 if made else 409)
            case ["api", "models", owner, name, "preupload" | "commit" as action, "main"]:
                self._upload(f"{owner}/{name}", action) if self._signed_in() else self._fail(*NO_TOKEN)
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = json.loads(self._body)["objects"]
                to = [{"upload": {"href": f"{hub.endpoint}/received/{each['oid']}"}} for each in objects]
                self._json({"objects": [each | {"actions": act} for each, act in zip(objects, to, strict=True)]})
            case ["received", digest]:
                hub.received[digest] = self._body
                self._answer(b"", {})
            case ["api", ("models" | "datasets") as kind, owner, name, *rest]:
                self._api(kind, f"{owner}/{name}", rest, query)
            case ["api", "models" | "datasets", _] | ["api", "models" | "datasets", _, "revision", _]:
                self._fail(*MISSING_REPOSITORY)
            case ["api", "resolve-cache", ("models" | "datasets") as kind, owner, name, commit, *rest]:
                self._file(kind, f"{owner}/{name}", commit, "/".join(rest), cached=True)
            case ["datasets", owner, name, "resolve", revision, *rest]:
                self._file("datasets", f"{owner}/{name}", revision, "/".join(rest))
            case [owner, name, "resolve", revision, *rest]:
                self._file("models", f"{owner}/{name}", revision, "/".join(rest))
            case ["cdn", digest]:
                hub.authorized.append(self.headers.get("Authorization"))
                if (blob := hub.published(digest)) is None:
                    self._fail(404, "", "no such blob")
                else:
                    self._content(*blob, {"ETag": f'"{digest}"'})
            case _:
                self._fail(404, "", "no such page")

    def _signed_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server_hub.token}"

    def _upload(self, name: str, action: str) -> None:
        hub = self.server_hub
        if action == "preupload":
            modes = {
                each["path"]: "lfs" if each["size"] >= LARGE else "regular" for each in json.loads(self._body)["files"]
            }
            told = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            self._json({"files": told})
            return
        files = dict(hub.files(name))
        for line in self._body.splitlines():
            match json.loads(line):
                case {"key": "file", "value": {"path": path, "content": content}}:
                    files[path] = base64.b64decode(content)
                case {"key": "lfsFile", "value": {"path": path, "oid": digest}}:
                    files[path] = hub.received[digest]
        commit = hub.add("models", name, files)
        self._json({"commitUrl": f"{hub.endpoint}/{name}/commit/{commit}", "commitOid": commit, "success": True})

    def _api(self, kind: str, name: str, rest: list[str], query: Mapping[str, list[str]]) -> None:
        action, revision, *inner = rest or ["revision", "main"]
        match self.server_hub.find(kind, name, revision):
            case int(status), code, message:
                self._fail(status, code, message)
                return
            case str(commit), dict(files):
                pass
        if action == "revision":
            gated = "manual" if self.server_hub.is_gated(kind, name) else False
            private = kind == "models" and self.server_hub.is_private(name)
            siblings = [{"rfilename": path} for path in sorted(files)]
            self._json({"_id": "0", "id": name, "sha": commit, "private": private, "gated": gated, "disabled": False}
                       | {"downloads": 0, "likes": 0, "tags": [], "siblings": siblings})  # fmt: skip
        elif self._refused(kind, name):
            return
        elif action == "tree":
            recursive = query.get("recursive", [""])[0].lower() == "true"
            self._tree(files, "/".join(inner), recursive, commit)
        elif action == "paths-info":
            wanted = parse_qs(self._body.decode()).get("paths", [])
            entries = {str(entry["path"]): entry for entry in _entries(files, "", recursive=True)}
            self._json([entries[path] for path in wanted if path in entries])
        else:
            self._fail(404, "", "no such page")

    def _tree(self, files: Mapping[str, bytes], below: str, recursive: bool, commit: str) -> None:
        entries = _entries(files, below, recursive=recursive)
        if below and not entries:
            self._fail(*MISSING_FILE, commit)
        else:
            self._json(entries)

    def _file(self, kind: str, name: str, revision: str, path: str, *, cached: bool = False) -> None:
        hub = self.server_hub
        match hub.find(kind, name, revision):
            case int(status), code, message:
                self._fail(status, code, message)
                return
            case str(commit), dict(files):
                pass
        if self._refused(kind, name):
            return
        if path not in files:
            self._fail(*MISSING_FILE, commit)
            return
        content = files[path]
        etag = f'"{file_hash(content)}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag}
        if len(content) >= LARGE:
            linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
            self._answer(b"", headers | linked | {"Location": hub.publish(path, content)}, status=302)
        elif not cached:
            self._answer(b"", headers | {"Location": f"/api/resolve-cache/{kind}/{name}/{commit}/{path}"}, status=307)
        else:
            self._content(path, content, headers)

    def _refused(self, kind: str, name: str) -> bool:
        """Answer a request for a gated repository without its token."""
        given = self.headers.get("Authorization")
        if not self.server_hub.is_gated(kind, name) or given == f"Bearer {self.server_hub.token}":
            return False
        self._fail(*(NOT_SIGNED_IN if given is None else NOT_ADMITTED))
        return True

    def _content(self, path: str, content: bytes, headers: Mapping[str, str]) -> None:
        fault = self.server_hub.take_fault(path) if self.command == "GET" else None
        if fault is not None:
            time.sleep(fault.stall)
            if fault.status is not None:
                self._fail(fault.status, "", "the Hub has a fault")
                return
            content = content if fault.replace is None else fault.replace
        status, begin, end = 200, 0, len(content)
        asked = self.headers.get("Range")
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else end, end)
            if begin >= len(content):
                self._answer(b"", {"Content-Range": f"bytes */{len(content)}"}, status=416)
                return
            status, headers = 206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
        cut = None if fault is None else fault.cut
        self._answer(content[begin:end], {"Accept-Ranges": "bytes", **headers}, status=status, cut=cut)

    def _json(self, value: Any, *, status: int = 200) -> None:
        self._answer(json.dumps(value).encode(), {"Content-Type": "application/json"}, status=status)

    def _fail(self, status: int, code: str, message: str, commit: str | None = None) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._answer(message.encode(), headers | ({"X-Repo-Commit": commit} if commit else {}), status=status)

    def _answer(self, body: bytes, headers: Mapping[str, str], *, status: int = 200, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/octet-stream", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


def _entries(files: Mapping[str, bytes], below: str, *, recursive: bool) -> list[dict[str, Any]]:
    """The files and folders below a folder, as the API lists them."""
    prefix = f"{below}/" if below else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        inner = path.removeprefix(prefix).split("/")
        for depth in range(1, len(inner)):
            folder = prefix + "/".join(inner[:depth])
            if recursive or depth == 1:
                entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": git_hash(folder.encode())}
        if recursive or len(inner) == 1:
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
            large = {"oid": file_hash(content), "size": len(content), "pointerSize": 130}
            entries[path] = entry | ({"lfs": large} if len(content) >= LARGE else {})
    return list(entries.values())
