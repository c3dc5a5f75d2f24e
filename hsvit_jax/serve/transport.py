"""HTTP on a connection: parsed in small pieces, refused in JSON; and a log that no client fills."""

import asyncio
import collections
import logging
import time

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

_written: collections.deque[tuple] = collections.deque(maxlen=1000)


class Protocol(H11Protocol, asyncio.BufferedProtocol):
    """A connection, of which a piece is read at a time."""

    def get_buffer(self, sizehint: int) -> bytearray:
        self._piece = bytearray(1 << 14)  # in chunks of one byte it takes 0.05 s
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        if self.conn.their_state is not h11.ERROR:
            self.data_received(bytes(self._piece[:nbytes]))

    def eof_received(self) -> bool:
        """Returns whether the connection stays open: a client may close its half after asking."""
        asked = self.cycle is not None and not self.cycle.response_complete
        if asked and not self.cycle.more_body:
            self.timeout_keep_alive = 0  # it is closed once all is answered
            return True
        if asked or self.conn.trailing_data[0]:
            self.send_400_response("The connection was closed too early.")
        return False

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP as the interface refuses a request."""
        if self.cycle is not None:  # nobody else answers
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = JSONResponse({"error": msg}, headers={"connection": "close"})
            head = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=answer.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.write_eof()
        self.loop.call_later(2, self.transport.close)  # a client that still sends can read it


def is_news(record: logging.LogRecord) -> bool:
    """Returns whether a line is the first of its kind in a minute."""
    kind = record.getMessage(), str(record.exc_info and record.exc_info[1]), time.monotonic() // 60
    first = kind not in _written
    _written.append(kind)
    return first


logging.getLogger("uvicorn.error").addFilter(is_news)
