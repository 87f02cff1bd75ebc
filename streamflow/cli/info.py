"""``streamflow info``."""

from __future__ import annotations

from typing import Any

import typer

from streamflow.cli.shared import JsonOption, print_facts, print_json, print_table, read_settings
from streamflow.runtime.units import spell_bytes
from streamflow.testing import installation

__all__ = ["info"]


def info(as_json: JsonOption = False) -> None:
    """Say what is here: devices, versions, settings.

    Which backend a program would get and why, what each backend says of its devices and their
    memory pools, and which settings are in effect and where they came from.
    """
    settings = read_settings()
    backend, why = installation.chosen(settings)
    facts: dict[str, Any] = {
        "backend": backend,
        "why": why,
        "backends": installation.backends(settings),
        "versions": installation.versions(),
        "extras": installation.extras(),
        "plugins": installation.plugins(),
        "settings": [
            {"name": name, "value": value, "source": source}
            for name, value, source in installation.settings_in_effect(settings)
        ],
        "warnings": list(installation.strange_variables()),
    }
    if as_json:
        print_json(facts)
        return
    print_facts({"backend": f"{backend or 'none'}: {why}"})
    for name, each in facts["backends"].items():
        typer.echo(f"\n{name}: {each['says']}")
        _print_devices(each["devices"])
    typer.echo()
    print_facts({name: value or _absent(name) for name, value in facts["versions"].items()})
    typer.echo()
    print_facts(
        {"extras": _extras(facts["extras"]), "plugins": ", ".join(facts["plugins"]) or "none"}
    )
    typer.echo()
    print_table(
        ("setting", "value", "from"),
        [
            (each["name"], _spelled(each["name"], each["value"]), each["source"])
            for each in facts["settings"]
        ],
        left=("setting", "value", "from"),
    )
    for warning in facts["warnings"]:
        typer.echo(f"streamflow: {warning}", err=True)


def _print_devices(devices: list[dict[str, Any]]) -> None:
    for each in devices:
        if "error" in each:
            print_facts({f"  {each['index']}": each["error"]})
            continue
        parts = [
            each["name"],
            f"capability {each['compute_capability']}",
            f"{spell_bytes(each['free_nbytes'])} of {spell_bytes(each['total_nbytes'])} free",
            f"{each['multiprocessors']} multiprocessors",
            f"{each['copy_engines']} copy engines",
        ]
        if each["numa_node"] is not None:
            parts.append(f"NUMA node {each['numa_node']}")
        if each["peers"]:
            parts.append(f"reaches {', '.join(map(str, each['peers']))}")
        print_facts({f"  {each['index']}": ", ".join(parts), "   ": _pool(each["pools"])})


def _pool(pool: dict[str, int] | None) -> str:
    if pool is None:
        return "no stream-ordered pools"
    threshold = pool["release_threshold_nbytes"]
    kept = "all" if threshold >= 1 << 62 else spell_bytes(threshold)
    return (
        f"the pool that all libraries share: {spell_bytes(pool['used_nbytes'])} used of "
        f"{spell_bytes(pool['reserved_nbytes'])}, keeps {kept} of what is free"
    )


def _absent(package: str) -> str:
    return "run from a checkout" if package == installation.DISTRIBUTION else "not installed"


def _extras(found: dict[str, list[str]]) -> str:
    if not found:
        return "not known: this is a checkout, which names none"
    return "\n".join(
        f"{extra}: {'installed' if not missing else 'without ' + ', '.join(missing)}"
        for extra, missing in found.items()
    )


def _spelled(name: str, value: object) -> str:
    if name.endswith("_nbytes") and isinstance(value, int):
        return spell_bytes(value)
    if value in ("", {}):
        return "none"
    return str(value)
