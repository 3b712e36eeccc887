"""A model's process without a model: it speaks HTTP and what the supervisor tells and hears.

``settings`` of its start say what it does otherwise: ``load_s``, ``fail`` (a reason), ``keeps``
(bytes that it does not give back), ``deaf`` (it does not end when it is told to), ``writes`` (what
it says before all else), ``stops`` (it stops at ``start``, ``loading`` or ``ready``), ``mute`` (it
answers no ping).
"""

import asyncio
import json
import os
import signal
import socket
import sys
from typing import Any

import h11

Settings = dict[str, Any]
METRICS = b"""\
# TYPE own_total counter
own_total{model="other"} 1.0
# TYPE quire_requests_total counter
quire_requests_total{endpoint="/x"} 2.0
"""


class StandIn:
    def __init__(self, control: asyncio.StreamWriter, start: dict[str, Any]) -> None:
        self.name: str = start["model"]
        self.does: Settings = start["settings"]
        self.control = control
        self.limit: int = start["kv_limit"]

    def reach(self, stage: str) -> None:
        if self.does.get("stops") == stage:
            os.kill(os.getpid(), signal.SIGSTOP)

    def tell(self, **message: Any) -> None:
        self.control.write(json.dumps(message).encode() + b"\n")

    async def load(self) -> None:
        self.reach("start")
        self.control.write(self.does.get("writes", "").encode())
        for done in (0, 1, 2):
            await asyncio.sleep(self.does.get("load_s", 0) / 3)
            self.tell(loaded=done, of=2)
        await self.control.drain()
        self.reach("loading")
        if "fail" in self.does:
            self.tell(failed=self.does["fail"])
            await self.control.drain()
            os._exit(3)
        self.tell(ready=True)
        await self.control.drain()
        self.reach("ready")

    def obey(self, message: dict[str, Any]) -> None:
        if "ping" in message and "mute" not in self.does:
            self.tell(number=message["number"])
        if "kv_limit" in message:
            self.limit = max(message["kv_limit"], self.does.get("keeps", 0))
            told = {"kv_limit": self.limit, "number": message["number"]}
            asyncio.get_running_loop().call_later(
                self.does.get("answers_after_s", 0), lambda: self.tell(**told)
            )
        if "kv_limit" in message and "dies" in self.does:
            os._exit(9)
        if "stop" in message and "deaf" not in self.does:
            os._exit(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        while True:
            request, body = None, b""
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(65536))
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:
                    writer.close()
                    return
            assert request is not None
            await self.answer(connection, request, body, writer)
            connection.start_next_cycle()

    async def answer(
        self, connection: h11.Connection, request: h11.Request, body: bytes, writer: Any
    ) -> None:
        path = request.target.decode().partition("?")[0]
        asked = json.loads(body) if body else {}

        def send(event: Any) -> None:
            writer.write(connection.send(event))

        kind, status = "application/json", asked.get("status", 200)
        answers = [json.dumps(self.told(request, asked)).encode()]
        if path.startswith("/api/"):
            answers = [answers[0] + b"\n"]
        if path == "/api/ps":
            wanted = f"Bearer {self.does['key']}".encode() if "key" in self.does else None
            allowed = wanted is None or (b"authorization", wanted) in request.headers
            status = self.does.get("ps_status", 200) if allowed else 401
            answers = [json.dumps({"models": [{"size": self.does.get("takes", 7)}]}).encode()]
        if path == "/metrics":
            kind, answers = "text/plain", [METRICS]
        if path.startswith("/v1/responses/") and not path.endswith(self.name):
            status = 404
        if status != 200:
            answers = [b'{"error": {"message": "as asked", "type": "t", "code": "c"}}']
        elif asked.get("stream"):
            kind = "text/event-stream"
            answers = [b'data: {"piece": %d}\n\n' % number for number in range(3)]
        headers = [("Content-Type", kind), ("Transfer-Encoding", "chunked"), ("X-Own", "1")]
        send(h11.Response(status_code=status, headers=headers))
        for number, answer in enumerate(answers):
            send(h11.Data(data=answer))
            await writer.drain()
            await asyncio.sleep(asked.get("pause_s", 0))
            if asked.get("die_after") == number:
                os._exit(asked.get("code", 9))
        send(h11.EndOfMessage())

    def told(self, request: h11.Request, asked: dict[str, Any]) -> dict[str, Any]:
        headers = {name.decode(): value.decode() for name, value in request.headers}
        if "die" in asked:
            os._exit(asked["die"])
        target, pid = request.target.decode(), os.getpid()
        says = {"name": self.name, "pid": pid, "headers": headers, "limit": self.limit}
        return says | {"target": target}


async def main() -> None:
    listener, control = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    reader, writer = await asyncio.open_connection(sock=control, limit=1 << 20)
    stand_in = StandIn(writer, json.loads(await reader.readline()))
    if "deaf" in stand_in.does:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await asyncio.start_unix_server(stand_in.serve, sock=listener)
    await stand_in.load()
    async for line in reader:
        stand_in.obey(json.loads(line))
    if "deaf" in stand_in.does:
        await asyncio.sleep(60)
    os._exit(0)


asyncio.run(main())
