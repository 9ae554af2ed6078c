"""A hub in this process: the routes of the Hugging Face hub that a download uses, over a folder."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The served models and the requests.

    Attributes:
        folders: model's name -> folder with its files.
        requests: method and path of each request.
        stop_after: number of bytes of a file after which the connection breaks; None: files are sent whole.
    """

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self.requests: list[tuple[str, str]] = []
        self.stop_after: int | None = None
        self.url = ""

    def gets_of(self, name: str) -> int:
        """Return how often a file was requested with GET."""
        return sum(method == "GET" and path.endswith(f"/{name}") for method, path in self.requests)


@contextmanager
def serve_hub(folders: dict[str, Path]):
    """Serve models until the end of the context."""
    hub = Hub(folders)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._answer()

        def do_HEAD(self):
            self._answer()

        def log_message(self, *_):
            pass

        def _answer(self):
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            for name, folder in hub.folders.items():
                if path.startswith(f"/api/models/{name}"):
                    return self._listing(name, folder, is_tree="/tree/" in path)
                prefix = f"/{name}/resolve/"
                if path.startswith(prefix):
                    return self._file(folder / path.removeprefix(prefix).partition("/")[2])
            return self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})

        def _listing(self, name, folder, *, is_tree):
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            names = [str(file.relative_to(folder)) for file in files]
            sizes = [file.stat().st_size for file in files]
            if is_tree:
                answer = [
                    {"type": "file", "path": path, "size": size, "oid": hashlib.sha1(path.encode()).hexdigest()}
                    for path, size in zip(names, sizes, strict=True)
                ]
            else:
                answer = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in names]}
            return self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _file(self, file):
            if not file.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            data = file.read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            wanted = self.headers.get("Range")
            if wanted and wanted.endswith("-"):
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                return self._send(206, data[start:], headers)
            return self._send(200, data, headers)

        def _send(self, status, data, headers):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                if hub.stop_after is not None and len(data) > hub.stop_after:
                    self.wfile.write(data[: hub.stop_after])
                    self.wfile.flush()
                    self.connection.close()
                    return
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
