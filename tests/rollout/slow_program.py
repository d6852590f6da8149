"""What a test starts in place of SGLang: says what FAKE_LOG holds, then serves, ends, hangs or is mute (FAKE_END)."""

from __future__ import annotations

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Healthy(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {os.environ['AREAL_LIKE_SERVER_TOKEN']}"
        if os.environ["FAKE_END"] == "mute":
            time.sleep(600)
        self.send_response(200 if known else 401)
        self.end_headers()


if __name__ == "__main__":
    print(os.environ["FAKE_LOG"])
    print("sockets:", os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"], flush=True)
    if os.environ["FAKE_END"] in ("serve", "mute"):
        port = int(sys.argv[sys.argv.index("--port") + 1])
        HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
    time.sleep(0 if os.environ["FAKE_END"] == "end" else 600)
