"""A Slurm of one node on this machine: munged, slurmctld and slurmd under a generated slurm.conf, all in one folder.

For root in a container: no systemd, no cgroups, no accounting database. All daemons stay in the foreground and end with
the context. What is not here: the packages slurm-wlm and munge (`apt-get install slurm-wlm munge`).
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ports import free_ports

CONF = """
ClusterName=rollbook
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
CredType=cred/munge
SlurmctldPort={control_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,sched_interval=1
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
MinJobAge=60
InactiveLimit=0
NodeName={host} NodeAddr={address} CPUs={cpus} SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
PartitionName=spare Nodes={host} MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


@contextmanager
def slurm_of_one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Start it; gives the environment that makes Slurm's commands find it. Raises RuntimeError with what went wrong."""
    folder = folder.resolve()
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().split(".")[0]
    control_port, node_port = free_ports(2)
    conf = folder / "slurm.conf"
    text = CONF.format(
        folder=folder,
        host=host,
        address="127.0.0.1",
        control_port=control_port,
        node_port=node_port,
        cpus=os.cpu_count(),
    )
    conf.write_text(text)
    environment = {"SLURM_CONF": str(conf)}
    with ExitStack() as stack:
        stack.enter_context(munged(folder / "munge"))
        for daemon in ("slurmctld", "slurmd"):
            options = ["-D", "-f", str(conf), *(["-N", host] if daemon == "slurmd" else [])]
            log = stack.enter_context((folder / f"{daemon}.out").open("wb"))
            process = subprocess.Popen(
                [program(daemon), *options],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
            stack.callback(end, process)
        wait_for_node(environment, folder)
        yield environment


@contextmanager
def munged(folder: Path) -> Iterator[None]:
    """munge wants folders that nobody else can write to, all the way up; ours is root's."""
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    command = [
        program("munged"),
        "--foreground",
        "--force",
        f"--socket={folder}/socket",
        f"--key-file={key}",
        f"--pid-file={folder}/pid",
        f"--log-file={folder}/log",
        f"--seed-file={folder}/seed",
    ]
    with (folder / "out").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not (folder / "socket").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"munged did not start: {(folder / 'out').read_text()}")
            time.sleep(0.05)
        yield
    finally:
        end(process)


def wait_for_node(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 300
    said = ""
    while time.monotonic() < deadline:
        found = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env={**os.environ, **environment}, capture_output=True, text=True
        )
        said = found.stdout + found.stderr
        if found.stdout.split() and set(found.stdout.split()) <= {"idle", "mixed", "allocated"}:
            return
        time.sleep(0.2)
    logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in folder.glob("slurm*.log"))
    raise RuntimeError(f"the node did not come up; sinfo says {said!r}\n{logs}")


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        raise RuntimeError(f"there is no {name}; apt-get install slurm-wlm munge")
    if pwd.getpwuid(os.getuid()).pw_name != "root":
        raise RuntimeError("this Slurm runs as root only")
    return found


def end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
