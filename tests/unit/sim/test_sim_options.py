"""Each field of ``SimOptions`` does what it says, and is read from its variable."""

from dataclasses import fields

import pytest

from streamflow.backends.sim.machine import World
from streamflow.config import Settings, SimOptions
from streamflow.errors import DeviceError, OutOfDeviceMemory

GIB = 1 << 30


def both_ways(lab):
    """A copy in and a copy out of 1 GB each, on two streams; when both are done."""
    a, b = lab.stream(), lab.stream()
    nbytes = 10**6
    source, target = lab.host(nbytes)[0], lab.host(nbytes)[0]
    lab.device.copy_h2d(lab.allocate(a, nbytes), source, nbytes, a)
    lab.device.copy_d2h(target, lab.allocate(b, nbytes), nbytes, b)
    lab.run()
    return lab.device.clock_s()


def test_clock(open_lab):
    assert open_lab(clock="virtual", key=1).device.is_virtual
    assert not open_lab(clock="wall", key=2).device.is_virtual


def test_seed_reaches_the_world():
    assert World(Settings(sim=SimOptions(clock="virtual", seed=7))).seed == 7


def test_devices_are_as_many_as_asked_for(open_lab):
    open_lab(2, devices=3)
    with pytest.raises(ValueError, match="there are 3"):
        open_lab(3, devices=3)


def test_memory_nbytes_is_the_memory_of_each_device(open_lab):
    lab = open_lab(memory_nbytes=3 << 20)
    assert lab.device.memory_info() == (3 << 20, 3 << 20)
    assert lab.device.properties.total_memory_nbytes == 3 << 20
    with pytest.raises(OutOfDeviceMemory):
        lab.allocate(lab.stream(), 4 << 20)


@pytest.mark.parametrize(("engines", "seconds"), [(2, 1.0), (1, 2.0)])
def test_copy_engines(open_lab, engines, seconds):
    rates = {"h2d_rate": 1e6, "d2h_rate": 1e6, "copy_latency_s": 0.0}
    lab = open_lab(copy_engines=engines, rates=rates)
    assert lab.device.properties.num_copy_engines == engines
    assert both_ways(lab) == seconds


@pytest.mark.parametrize(("slots", "seconds"), [(1, 12.0), (5, 3.0), (12, 1.0)])
def test_compute_slots(open_lab, slots, seconds):
    lab = open_lab(compute_slots=slots)
    for n in range(12):
        lab.mark(lab.stream(), n, cost_s=lambda: 1.0)
    lab.run()
    assert lab.device.clock_s() == seconds
    assert sorted(lab.log) == list(range(12))


def test_rates_replace_fields_of_the_cost_model(open_lab):
    lab = open_lab(rates={"kernel_s": 2.5})
    lab.mark(lab.stream(), "one")
    lab.run()
    assert lab.device.clock_s() == 2.5


def test_rates_of_nothing_are_refused(open_lab):
    with pytest.raises(ValueError, match=r"warp_rate.*known: .*kernel_s"):
        open_lab(rates={"warp_rate": 9.0})
    with pytest.raises(ValueError, match="kernel_s"):
        SimOptions(rates={"kernel_s": -1.0})


def test_a_refused_device_leaves_no_world_behind(open_lab):
    with pytest.raises(ValueError, match="warp_rate"):
        open_lab(clock="wall", rates={"warp_rate": 9.0})
    assert open_lab(clock="virtual").device.is_virtual  # would be of the other clock's world


def test_a_profile_that_is_nowhere_is_refused(open_lab):
    with pytest.raises(ValueError, match="nonesuch"):
        open_lab(profile="nonesuch")


# In each: memory was freed on one stream, behind a gate or not, and another stream allocates.
# Memory for one block only, so that a pool that may not reuse it has nothing else to give.


def test_reuse_follow_event_dependencies(open_lab):
    for may, key in ((True, 1), (False, 2)):
        lab = open_lab(
            key=key,
            memory_nbytes=64 << 20,
            reuse_follow_event_dependencies=may,
            reuse_allow_opportunistic=False,
            reuse_allow_internal_dependencies=False,
        )
        a, b = lab.stream(), lab.stream()
        address = lab.allocate(a, 48 << 20)
        with lab.device.controls().gate(a):
            lab.device.deallocate(address, a)
            b.wait(lab.record(a))
            if may:
                assert lab.allocate(b, 48 << 20) == address
            else:
                with pytest.raises(OutOfDeviceMemory):
                    lab.allocate(b, 48 << 20)


