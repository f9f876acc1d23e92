"""Ssh launcher: ranks on hosts that are reached by ssh, without a scheduler and without a common file system.

Each host needs the checkout at one path with its environment made (`make setup` there), and a login without password. Job and
token go over ssh's standard input, records come back over its output. The ranks meet at a TCP port of the first host.
"""

from __future__ import annotations

import base64
import json
import secrets
import shlex
import shutil
import subprocess
from pathlib import Path

from harness.bench.rank import RECORD_MARK
from harness.cell import ROOT
from harness.launch.base import Job, JobSpec, Launcher, RankSpec

_DEFAULT_PORT = 29400


class SshLauncher(Launcher):
    """``hosts``: addresses that the ranks bind to, rank by rank and then anew. ``logins``: what ssh is told for each
    (user@host), by default the address. ``path``: the checkout there, by default this one's. ``port``: where ranks meet on the
    first host."""

    name = "ssh"
    spread = True
    options = ("hosts", "logins", "path", "port", "ssh")

    def available(self) -> str:
        if shutil.which(self._ssh()[0]) is None:
            return "ssh is not installed: sudo apt-get install -y openssh-client"
        if not self.settings.get("hosts"):
            return 'the definition names no hosts; write [launcher] name = "ssh", hosts = ["10.0.0.1", "10.0.0.2"]'
        return ""

    def host(self, rank: int) -> str:
        hosts = self.settings.get("hosts") or ["127.0.0.1"]
        return str(hosts[rank % len(hosts)])

    def command(self, rank: RankSpec) -> list[str]:
        logins = self.settings.get("logins") or self.settings.get("hosts") or ["127.0.0.1"]
        path = str(self.settings.get("path", ROOT))
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in rank.environment.items())
        there = f"cd {shlex.quote(path)} && {variables} exec .venv/bin/python -m harness.bench.rank - {rank.rank}"
        return [*self._ssh(), str(logins[rank.rank % len(logins)]), there]

    def start(self, job: JobSpec) -> Job:
        specs = self.specs(job)
        job.logs.mkdir(parents=True, exist_ok=True)
        content = {**self.content(job, specs), "port": int(self.settings.get("port", _DEFAULT_PORT))}
        line = json.dumps({"job": content, "token": secrets.token_hex(16)}) + "\n"
        processes: list[subprocess.Popen] = []
        logs: list[Path] = []
        try:
            for spec in specs:
                logs.append(job.logs / f"rank-{spec.rank}.log")
                with logs[-1].open("wb") as stream:
                    process = subprocess.Popen(
                        self.command(spec),
                        stdin=subprocess.PIPE,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                processes.append(process)
                assert process.stdin is not None
                process.stdin.write(line.encode())
                process.stdin.close()
        except OSError:
            Job(processes, logs).kill()
            raise
        return Job(processes, logs, ranks_are_children=False)

    def collect(self, job: JobSpec) -> None:
        for log in job.logs.glob("rank-*.log"):
            text = log.read_text(errors="replace")
            said, mark, record = text.rpartition(RECORD_MARK)
            if mark:
                (job.folder / f"{log.stem}.npz").write_bytes(base64.b64decode(record))
                log.write_text(said)

    def _ssh(self) -> list[str]:
        # A login that asks for a password would hang: better an error.
        return list(self.settings.get("ssh") or ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10"])
