"""Messages between processes over sockets, with threads of their own: sending and receiving go on beside programs.

    message    number, count of pieces, bytes of each, then the pieces

For each pair (sender, receiver) there is one connection, made at the first message, one thread that sends at one end
and one that receives at the other. Messages are numbered for each pair, in order. The receiving thread takes in
whatever comes, asked for or not: no sender waits for a receiver's program, so nothing can wait in a circle.

Addresses, and a word without which nobody is listened to, are told by the coordination service of `jax.distributed`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import hmac
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from numpy.typing import NDArray

from autoshard import jax_compat
from autoshard.runtime.watch import watch

FOLDER = "autoshard/exchange/"
ADDRESS_MS = 60_000
"""For the address of another process, which may be planning still. Ours."""
LOOK_S = 1.0
"""How often a wait looks whether the other processes live. Ours."""
HELLO = struct.Struct("<32sI")
HEAD = struct.Struct("<QI")
LENGTH = struct.Struct("<Q")
ALIGNED = 64
"""Bytes; arrays that begin at such addresses are not copied by XLA's CPU client (its `MinAlign`)."""


@final
class Exchange:
    """This process's end of all connections."""

    def __init__(self) -> None:
        self._me, self._word = jax.process_index(), secrets.token_bytes(32)
        self._client, self._watch = jax_compat.coordination_client(), watch()
        self._state = threading.Condition()
        self._arrived: dict[tuple[int, int], list[NDArray[Any]]] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._waiting: dict[int, queue.SimpleQueue[tuple[int, Sequence[Any]]]] = {}
        self._unsent = 0
        self._failed: BaseException | None = None
        host, family = own_address()
        self._listener = socket.create_server((host, 0), family=family)
        told = f"{self._listener.getsockname()[1]} {self._word.hex()} {host}"
        self._client.key_value_set(f"{FOLDER}{self._me}", told)
        _thread(self._listen)

    def send(self, process: int, pieces: Sequence[Any]) -> None:
        """Sends single-device arrays of this process, as soon as they are made."""
        if process not in self._waiting:
            self._waiting[process] = queue.SimpleQueue()
            _thread(functools.partial(self._send_all, process, self._waiting[process]))
        with self._state:
            self._unsent += 1
        self._waiting[process].put((self._next(self._me, process), list(pieces)))

    def expect(self, process: int) -> Callable[[], list[NDArray[Any]]]:
        """The next message of a process: what waits for its pieces, as bytes."""
        key = process, self._next(process, self._me)
        return lambda: self._wait(lambda: self._arrived.pop(key, None))

    def flush(self) -> None:
        """Waits until all that was to be sent is on its way.

        Raises:
          ConnectionError: a connection broke.
        """
        self._wait(lambda: None if self._unsent else True)

    def _wait(self, look: Callable[[], Any]) -> Any:
        with self._state:
            while (found := look()) is None:
                if self._failed is not None:
                    raise ConnectionError(f"a message between processes failed: {self._failed}") from self._failed
                if not self._state.wait(LOOK_S) and self._watch is not None:
                    self._watch.check()
            return found

    def _next(self, sender: int, receiver: int) -> int:
        turn = self._numbers[sender, receiver] = self._numbers.get((sender, receiver), 0) + 1
        return turn

    def _fail(self, error: BaseException) -> None:
        with self._state:
            self._failed = error
            self._state.notify_all()

    def _send_all(self, process: int, waiting: queue.SimpleQueue[tuple[int, Sequence[Any]]]) -> None:
        try:
            with self._connect(process) as connection:
                while True:
                    number, pieces = waiting.get()
                    held = [np.ascontiguousarray(np.asarray(piece)).view(np.uint8).reshape(-1) for piece in pieces]
                    lengths = b"".join(LENGTH.pack(each.nbytes) for each in held)
                    connection.sendall(HEAD.pack(number, len(held)) + lengths)
                    for each in held:
                        connection.sendall(each.data)
                    del pieces, held  # a buffer that is looked at cannot be donated
                    with self._state:
                        self._unsent -= 1
                        self._state.notify_all()
        except BaseException as error:
            self._fail(error)

    def _connect(self, process: int) -> socket.socket:
        told = str(self._client.blocking_key_value_get(f"{FOLDER}{process}", ADDRESS_MS))
        port, word, host = told.split(" ")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HELLO.pack(bytes.fromhex(word), self._me))
        return connection

    def _listen(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            _thread(functools.partial(self._receive_all, connection))

    def _receive_all(self, connection: socket.socket) -> None:
        with connection:
            word, process = HELLO.unpack(_read(connection, HELLO.size))
            if not hmac.compare_digest(word, self._word):
                return
            try:
                while True:
                    number, count = HEAD.unpack(_read(connection, HEAD.size))
                    table = _read(connection, LENGTH.size * count)
                    pieces = [_read_array(connection, n) for (n,) in LENGTH.iter_unpack(table)]
                    with self._state:
                        self._arrived[process, number] = pieces
                        self._state.notify_all()
            except BaseException as error:
                self._fail(error)


@functools.cache
def exchange() -> Exchange:
    """Of this process."""
    return Exchange()


def own_address() -> tuple[str, socket.AddressFamily]:
    """This host's address, as it is seen on the way to the coordinator."""
    host, _, port = jax_compat.coordinator_address().rpartition(":")
    family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as found:
        found.connect(where)  # sends nothing
        return str(found.getsockname()[0]), family


def _thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="autoshard-exchange", daemon=True).start()


def _read(connection: socket.socket, count: int) -> bytes:
    return _read_array(connection, count).tobytes()


def _read_array(connection: socket.socket, count: int) -> NDArray[Any]:
    whole = np.empty(count + ALIGNED, np.uint8)
    skip = -whole.ctypes.data % ALIGNED
    found = whole[skip : skip + count]
    view, got = found.data, 0
    while got < count:
        more = connection.recv_into(view[got:])
        if not more:
            raise ConnectionError("the other process closed the connection")
        got += more
    return found
