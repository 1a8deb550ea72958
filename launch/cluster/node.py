"""Ray on this machine: started, watched and started again by a process of its own, until `cluster stop`.

    $XDG_RUNTIME_DIR/tandem/machine-<name>/     as an engine's (`launch/runtime.py`)
        lock            held by that process as long as it runs
        machine.json    what it says about itself: NodePlace
        ray.log         what Ray's start has printed

Process entry: `python -P -m launch.cluster.node` with a NodeConfig as JSON on standard input. Ray ends with
this process' SIGTERM; after its SIGKILL Ray goes on, and `stop` ends it all the same."""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import psutil

from launch.command_line.table import PORTS
from launch.errors import LaunchError, WrongUsage
from launch.runtime import MACHINE_INFO as INFO
from launch.runtime import RuntimeDir
from protocol.files import private_directory, read_small
from protocol.program import COMMAND, installed, user_folder
from protocol.sockets import runtime_root
from shm.atomic_file import atomic_file
from workers.lifetime import PYTHON, environment

RAY = "2.60"  # the minor version of the extra `cluster`
ENTRY = "launch.cluster.node"
LOG = "ray.log"
MAX_INFO = 1 << 16  # bytes
STARTED = b"Ray runtime started"
# Ports from the first one on: the head's own, the services of a node, then one for each of its Python
# processes.
SERVICES = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
)
PROCESSES = PORTS - 1 - len(SERVICES)
RESOURCE, LABEL, VERSIONS = "tandem", "tandem-machine", "tandem-versions"  # of nodes that take part
OBJECT_STORE = 80_000_000  # bytes, the least that Ray takes: no data goes through it
START_LIMIT = 180.0  # seconds for Ray to start
RAY_PATIENCE, TRIES = 25.0, 3  # seconds, a little less than those after which Ray gives up its own start
STOP_LIMIT = 15.0  # seconds for Ray to end
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before another start
POLL_SECONDS = 0.1
# A lost machine is noticed in 1.5 s instead of 12. Ray must not end processes because shared memory is in
# use: the experts are there. What it starts, and so an expert host, must neither wait behind all other
# programs (a niceness of 15) nor be the first to go when memory is short.
TUNED = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@dataclass(frozen=True)
class NodeConfig:
    """What `cluster start` and `cluster join` make of a machine."""

    name: str
    address: str  # IP address, at which the others reach it
    port: int  # the first of PORTS
    token: str  # path
    head: str = ""  # ADDRESS:PORT; "": this is the head
    versions: str = ""  # `machine.versions`, joined by _

    @property
    def cluster(self) -> str:
        """Returns the head's ADDRESS:PORT."""
        return self.head or f"{self.address}:{self.port}"


@dataclass(frozen=True)
class NodePlace:
    """What a machine's process says about itself."""

    config: NodeConfig
    pid: int
    state: str = "starting"  # starting | up | again | failed
    error: str = ""  # why Ray has ended last


def token_path() -> Path:
    """Returns where the token is, unless --token names another file."""
    return user_folder("STATE") / "cluster-token"


def make_token(path: Path) -> bool:
    """Make the token's file, mode 0600; False where it exists. Raises WrongUsage where others can read that
    one, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        return True
    check_token(path)
    return False


def check_ray() -> None:
    """Raises WrongUsage unless the extra `cluster` is installed."""
    found = installed("ray")
    if not found.startswith(f"{RAY}."):
        command = shlex.join((sys.executable, "-m", "pip", "install", f"ray=={RAY}.*"))
        raise WrongUsage(f"several machines need Ray {RAY} (here: {found.strip('()')}): run {command}")


def check_token(path: Path) -> None:
    """Raises WrongUsage unless this is a file with a token that only this user can read."""
    try:
        status, text = path.stat(), path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        raise WrongUsage(
            f"there is no token in {path}: copy the head's file to there (scp), mode 0600"
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise WrongUsage(f"the token {path} must be readable by you alone: chmod 600 {path}")
    if len(text) < 32 or len(text.split()) != 1:
        raise WrongUsage(f"{path} holds no token: copy the head's file to there (scp)")


def ray_environment(token: str) -> dict[str, str]:
    """Returns the environment of every process that uses Ray. The user's own settings of Ray count."""
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}
    return TUNED | {k: v for k, v in environment(1).items() if k != "RAY_AUTH_TOKEN"} | auth


