"""What fake-gcs-server lacks of Google's protocol, in front of it.

Google Cloud Storage speaks two dialects. Iceberg speaks the one in JSON, which the server knows well, and passes here
unchanged, as do reads, listings and deletes of the other one, in XML. Writes in XML, as obstore makes them, the server
does not know (a put says "invalid uploadType"): they go on to it in JSON, and it judges their conditions itself. An
upload in parts is gathered here, and goes on whole.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_hex
from urllib.parse import parse_qs, quote, unquote, urlsplit

_HOP = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server", "host"})
_JSON = ("storage", "upload", "download", "batch", "_internal")


@contextmanager
def translating(server: ThreadingHTTPServer, behind: int) -> Iterator[None]:
    """Answers at the address of a server that has been bound, by the one at a port behind it."""
    uploads: dict[str, dict[int, bytes]] = {}

    class Handler(_Handler):
        port = behind
        parts = uploads

    server.RequestHandlerClass = Handler
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port: int
    parts: dict[str, dict[int, bytes]]

    def handle_any(self) -> None:
        body = self._body()
        url = urlsplit(self.path)
        bucket, _, key = url.path.lstrip("/").partition("/")
        query = parse_qs(url.query, keep_blank_values=True)
        if bucket in _JSON or not key or self.command in ("GET", "HEAD") or (self.command == "DELETE" and not query):
            self._pass_on(body)
        elif "uploads" in query:
            upload = token_hex(8)
            self.parts[upload] = {}
            self._xml(f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>")
        elif "partNumber" in query:
            self.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            self._answer(200, {"ETag": f'"{query["partNumber"][0]}"'})
        elif "uploadId" in query:
            parts = self.parts.pop(query["uploadId"][0])
            if self.command == "DELETE":
                self._answer(204, {})
            else:
                made = self._insert(bucket, key, b"".join(parts[number] for number in sorted(parts)))
                etag = f"<ETag>{json.dumps(made['etag'])}</ETag>"
                self._xml(f"<CompleteMultipartUploadResult>{etag}</CompleteMultipartUploadResult>", made)
        elif source := self.headers.get("x-goog-copy-source"):
            there, _, name = source.lstrip("/").partition("/")
            path = f"/storage/v1/b/{there}/o/{quote(unquote(name), safe='')}/rewriteTo/b/{bucket}/o/{key}"
            status, _, answer = self._ask("POST", path, b"{}", {"Content-Type": "application/json"})
            self._answer(status, {}, answer)
        else:
            made = self._insert(bucket, key, body)
            if made:
                self._answer(200, {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]})

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_any  # noqa: N815

    def _insert(self, bucket: str, key: str, data: bytes) -> dict[str, str]:
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(unquote(key), safe='')}"
        if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
            path += f"&ifGenerationMatch={generation}"
        status, _, answer = self._ask("POST", path, data, {"Content-Type": "application/octet-stream"})
        if status != 200:
            self._answer(status, {}, answer)
            return {}
        found = json.loads(answer)
        return {"etag": str(found["etag"]).strip('"'), "generation": str(found["generation"])}

    def _pass_on(self, body: bytes) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        status, found, answer = self._ask(self.command, self.path, body, headers)
        kept = {name: value for name, value in found.items() if name.lower() not in _HOP - {"date"}}
        self._answer(status, kept, answer, found.get("Content-Length") if self.command == "HEAD" else None)

    def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Host": self.headers["Host"], **headers})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while length := int(self.rfile.readline().partition(b";")[0], 16):
            found += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _xml(self, text: str, made: Mapping[str, str] | None = None) -> None:
        headers = {"Content-Type": "application/xml"}
        if made:
            headers["x-goog-generation"] = made["generation"]
        self._answer(200, headers, text.encode())

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes = b"", length: str | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
