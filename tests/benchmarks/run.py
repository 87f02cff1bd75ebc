"""Run benchmarks by name and print what they find: ``python -m tests.benchmarks P1 P2``.

Figures are compared with peers measured in the same run; only those ratios mean anything
on another machine.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from importlib import import_module
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the checkout is two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.report import Options, Report, describe_machine, save

__all__ = ["BENCHMARKS", "main"]

BENCHMARKS = {
    "P1": "p01_launch",
    "P2": "p02_await",
    "P3": "p03_waiting",
    "P4P5": "p04_p05_copies",
    "P6": "p06_pipeline",
    "P7": "p07_memory",
    "P8": "p08_leases",
    "P9": "p09_graph",
    "mapped": "mapped",
    "suballocators": "p07_suballocators",
    "fragmentation": "fragmentation",
    "P10": "p10_awaits",
    "P11": "p11_trace",
    "P12": "p12_simulator",
    "P13": "p13_import",
    "R1": "r01_heartbeat",
    "R4R7": "r04_r07_loop",
    "overhead": "overhead",
    "calibration": "fidelity_pipelines",
}


def main(argv: list[str] | None = None) -> int:
    """Run what is named, all of it by default; 1 if a benchmark broke down."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--backend", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--reps", type=int, default=20, help="repetitions, 5 at least to count")
    parser.add_argument("--tiny", action="store_true", help="only see that it runs")
    parser.add_argument("--json", metavar="FILE", help="write everything here too")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for files of a benchmark's own")
    found = parser.parse_args(argv)
    names = found.names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    options = Options(found.backend, 2 if found.tiny else found.reps, found.tiny, found.output)
    machine = describe_machine(options.backend)
    for key, value in machine.items():
        print(f"{key:<20} {value}")
    reports: list[Report] = []
    num_broken = 0
    for name in names:
        module = import_module(f"tests.benchmarks.{BENCHMARKS[name]}")
        print(f"\n{name}. {(module.__doc__ or '').splitlines()[0].removeprefix(f'{name}: ')}")
        try:
            reports.append(module.run(options))
        except Exception:  # the others still run
            num_broken += 1
            traceback.print_exc(file=sys.stdout)
        if found.json:
            save(found.json, machine, options, reports)
    targets = [target for report in reports for target in report.targets]
    num_hit = sum(target["is_hit"] for target in targets)
    print(f"\n{num_hit} of {len(targets)} targets hit; {num_broken} benchmarks broke down")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
