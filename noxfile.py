"""Every chore of the project, each in an environment that nox makes for it.

``nox -l`` lists them; ``nox -s tests -- -k staging`` hands arguments on.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types", "layers", "docs", "sample"]

# Each test names the backend that it runs on; what the user has set must not decide.
NO_BACKEND_SET = {"STREAMFLOW_BACKEND": None}
LINT_TOOLS: list[str] = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"][
    "lint"
]


def _install(session: nox.Session, *extras: str) -> None:
    """Install the project as a user gets it: a built wheel, no editable link."""
    session.install(f".[{','.join(extras)}]")


def _install_tool(session: nox.Session, name: str) -> None:
    """Install one tool that reads the sources and needs nothing else."""
    session.install(*(tool for tool in LINT_TOOLS if tool.startswith(name)))


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demonstration: a GPU where there is one, the simulator elsewhere."""
    _install(session, "demo", "nvrtc")
    session.run("streamflow", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests on the simulator."""
    _install(session, "test", "demo", "nvrtc")  # all that a test would be skipped without
    session.run("pytest", *session.posargs, env=NO_BACKEND_SET)


@nox.session
def browser(session: nox.Session) -> None:
    """Drive the page of a trace in the machine's Chromium; without one, this fails."""
    _install(session, "test", "browser")
    chosen = ("-m", "browser", "tests/browser", *session.posargs)
    session.run("pytest", *chosen, env=NO_BACKEND_SET)


@nox.session
def sample(session: nox.Session) -> None:
    """Run the tests of the sample project, which knows the wheel and nothing of this checkout."""
    _install(session, "testing")
    project = Path("examples/ci_project").resolve()
    with TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.run("pytest", str(project), *session.posargs, env=NO_BACKEND_SET)


@nox.session
def stress(session: nox.Session) -> None:
    """Run the long soaks, on the simulator."""
    _install(session, "test")
    chosen = ("-m", "stress and not gpu", "tests/stress", *session.posargs)
    session.run("pytest", *chosen, env=NO_BACKEND_SET)


@nox.session
def mutants(session: nox.Session) -> None:
    """Make one mistake at a time, and see the tests notice each."""
    _install(session, "test", "demo", "nvrtc")
    session.run("python", "tests/house/mutants.py", *session.posargs, env=NO_BACKEND_SET)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device."""
    _install(session, "nvrtc", "test")
    chosen = ("-m", "gpu and not stress", "tests", *session.posargs)
    session.run("pytest", *chosen, env=NO_BACKEND_SET)


@nox.session
def gpu_soak(session: nox.Session) -> None:
    """Run the random soak on a CUDA device, for eight minutes."""
    _install(session, "nvrtc", "test")
    session.run("python", "-m", "tests.stress.gpu_soak", *(session.posargs or ("--seconds", "480")))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure; by default what needs no GPU. ``nox -s bench -- P1 P2 --backend cuda``."""
    _install(session, "nvrtc", "test")
    chosen = session.posargs or ("P12", "P13", "overhead", "--backend", "sim")
    session.run("python", "-m", "tests.benchmarks", *chosen)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    _install_tool(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types."""
    _install(session, "demo", "lint", "test")
    session.run("mypy", *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Check that imports go one way."""
    _install_tool(session, "import-linter")
    session.run("lint-imports", "--no-logo", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    _install(session, "docs")
    session.run(
        *("sphinx-build", "-W", "--keep-going", "-b", "html", "-E"),
        *("-d", "docs/_build/doctrees", "docs", "docs/_build/html"),
        *session.posargs,
    )
