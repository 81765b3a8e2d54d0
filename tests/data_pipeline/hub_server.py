"""A small imitation of the Hugging Face hub over HTTP: serves a folder through the endpoints that ``datasets`` uses.

    with Hub(folder) as hub:            # folder holds OWNER/NAME/..., as write_layout makes it
        subprocess.run(..., env=os.environ | {"HF_ENDPOINT": hub.address})

``hub.requests`` lists all requests. The next ``hub.breaks`` answers with a file's content are cut in the middle, as
by a failing network.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """Server of the datasets under ``folder``, until the with block ends.

    Attributes:
        address: for HF_ENDPOINT. requests: (method, path) of every request so far.
        breaks: number of next answers with a file's content that are cut.
    """

    def __init__(self, folder: Path):
        self.folder, self.requests, self.breaks = folder, [], 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repository: str) -> dict[str, Path]:
        root = self.folder / repository
        return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}

    def commit(self, repository: str) -> str:
        """Return a hash that changes with any file, as a commit's does."""
        digest = hashlib.sha1()
        for name, path in self.files(repository).items():
            digest.update(f"{name} {oid(path)}\n".encode())
        return digest.hexdigest()


def oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms between header and content
    hub: Hub

    def log_message(self, *_) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append((self.command, path))
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+?)(/(revision|tree|paths-info)/([^/]+)/?(.*))?", path):
            repository, _, kind, revision, inside = match.groups()
            if not (self.hub.folder / repository).is_dir():
                return self._error(404, "RepoNotFound")
            if revision not in (None, "main", self.hub.commit(repository)):
                return self._error(404, "RevisionNotFound")
            return self._json(self._tell(repository, kind, inside, parse_qs(url.query), body))
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repository, _, name = match.groups()
            found = self.hub.files(repository).get(name)
            return self._file(repository, found) if found else self._error(404, "EntryNotFound")
        return self._error(404, "RepoNotFound")

    do_GET = do_HEAD = do_POST = _answer

    def _tell(self, repository: str, kind: str | None, inside: str, query: dict, body: bytes):
        files, commit = self.hub.files(repository), self.hub.commit(repository)
        entries = [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid(path)}
            for name, path in files.items()
        ]
        folders = sorted({parent.as_posix() for name in files for parent in Path(name).parents} - {"."})
        entries += [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in folders]
        if kind == "paths-info":
            asked = {name.rstrip("/") for name in self._form(body).get("paths", [])}
            return [entry for entry in entries if entry["path"] in asked]
        if kind == "tree":
            deep = query.get("recursive", ["False"])[0].lower() in ("true", "1")
            below = [entry for entry in entries if entry["path"].startswith(f"{inside}/" if inside else "")]
            depth = len(Path(inside).parts) + 1
            return [entry for entry in below if deep or len(Path(entry["path"]).parts) == depth]
        siblings = [{"rfilename": name} for name in files]
        return {
            "id": repository,
            "_id": "0",
            "sha": commit,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": siblings,
            "cardData": None,
        }

    def _form(self, body: bytes) -> dict:
        if "json" in self.headers.get("Content-Type", ""):
            return json.loads(body)
        return parse_qs(body.decode())

    def _file(self, repository: str, path: Path) -> None:
        content = path.read_bytes()
        size, status, span = len(content), 200, None
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or size - 1), size - 1)
            content, status, span = content[first : last + 1], 206, f"bytes {first}-{last}/{size}"
        self.send_response(status)
        self.send_header("ETag", f'"{oid(path)}"')
        self.send_header("X-Repo-Commit", self.hub.commit(repository))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content)))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.breaks > 0 and len(content) > 1000:
            self.hub.breaks -= 1
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content)

    def _json(self, value) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
