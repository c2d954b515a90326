"""The address of this host by which the other ranks reach it."""

import contextlib
import fcntl
import os
import socket
import struct

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of <linux/sockios.h>


def own_address(is_local: bool) -> str:
    """Return the address to listen at: that of the job's interface, and of no other.

    Args:
        is_local: whether all ranks are on this host.
    """
    if is_local:
        return "127.0.0.1"
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if interface and "," not in interface:
        with contextlib.suppress(OSError):
            return _address_of(interface)
    launcher = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    port = int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "0") or 0)
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as towards:
        towards.connect((launcher, port or 9))  # sends nothing
        return towards.getsockname()[0]
    return socket.gethostbyname(own_host())


def own_host() -> str:
    """Return this host's name, as the job has it."""
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def _address_of(interface):
    request = struct.pack("256s", interface[:15].encode())
    with socket.socket(type=socket.SOCK_DGRAM) as some:
        return socket.inet_ntoa(fcntl.ioctl(some.fileno(), _GET_ADDRESS, request)[20:24])
