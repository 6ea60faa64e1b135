"""Two network namespaces and a link between them that loses, delays or drops all packets."""

import heapq
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

# Runs in the namespace of a node: opens a TUN device and sends its file descriptor.
_OPEN_DEVICE = """
import fcntl, os, socket, struct, subprocess, sys
descriptor, here, there = sys.argv[1:]
device = os.open("/dev/net/tun", os.O_RDWR)
IFF_TUN, IFF_NO_PI, TUNSETIFF = 0x0001, 0x1000, 0x400454CA
fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
for command in (
    f"ip addr add {here} peer {there} dev wire",
    "ip link set dev wire mtu 9000 up",
    "ip link set dev lo up",
):
    subprocess.run(command.split(), check=True)
socket.send_fds(socket.socket(fileno=int(descriptor)), [b"device"], [device])
"""


class Node:
    """A network and mount namespace; commands run in it.

    Args:
        address: the address of this node.
        peer_address: the address of the other node.
    """

    def __init__(self, address: str, peer_address: str) -> None:
        self.address = address
        # cat ends with this process, because the pipe then closes.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        space = Path(f"/proc/{self._holder.pid}/ns/net")
        while os.readlink(space) == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)  # until unshare has made the namespaces
        receiver, sender = socket.socketpair()
        with receiver, sender:
            descriptor = str(sender.fileno())
            subprocess.run(
                self.command(sys.executable, "-c", _OPEN_DEVICE, descriptor, address, peer_address),
                pass_fds=[sender.fileno()],
                check=True,
            )
            _, (self.device,), _, _ = socket.recv_fds(receiver, 16, 1)

    def command(self, *command: str) -> list[str]:
        """Returns the command line that runs a command in this node."""
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", *command]

    def close(self) -> None:
        os.close(self.device)
        self._holder.kill()
        self._holder.wait()


class Link:
    """Forwards the packets between two nodes in a thread.

    Attributes:
        loss: the fraction of packets that are dropped; 1: a partition.
        delay: seconds between the arrival and the departure of a packet.
    """

    def __init__(self, first: Node, second: Node, seed: int = 0) -> None:
        self.loss = 0.0
        self.delay = 0.0
        self._draw = random.Random(seed)
        self._peer = {first.device: second.device, second.device: first.device}
        self._closing = False
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._closing:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, device, packet = heapq.heappop(waiting)
                os.write(device, packet)
            pause = min(0.1, waiting[0][0] - now) if waiting else 0.1
            for device in select.select([*self._peer], [], [], max(pause, 0))[0]:
                packet = os.read(device, 65536)
                if self._draw.random() >= self.loss:
                    number += 1
                    due = time.monotonic() + self.delay
                    heapq.heappush(waiting, (due, number, self._peer[device], packet))

    def close(self) -> None:
        self._closing = True
        self._thread.join()
