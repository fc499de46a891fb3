"""Hosts on this machine: network namespaces on one switch, each with a link of a given rate. Linux, as root, with `ip` and
`tc`.

with Hosts(2, mbit=100) as hosts:
    processes = hosts.launch([sys.executable, "train.py"])   # one process per host, as torchrun would start them
    hosts.unplug(1); hosts.plug_in(1); hosts.sent_bytes(1)

With per_host=2 there are two of them on each. These talk to each other by their host's address, too, but what is for the host
itself never reaches its link: it is neither slowed down nor counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

PORT = 29511


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)"
    name = f"lsgd{os.getpid()}t"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode != 0:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class Hosts:
    """count: how many. mbit: rate of each host's link, in each direction; None for as fast as it goes. per_host: processes on
    each."""

    def __init__(self, count: int, mbit: float | None = None, per_host: int = 1) -> None:
        self.count = count
        self.per_host = per_host
        self._mbit = mbit
        self._names = [f"lsgd{os.getpid()}h{host}" for host in range(count)]
        self._switch = f"lsgd{os.getpid()}s"

    def __enter__(self) -> Hosts:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for host, name in enumerate(self._names):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", self._switch)
                _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge", "up")
                self._shape(name, "eth0")
                self._shape(self._switch, f"port{host}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in [*self._names, self._switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def launch(self, command: Sequence[str], **options: object) -> list[subprocess.Popen[str]]:
        """Start `command` `per_host` times on each host, with the variables from which torch.distributed knows its place: in
        order of rank."""
        return [self._start(rank, command, options) for rank in range(self.count * self.per_host)]

    def run(self, command: Sequence[str]) -> str:
        """Run `command` on every host to its end, and give what rank 0 printed. Raises SystemExit if one fails."""
        processes = self.launch(command, stdout=subprocess.PIPE)
        try:
            printed = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed := {rank: process.returncode for rank, process in enumerate(processes) if process.returncode}:
            raise SystemExit(f"ranks failed (exit status of each: {failed}); their errors are above")
        return printed[0]

    def unplug(self, host: int) -> None:
        """From now on nothing arrives there or leaves: no error, just silence."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def plug_in(self, host: int) -> None:
        _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def sent_bytes(self, host: int) -> int:
        """Bytes that have left the host, headers included."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        done = subprocess.run(
            ["ip", "netns", "exec", self._names[host], "cat", path], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    def _shape(self, namespace: str, device: str) -> None:
        if self._mbit is not None:
            # A burst of 10 ms at full rate and at least a few packets; the queue holds 100 ms.
            burst = max(16_000, int(self._mbit * 1e6 / 8 / 100))
            shape = ["tbf", "rate", f"{self._mbit}mbit", "burst", str(burst), "latency", "100ms"]
            subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape], check=True)

    def _start(self, rank: int, command: Sequence[str], options: dict[str, object]) -> subprocess.Popen[str]:
        host, local_rank = divmod(rank, self.per_host)
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(self.count * self.per_host),
            "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.per_host), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": self.address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0", "ACCELERATE_USE_CPU": "true",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        whole = ["ip", "netns", "exec", self._names[host], *command]
        return subprocess.Popen(whole, env=os.environ | variables, text=True, **options)  # type: ignore[call-overload]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
