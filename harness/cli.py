"""The command line: ``verbflow COMMAND``. Every command takes ``--json``.

Exit codes: 0 done; 1 an error, told in a sentence; 2 wrong usage; 3 done, but some trials failed (their errors are kept);
4 nothing could be measured here; 5 measured, but not what the definition expects (``run --check``); 130 interrupted, resume
with ``verbflow run NAME --resume``.
"""

from __future__ import annotations

import click

from harness.commands import claims, experiments, machine, results


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog="Exit codes: 0 done, 1 error, 2 usage, "
             "3 some trials failed, 4 nothing could be measured, 5 not as expected, 130 interrupted.")  # fmt: skip
@click.version_option(package_name="verbflow")
def main() -> None:
    """What does RDMA buy a distributed training job, and where does the time go?"""


for _command in (
    experiments.list_command,
    experiments.plan,
    experiments.run,
    experiments.status,
    experiments.report,
    results.compare,
    results.export,
    results.publish,
    claims.check,
    claims.paper,
    machine.doctor,
    machine.rxe,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
