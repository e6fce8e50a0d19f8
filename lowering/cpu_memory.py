"""Memory shared by the ranks of one host: made by rank 0, mapped by all, gone with the last.

An anonymous file (memfd) is handed from rank 0 to the others over a unix socket, so it has no
name anybody could open. Where that can't work (ranks in containers with networks of their own)
a file in /dev/shm of mode 0600 with an unguessable name takes its place, and is unlinked as
soon as all have it open. Space is reserved before it is mapped: a container with little shared
memory then refuses, where a write would end in SIGBUS. Nothing is left behind by a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Final

#: How long a rank waits for the others while the memory is handed round, in seconds.
HANDOVER_SECONDS: Final = 60.0
_FOLDER: Final = "/dev/shm"
MODES: Final = ("memfd", "file")


@dataclass
class SharedMemory:
    """A mapping of the group's memory and the descriptor that keeps this rank's lock."""

    descriptor: int
    mapping: mmap.mmap

    def close(self) -> None:
        """Unmap and drop the lock; the memory itself goes with the last rank."""
        with contextlib.suppress(BufferError):
            self.mapping.close()
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


class Offer:
    """Rank 0's side: memory that is ready to be handed round.

    Attributes:
        address: What the other ranks need to receive it.
        descriptor: The memory.
    """

    def __init__(self, mode: str, size: int) -> None:
        """Make and reserve the memory; raises OSError if there isn't room."""
        self.mode = mode
        self._server: socket.socket | None = None
        token = secrets.token_hex(16)
        if mode == "memfd":
            self.descriptor = os.memfd_create("fx_fusion", os.MFD_CLOEXEC)
            self.address = f"fx_fusion-{token}"
        else:
            self.address = f"{_FOLDER}/fx_fusion-{token}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.descriptor = os.open(self.address, flags, 0o600)
        try:
            os.posix_fallocate(self.descriptor, 0, size)
            if mode == "memfd":
                self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._server.bind(f"\0{self.address}")
                self._server.listen(64)
        except OSError:
            os.close(self.descriptor)
            self.finish()
            raise

    def hand_to(self, count: int) -> None:
        """Give the descriptor to `count` ranks of the same user; raises OSError in time."""
        if self._server is None:
            return  # the file has a name until `finish`
        self._server.settimeout(HANDOVER_SECONDS)
        given = 0
        while given < count:
            connection, _ = self._server.accept()
            with connection:
                if _user_of(connection) == os.getuid():
                    socket.send_fds(connection, [b"fx"], [self.descriptor])
                    given += 1

    def finish(self) -> None:
        """Nobody else may come: close the socket, unlink the name."""
        if self._server is not None:
            self._server.close()
        if self.mode == "file":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)


def receive(mode: str, address: str) -> int:
    """Another rank's side: the memory's descriptor; raises OSError in time."""
    if mode == "file":
        return os.open(address, os.O_RDWR | os.O_CLOEXEC)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(HANDOVER_SECONDS)
        connection.connect(f"\0{address}")
        if _user_of(connection) != os.getuid():
            raise PermissionError("the socket of rank 0 belongs to another user")
        _, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
    if not descriptors:
        raise OSError("rank 0 sent no memory")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def attach(descriptor: int, size: int, rank: int) -> SharedMemory:
    """Map the memory and lock this rank's byte, by which the others see that it lives."""
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    return SharedMemory(descriptor, mapping)


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])
