"""An environment over HTTP: `python examples/own_service.py`, and in the run `--data.env=http://localhost:8000/`."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from own_environment import retry


def answer(id, row, seed, actions):
    """Play all turns again: nothing has to be kept from request to request."""
    turns = retry(row, seed)
    try:
        text = next(turns)
        for action in actions:
            text = turns.send(action)
        return {"text": text}
    except StopIteration as ended:
        return {"end": True, "reward": ended.value}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(answer(**request)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("localhost", 8000), Handler).serve_forever()