def ray_command(config: NodeConfig, folder: Path) -> list[str]:
    """Returns the command that starts Ray and ends with it. `folder`: of its sockets and logs."""
    first = config.port + 1 + len(SERVICES)
    settings = {name: config.port + place for place, name in enumerate(SERVICES, 1)}
    settings |= {
        "min-worker-port": first,
        "max-worker-port": first + PROCESSES - 1,
        "num-cpus": 1,
        "num-gpus": 0,
    }
    settings["object-store-memory"] = OBJECT_STORE
    role = ["--address", config.head]
    if not config.head:
        role = ["--head", "--port", str(config.port), "--include-dashboard", "false", "--no-monitor"]
    command = [*PYTHON, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *role]
    command += ["--include-log-monitor", "false"]  # no driver shows what it would read
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    labels = f"{LABEL}={config.name},{VERSIONS}={config.versions}"
    command += ["--node-ip-address", config.address, "--temp-dir", str(folder)]
    return [*command, "--resources", f'{{"{RESOURCE}": 1}}', "--labels", labels]


def check_ports(config: NodeConfig) -> None:
    """Raises WrongUsage where a port is in use on this machine."""
    for port in range(config.port, config.port + PORTS):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                last = config.port + PORTS - 1
                raise WrongUsage(
                    f"port {port} is in use on this machine (Ray takes {config.port} to {last}): give another"
                    " --port"
                ) from None


def own_address(towards: str) -> str:
    """Returns this machine's address on the way to another one. Sends nothing. Raises WrongUsage."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:
        raise WrongUsage(
            f"this machine has no way to {towards}: give its own address with --address"
        ) from None


def folder_of(name: str) -> Path:
    """Returns a machine's runtime directory, which need not exist."""
    return runtime_root() / f"machine-{name}"


def ray_folder(name: str) -> Path:
    """Returns the folder of Ray's sockets, whose paths must be short."""
    digest = hashlib.blake2b(str(folder_of(name)).encode(), digest_size=4).hexdigest()
    return Path(f"/tmp/tandem-ray-{os.geteuid()}-{digest}")


def local_nodes(cluster: str = "") -> list[NodePlace]:
    """Returns the machines that were started here and run, the head first; those of one cluster, by its
    head."""
    found = []
    for path in sorted(runtime_root().glob("machine-*")):
        with suppress(OSError, msgspec.DecodeError):
            place = msgspec.json.decode(read_small(path / INFO, MAX_INFO), type=NodePlace)
            if _watcher(place) is not None and cluster in ("", place.config.cluster):
                found.append(place)
    return sorted(found, key=lambda place: place.config.head)


def names() -> list[str]:
    """Returns the machines that were started here, also those whose watching process was killed."""
    return [path.name.removeprefix("machine-") for path in sorted(runtime_root().glob("machine-*"))]


def read_place(name: str) -> NodePlace | None:
    """Returns what this machine's process has said last; None of none."""
    try:
        return msgspec.json.decode(read_small(folder_of(name) / INFO, MAX_INFO), type=NodePlace)
    except (OSError, msgspec.DecodeError):
        return None


def runs(name: str) -> bool:
    """Returns whether this machine's process runs."""
    return _watcher(read_place(name)) is not None


def _watcher(place: NodePlace | None) -> psutil.Process | None:
    """Returns the process that has written this, if it runs: another one may have its id by now."""
    with suppress(psutil.Error):
        if place is not None and ENTRY in (process := psutil.Process(place.pid)).cmdline():
            return process
    return None


