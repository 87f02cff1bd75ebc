"""The program with the race: its test would pass, and the plugin fails it."""

RACY = """
import frames
import pytest

@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_looks_right(sim_device):
    results = await frames.brighten_all_too_early(sim_device, frames.TestPattern(), 6)
    assert len(results) == 6
"""


def test_the_plugin_catches_the_race(pytester):
    pytester.makeini("[pytest]")
    pytester.makepyfile(test_racy=RACY)
    result = pytester.runpytest_inprocess("--streamflow-seed=1")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_looks_right*",
            "1 race on device 0",
            "*host change of memory in flight*",
            "*put*(frames.py:*) on the staging threads reads them",
            "*remedy: await array.staged*",
            "replay with: pytest *--streamflow-seed=1",
            "ERROR *errors.RaceDetect*",
        ]
    )


def test_the_right_program_passes_the_same_test(pytester):
    pytester.makeini("[pytest]")
    pytester.makepyfile(test_right=RACY.replace("_too_early", ""))
    pytester.runpytest_inprocess("--streamflow-seed=1").assert_outcomes(passed=1)
