"""What heartbeats are made of: lines of JSON on a socket, and a clock that knows its own pauses."""

from collections.abc import Mapping
import contextlib
import json
import socket
import time
from typing import Any

__all__ = ['Line', 'Pacer']

_MAX_BYTES = 1 << 20  # of what has no end of line yet; a hello of 1000 hosts has 30 kB


class Line:
  """One connection that carries JSON objects, one a line, and never blocks.

  Attributes:
    connection: the socket.
    heard: when something was last received, by `time.monotonic`.
    task: who is at the other end; None until it has introduced itself.
    doing: what it said last that it is doing.
    facts: what it has said of itself and nobody has compared yet.
  """

  def __init__(self, connection: socket.socket):
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self.connection = connection
    self.heard = time.monotonic()
    self.task: str | None = None
    self.doing = ''
    self.facts: dict[str, Any] | None = None
    self._received = b''

  def send(self, message: Mapping[str, Any]) -> None:
    """Sends it if it can: a broken connection shows when it is read, a full one as silence."""
    with contextlib.suppress(OSError):
      self.connection.send(json.dumps(message).encode() + b'\n')

  def receive(self) -> tuple[list[dict[str, Any]], bool]:
    """What has come since, and whether the connection still stands."""
    stands = True
    try:
      while chunk := self.connection.recv(1 << 16):
        self._received += chunk
        if len(self._received) > _MAX_BYTES:
          return [], False
      stands = False
    except BlockingIOError:
      pass
    except OSError:
      stands = False
    *lines, self._received = self._received.split(b'\n')
    if lines:
      self.heard = time.monotonic()
    try:
      messages = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):  # somebody who speaks another protocol
      return [], False
    return [message for message in messages if isinstance(message, dict)], stands

  def finish(self) -> None:
    """Says that nothing more will be sent."""
    with contextlib.suppress(OSError):
      self.connection.shutdown(socket.SHUT_WR)

  def drain(self, until: float) -> None:
    """Reads on to the other end's `finish`: closing before would discard what it has not read.

    Args:
      until: by `time.monotonic`, at the latest.
    """
    try:
      while (left := until - time.monotonic()) > 0:
        self.connection.settimeout(left)
        if not self.connection.recv(1 << 16):
          return
    except OSError:
      pass

  def close(self) -> None:
    self.connection.close()

  @property
  def closed(self) -> bool:
    return self.connection.fileno() < 0


class Pacer:
  """When to speak next, and who has been silent too long.

  After a pause of this process itself (SIGSTOP, a suspended machine, a lock held for seconds) what
  others sent meanwhile is still unread. So silence counts from the end of such a pause.

  Args:
    interval_s: from one beat to the next.
    timeout_s: the silence that means death.
  """

  def __init__(self, interval_s: float, timeout_s: float):
    self._interval_s, self._timeout_s = interval_s, timeout_s
    self._turned = self._spoken = self._awake_since = time.monotonic()

  def due(self) -> bool:
    """To be called in each turn of a loop: whether a beat is to be sent."""
    now = time.monotonic()
    if now - self._turned > 2 * self._interval_s:
      self._awake_since = now
    self._turned = now
    if now - self._spoken < self._interval_s:
      return False
    self._spoken = now
    return True

  def silent(self, line: Line) -> bool:
    """Whether nothing has come for `timeout_s`."""
    return time.monotonic() - max(line.heard, self._awake_since) > self._timeout_s