def start(config: NodeConfig, limit: float = START_LIMIT) -> None:
    """Start Ray here, and return once it runs. Raises LaunchError with the reason, WrongUsage."""
    try:
        RuntimeDir.claim(f"machine-{config.name}").remove()
    except WrongUsage:
        raise WrongUsage(
            f"machine {config.name} has joined already: {COMMAND} cluster stop ends it"
        ) from None
    _end_ray(ray_folder(config.name))  # of a process that was killed
    check_ports(config)
    subprocess.run(
        [*PYTHON, "-m", ENTRY],
        input=msgspec.json.encode(asdict(config)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=ray_environment(config.token),
        check=False,
    )
    until = time.monotonic() + limit
    while time.monotonic() < until:
        place = read_place(config.name)
        if place is not None and place.state == "up":
            return
        if place is not None and place.state == "failed":
            stop(config.name)
            raise LaunchError(f"Ray has not started: {place.error}")
        time.sleep(POLL_SECONDS)
    stop(config.name)
    raise LaunchError(f"Ray has not started within {limit:.0f} s")


def stop(name: str) -> None:
    """End Ray on this machine, and the process that watches it; with nothing left of them."""
    if (watcher := _watcher(read_place(name))) is not None:
        with suppress(psutil.Error):
            watcher.terminate()
        if not _exited([watcher], 3 * STOP_LIMIT):  # it waits twice for Ray itself
            watcher.kill()
    _end_ray(ray_folder(name))
    with suppress(WrongUsage):
        RuntimeDir.claim(f"machine-{name}").remove()


def _end_ray(folder: Path) -> None:
    """Kill every process of this user that has this folder of Ray's on its command line, with what it has
    started, which may have another title, and remove the folder. Expert hosts are neither, and go on."""
    ours = {process for process in psutil.process_iter() if _uses(process, folder)}
    for process in list(ours):
        with suppress(psutil.Error):
            ours |= set(process.children(recursive=True))
    for process in ours:
        with suppress(psutil.Error):
            process.kill()
    _exited(list(ours), STOP_LIMIT)
    shutil.rmtree(folder, ignore_errors=True)


def _exited(processes: list[psutil.Process], limit: float) -> bool:
    """Wait until all of these have exited; False where one still runs after so many seconds. A zombie has
    exited: the first process of a container may never ask how."""

    def runs(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        return False

    until = time.monotonic() + limit
    while (left := any(map(runs, processes))) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return not left


def _uses(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.uids().real == os.geteuid() and any(
            word.endswith(str(folder)) or f"{folder}/" in word for word in process.cmdline()
        )
    except psutil.Error:
        return False


class _Node:
    """The process that keeps Ray running."""

    def __init__(self, config: NodeConfig, runtime: RuntimeDir) -> None:
        self._config, self._runtime = config, runtime
        self._place = NodePlace(config, os.getpid())
        self._folder = ray_folder(config.name)
        self.stopped = False

    def run(self) -> None:
        """Start Ray until SIGTERM. One that has never run is started again only where it gave up waiting for
        itself, as it does on a busy machine."""
        pause, ran, tries = FIRST_PAUSE, False, 0
        while not self.stopped:
            tries += 1
            self._say("again" if ran else "starting", self._place.error)
            began = time.monotonic()
            error, was_up = self._run_ray()
            if self.stopped:
                return
            ran = ran or was_up
            slow = time.monotonic() - began > RAY_PATIENCE
            if not ran and (not slow or tries == TRIES):
                self._say("failed", error)
                return
            self._say("again", error)
            pause = FIRST_PAUSE if time.monotonic() - began > LONGEST_PAUSE else min(LONGEST_PAUSE, 2 * pause)
            self._wait(pause)

    def _run_ray(self) -> tuple[str, bool]:
        """Run Ray until it ends; returns its last words, and whether it has been up."""
        _end_ray(self._folder)
        private_directory(self._folder)
        log = self._runtime.path / LOG
        with open(log, "wb") as output:
            process = subprocess.Popen(
                ray_command(self._config, self._folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
            )
        up = False
        while process.poll() is None and not self.stopped:
            if not up and STARTED in log.read_bytes():
                up = True
                self._say("up")
            time.sleep(POLL_SECONDS)
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT / 3)
        process.kill()
        process.wait()
        words = [line.strip() for line in log.read_text(errors="replace").split("\n") if line.strip()]
        _end_ray(self._folder)
        return (words[-1][:300] if words else "it printed nothing"), up

    def _say(self, state: str, error: str = "") -> None:
        self._place = replace(self._place, state=state, error=error)
        with atomic_file(self._runtime.path / INFO, sync=False) as file:
            file.write(msgspec.json.encode(self._place))

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.stopped and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


def main(config: NodeConfig) -> None:
    """Keep Ray running here until SIGTERM."""
    runtime = RuntimeDir.claim(f"machine-{config.name}")
    node = _Node(config, runtime)

    def end(number: int, frame: object) -> None:
        node.stopped = True

    signal.signal(signal.SIGTERM, end)
    try:
        node.run()
    finally:  # also where the runtime directory is gone, as after a logout
        _end_ray(ray_folder(config.name))
    if node.stopped:
        runtime.remove()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeConfig)
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(given)
