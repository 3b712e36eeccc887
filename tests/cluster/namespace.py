"""A network and processes of our own: Ray listens on all addresses, and there loopback is all."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

INSIDE = "CLUSTER_GATE_IS_ALONE"
# Linux, net/if.h and bits/ioctls.h.
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def enter() -> int | None:
    """Run this program again in namespaces of its own, and return its exit code; None where we are
    in them, or this system has none."""
    if INSIDE in os.environ:
        _bring_up_loopback()
        return None
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        print("not as root on Linux: Ray listens on all of this machine's addresses meanwhile")
        return None
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    refused = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        print(f"no namespaces of our own: {refused.stderr.strip()}")
        return None
    # The first process there has to wait for those that lose their parents: a shell does.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    program = [*shell, sys.executable, "-m", "tests.cluster"]
    own = os.environ | {INSIDE: "1"}
    return subprocess.run([*command, *program], env=own, check=False).returncode


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        _, now = struct.unpack("16sh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", now | IFF_UP))
