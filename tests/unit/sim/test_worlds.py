import subprocess
import sys

import pytest

from streamflow.backends import open_backend
from streamflow.backends.sim import open_device, worlds
from streamflow.config import Settings, SimOptions
from streamflow.errors import Closed


def test_the_registry_opens_the_simulator(settings):
    backend = open_backend("sim", 0, settings, "loop")
    assert backend.name == "sim"
    assert backend.is_virtual
    backend.close()


def test_a_device_that_is_not_there_is_named_with_how_many_are():
    for index in (-1, 3):
        with pytest.raises(ValueError, match="there are 3"):
            open_device(index, Settings(sim=SimOptions(devices=3)), "loop")


def test_devices_of_one_loop_share_a_clock(lab, open_lab):
    other = open_lab(1)
    lab.mark(lab.stream(), "work", cost_s=lambda: 4.0)
    assert other.device.advance(0)
    assert lab.log == ["work"]
    assert other.device.clock_s() == 4.0


def test_devices_of_other_loops_do_not(lab, open_lab):
    other = open_lab(0, "other loop")
    lab.mark(lab.stream(), "work")
    assert not other.device.advance(0)
    lab.run()
    assert other.device.clock_s() == 0.0
    stream = lab.stream()
    with pytest.raises(ValueError, match="same event loop"):
        stream.wait(other.record(other.stream()))


def test_the_next_world_starts_afresh(open_lab):
    lab = open_lab()
    lab.mark(lab.stream(), "work")
    lab.allocate(lab.stream(), 1 << 20)
    lab.run()
    assert lab.device.clock_s() > 0
    lab.device.close()
    assert "loop" not in worlds._worlds
    again = open_lab()
    assert again.device.clock_s() == 0.0
    assert again.device.memory_info()[0] == 1 << 30


def test_closing_twice_is_fine_and_counts_once(open_lab):
    lab, other = open_lab(0), open_lab(1)
    lab.device.close()
    lab.device.close()
    other.mark(other.stream(), "still there")
    other.run()
    assert other.log == ["still there"]


def test_closing_drops_queued_work_and_releases_who_waits_for_it(open_lab):
    lab, other = open_lab(0), open_lab(1)
    stream, there = lab.stream(), other.stream()
    event = lab.record(stream)
    with lab.device.controls().gate(stream):
        lab.mark(stream, "never")
        there.wait(lab.record(stream))
        other.mark(there, "released")
        lab.device.close()
    other.run()
    assert lab.log == []
    assert other.log == ["released"]
    with pytest.raises(Closed):
        _ = event.is_done


def test_two_openings_of_one_device_share_its_memory(open_lab):
    lab, again = open_lab(0), open_lab(0)
    address = lab.allocate(lab.stream(), 1 << 20)
    assert again.device.memory_info()[0] == (1 << 30) - (1 << 20)
    stream = again.stream()
    assert again.read(address, 4, stream) == b"\xa5" * 4
    lab.device.destroy_pool(lab.pool)
    lab.device.close()
    assert again.read(address, 4, stream) == b"\xa5" * 4  # it may be the other's
    again.device.deallocate(address, stream)
    again.run()
    assert again.device.memory_info()[0] == 1 << 30


def test_a_free_that_closing_drops_gives_its_memory_back_all_the_same(open_lab):
    lab, again = open_lab(0), open_lab(0)
    stream = lab.stream()
    pooled = lab.allocate(stream, 1 << 20)
    linear = lab.device.allocate_linear_blocking(1 << 20)
    lab.device.controls().gate(stream)
    for address in (pooled, linear):
        lab.device.deallocate(address, stream)
    lab.device.destroy_pool(lab.pool)
    lab.device.close()
    assert again.device.memory_info()[0] == 1 << 30


def test_a_destroyed_pool_is_forgotten_once_it_is_empty(lab):
    gpu, stream = lab.device.gpu, lab.stream()
    before = list(gpu.pools)
    lab.device.destroy_pool(lab.device.create_pool(release_threshold_nbytes=0))
    assert gpu.pools == before
    address = lab.allocate(stream, 64)
    lab.device.destroy_pool(lab.pool)
    assert gpu.pools == before
    lab.device.deallocate(address, stream)
    assert gpu.pools == []


def test_closing_frees_the_engines_for_others(open_lab):
    lab, again = open_lab(0), open_lab(0)
    for i in range(12):
        lab.mark(lab.stream(), i, cost_s=lambda: 100.0)
    lab.device.world.next_s()  # eight are running, four wait for a slot
    lab.device.close()
    for i in range(8):
        again.mark(again.stream(), i, cost_s=lambda: 1.0)
    again.run()
    assert lab.log == []
    assert again.device.clock_s() == 1.0


def test_a_loop_has_one_kind_of_clock(lab):
    with pytest.raises(ValueError, match="other clock"):
        open_device(1, Settings(sim=SimOptions(clock="wall")), "loop")


def test_properties_are_an_h200s_with_the_simulators_memory(lab):
    properties = lab.device.properties
    assert properties.total_memory_nbytes == 1 << 30
    assert properties.max_threads_per_block == 1024
    assert properties.compute_capability == (9, 0)


def test_the_simulator_never_imports_cuda():
    code = (
        "import sys, streamflow.backends.sim as s; from streamflow.config import Settings;"
        "s.open_device(0, Settings(), 'k').close();"
        "sys.exit('cuda' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