def test_reuse_allow_opportunistic(open_lab):
    for may, key in ((True, 1), (False, 2)):
        lab = open_lab(key=key, reuse_allow_opportunistic=may)
        a, b = lab.stream(), lab.stream()
        address = lab.allocate(a, 4096)
        lab.device.deallocate(address, a)  # runs at once; nothing has told the host
        assert (lab.allocate(b, 4096) == address) is may


def test_reuse_allow_internal_dependencies(open_lab):
    for may, key in ((True, 1), (False, 2)):
        lab = open_lab(key=key, memory_nbytes=64 << 20, reuse_allow_internal_dependencies=may)
        a, b = lab.stream(), lab.stream()
        address = lab.allocate(a, 48 << 20)
        with lab.device.controls().gate(a):
            lab.device.deallocate(address, a)
            if may:
                assert lab.allocate(b, 48 << 20) == address
                event = lab.record(b)
                assert not event.is_done  # it waits for the free
            else:
                with pytest.raises(OutOfDeviceMemory):
                    lab.allocate(b, 48 << 20)


VALUES = {
    "clock": ("virtual", "virtual"),
    "seed": ("41", 41),
    "devices": ("5", 5),
    "memory_nbytes": ("1048576", 1 << 20),
    "copy_engines": ("1", 1),
    "compute_slots": ("3", 3),
    "profile": ("mine.json", "mine.json"),
    "rates": (" h2d_rate=1e9, kernel_s=5e-6", {"h2d_rate": 1e9, "kernel_s": 5e-6}),
    "reuse_follow_event_dependencies": ("0", False),
    "reuse_allow_opportunistic": ("off", False),
    "reuse_allow_internal_dependencies": ("no", False),
    "check_races": ("false", False),
    "predict": ("1", True),
    "schedule": ("random:17", "random:17"),
}


def test_the_values_here_are_of_every_field():
    assert set(VALUES) == {item.name for item in fields(SimOptions)}


@pytest.mark.parametrize("name", VALUES)
def test_each_field_is_read_from_its_variable(name):
    text, value = VALUES[name]
    environ = {f"STREAMFLOW_SIM_{name.upper()}": text}
    if name in ("predict", "schedule"):
        environ["STREAMFLOW_SIM_CLOCK"] = "virtual"
    assert getattr(SimOptions(), name) != value
    assert getattr(SimOptions.from_environment(environ), name) == value
    assert getattr(Settings.from_environment(environ).sim, name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("seed", "seven"),
        ("devices", "2.5"),
        ("memory_nbytes", "4GiB"),
        ("copy_engines", "both"),
        ("compute_slots", ""),
        ("rates", "h2d_rate"),
        ("rates", "h2d_rate=fast"),
        ("reuse_allow_opportunistic", "maybe"),
        ("check_races", "2"),
    ],
)
def test_a_value_that_does_not_convert_names_its_variable(name, text):
    variable = f"STREAMFLOW_SIM_{name.upper()}"
    with pytest.raises(ValueError, match=f"{variable}={text!r}"):
        SimOptions.from_environment({variable: text})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("clock", "lunar", "'wall' or 'virtual'"),
        ("devices", "0", "at least 1"),
        ("copy_engines", "3", "1 or 2"),
        ("compute_slots", "0", "at least 1"),
        ("memory_nbytes", "-1", "at least 1"),
    ],
)
def test_a_value_out_of_range_names_its_variable(name, text, told):
    variable = f"STREAMFLOW_SIM_{name.upper()}"
    with pytest.raises(ValueError, match=f"{variable}={text!r}: .*{told}"):
        SimOptions.from_environment({variable: text})
    with pytest.raises(ValueError, match=variable):
        Settings.from_environment({variable: text})


def test_a_keyword_wins_over_the_environment():
    assert SimOptions.from_environment({"STREAMFLOW_SIM_SEED": "1"}, seed=2).seed == 2


def test_settings_take_sim_options_only():
    with pytest.raises(TypeError, match="SimOptions"):
        Settings(sim={"clock": "virtual"})


def test_the_queue_of_a_stream_is_no_option(lab):
    """What a driver would block at is the machine's, not the program's to choose (rule R7)."""
    stream = lab.stream()
    with lab.device.controls().gate(stream):
        for _ in range(lab.device.num_queued_max):
            lab.mark(stream, 0)
        with pytest.raises(DeviceError, match="would block"):
            lab.mark(stream, 0)
    assert lab.device.counts["would_block"] == 1
