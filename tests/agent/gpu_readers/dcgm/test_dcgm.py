"""A dcgm-exporter as a source: its page is read, integrated, and merged into the figures that NVML does not report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.__main__ import main
from agent.core.readings import DeviceCondition, DeviceReading, InstanceReading, Unavailable, XidCount
from agent.core.settings import SettingsError
from agent.gpu_readers import dcgm
from agent.gpu_readers.chosen import ChosenReader, GpuReaders
from agent.gpu_readers.dcgm import (
    FAILURES_BEFORE_PAUSE,
    MAX_AGE_MS,
    PAUSE_MS,
    PERIOD_MS,
    DcgmReader,
    Exporter,
    fetch_from,
)
from agent.metering.gpu_errors import ECC, GpuErrorLog
from agent.simulation.simulated_node import A100, make_gpu
from agent.wire import Health
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.testing.http_server import Handler, listening
from tests.agent.readers import Read
from tests.agent.sample_values import T0

GPU = make_gpu("GPU-a", 0, A100)
MIG = make_gpu("GPU-m", 1, A100, ["3g.40gb", "1g.10gb"])
UNREAD = Unavailable("MIG: no utilisation")

OLD_PAGE = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",device="nvidia0",modelName="A100",Hostname="n",pod="x"} 30
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",device="nvidia0",modelName="A100",Hostname="n"} 80
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-a",pod="x",exported_pod="y"} 0.25
DCGM_FI_PROF_SM_ACTIVE{gpu="1",UUID="GPU-m",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1"} 1.3
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="1",UUID="GPU-m",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1"} 0.333
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="1",UUID="GPU-m",GPU_I_PROFILE="1g.10gb",GPU_I_ID="2"} 0.5
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="1",UUID="GPU-m",GPU_I_PROFILE="1g.10gb",GPU_I_ID="2"} 0.1
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",UUID="GPU-a"} 9223372036854775794
"""
NEW_PAGE = """\
DCGM_FI_DEV_GPU_UTIL_RATIO{gpu="0",uuid="GPU-a"} 0.8
DCGM_FI_PROF_SM_UTIL_RATIO{gpu="0",uuid="GPU-a"} 0.25
DCGM_FI_PROF_SM_UTIL_RATIO{gpu="1",uuid="GPU-m",GPU_I_ID="1"} 1
DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO{gpu="1",uuid="GPU-m",GPU_I_ID="1"} 0.333
DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO{gpu="1",uuid="GPU-m",GPU_I_ID="2"} 0.5
DCGM_FI_PROF_TENSOR_UTIL_RATIO{gpu="1",uuid="GPU-m",GPU_I_ID="2"} 0.1
"""


def a100s(at_ms: int) -> tuple[DeviceReading, ...]:
    """A node with a plain A100 that NVML reads and one in MIG mode that it does not read."""
    whole = DeviceReading(GPU, busy_us=(at_ms - T0) * 500)
    instances = tuple(InstanceReading(m.uuid, UNREAD) for m in MIG.mig)
    return whole, DeviceReading(MIG, busy_us=UNREAD, instances=instances, method="allocation")


def with_exporter(exporter: Exporter, read: Callable[[int], DeviceReading] | None = None) -> GpuReaders:
    nvml = Read(a100s if read is None else lambda at_ms: (read(at_ms),))
    return GpuReaders((ChosenReader("nvml", nvml), ChosenReader("dcgm", DcgmReader(exporter), fills=True)))


def exported(read: Callable[[int], DeviceReading] | None = None) -> GpuReaders:
    """The node with the figures of an exporter that serves one page."""
    exporter = Exporter(lambda: OLD_PAGE, VirtualClock(T0))
    assert exporter.refresh() == PERIOD_MS
    return with_exporter(exporter, read)


@pytest.mark.parametrize("page", [OLD_PAGE, NEW_PAGE])
def test_old_and_new_names_say_the_same(page: str) -> None:
    seen = dcgm.read(page)
    assert seen.ratios == {
        ("GPU-a", None): {"busy": 0.8, "sm_active": 0.25},
        ("GPU-m", 1): {"busy": 0.333, "sm_active": 1.0},
        ("GPU-m", 2): {"busy": 0.5, "tensor_active": 0.1},
    }


def test_what_nvml_does_not_show_is_filled_and_what_it_shows_stays() -> None:
    source = exported()
    source.read(T0)
    whole, cut = source.read(T0 + 10_000).devices
    assert (whole.busy_us, whole.sm_active_us, whole.method) == (5_000_000, 2_500_000, "device")
    assert isinstance(whole.tensor_active_us, Unavailable)
    large, small = cut.instances
    assert (large.busy_us, large.sm_active_us, large.method) == (10_000_000 * 3 // 7, 10_000_000 * 3 // 7, "dcgm")
    assert (small.busy_us, small.tensor_active_us, small.method) == (5_000_000 // 7, 1_000_000 // 7, "dcgm")
    assert cut.busy_us == UNREAD


FIELDS = pytest.mark.parametrize("field", ["busy_us", "sm_active_us"])


@FIELDS
def test_two_counters_are_never_mixed(field: str) -> None:
    """NVML stops answering for a GPU that hangs, while the exporter continues for a while with counters of a different
    origin."""

    def hanging(at_ms: int) -> DeviceReading:
        known = {"busy_us": at_ms - T0, "sm_active_us": at_ms - T0, field: UNREAD if at_ms > T0 + 20_000 else 7}
        return DeviceReading(GPU, **known)  # type: ignore[arg-type]

    source = exported(hanging)
    seen = [source.read(T0 + second * 10_000).devices[0] for second in range(4)]
    assert [getattr(device, field) for device in seen] == [7, 7, 7, UNREAD]
    assert {device.method for device in seen} == {"device"}


def test_a_value_that_the_driver_gave_before_the_exporter_answered_is_not_mixed_with_its_own() -> None:
    exporter = Exporter(lambda: OLD_PAGE, VirtualClock(T0))
    source = with_exporter(exporter, lambda at_ms: DeviceReading(GPU, busy_us=7 if at_ms == T0 else UNREAD))
    assert source.read(T0).devices[0].busy_us == 7
    exporter.refresh()
    seen = [source.read(T0 + second * 10_000).devices[0] for second in (1, 2)]
    assert [device.busy_us for device in seen] == [UNREAD, UNREAD]
    assert seen[1].sm_active_us == 5_000_000


@FIELDS
def test_what_the_driver_refuses_is_not_filled(field: str) -> None:
    refused = Unavailable("timeout (nvmlDeviceGetSamples, 10)", refused=True)
    unread = DeviceReading(GPU, **{"busy_us": UNREAD, "sm_active_us": UNREAD, field: refused})
    source = exported(lambda at_ms: unread)
    source.read(T0)
    (device,) = source.read(T0 + 10_000).devices
    filled = {"busy_us": 8_000_000, "sm_active_us": 2_500_000, field: refused}
    assert (device.busy_us, device.sm_active_us) == (filled["busy_us"], filled["sm_active_us"])


def test_figures_that_are_too_old_are_unknown_and_counters_go_on_after() -> None:
    clock = VirtualClock(T0)
    pages = iter([OLD_PAGE, "", OLD_PAGE])
    exporter = Exporter(lambda: next(pages), clock)
    source = with_exporter(exporter)
    exporter.refresh()
    source.read(T0)
    clock.advance(MAX_AGE_MS + 1)
    assert source.read(T0 + 10_000).devices[1].instances[1].busy_us == UNREAD
    exporter.refresh()
    exporter.refresh()
    assert source.read(T0 + 20_000).devices[1].instances[1].busy_us == 5_000_000 // 7


class Pages:
    """An exporter of GPU-a whose page changes, beside an owner of the device that reads no errors."""

    def __init__(self, owned: Callable[[int], DeviceReading] | None = None) -> None:
        self.clock = VirtualClock(T0)
        self.page = ""
        self.exporter = Exporter(lambda: self.page, self.clock)
        self.source = with_exporter(self.exporter, owned or (lambda at_ms: DeviceReading(GPU, busy_us=at_ms)))
        self.at_ms = T0

    def condition(self, *lines: str) -> DeviceCondition:
        """The condition ten seconds later, with a page of these lines."""
        self.page = "".join(line.replace("{", '{UUID="GPU-a",', 1) + "\n" for line in lines)
        self.exporter.refresh()
        return self.again()

    def again(self) -> DeviceCondition:
        self.at_ms += 10_000
        self.clock.advance(10_000)
        return self.source.read(self.at_ms).devices[0].condition


def test_the_rises_of_the_window_of_xid_errors_are_counted() -> None:
    pages = Pages()
    at_first = pages.condition('DCGM_EXP_XID_ERRORS_COUNT{xid="13"} 4')
    assert (at_first.xids, at_first.xids_unread) == ((), ""), "when those happened is unknown"
    pages.condition('DCGM_EXP_XID_ERRORS_COUNT{xid="13"} 5', 'DCGM_EXP_XID_ERRORS_COUNT{xid="79"} 2')
    assert pages.again().xids == (XidCount(13, 1, T0 + 20_000), XidCount(79, 2, T0 + 20_000))
    assert len(pages.condition("DCGM_EXP_XID_ERRORS_COUNT{} 0").xids) == 2, "the window went on"
    assert pages.condition('DCGM_EXP_XID_ERRORS_COUNT{xid="79"} 1').xids[1] == XidCount(79, 3, T0 + 50_000)


@pytest.mark.parametrize("name", ["DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR"])
def test_another_last_xid_error_is_one_error_and_repeats_are_said_to_be_unknown(name: str) -> None:
    pages = Pages()
    assert pages.condition(f"{name}{{}} 0").xids_unread == ""
    seen = [pages.condition(f'{name}{{err_code="{xid}"}} {xid}') for xid in (79, 79, 31)]
    assert [one.xids for one in seen] == [
        (XidCount(79, 1, T0 + 20_000),),
        (XidCount(79, 1, T0 + 20_000),),
        (XidCount(31, 1, T0 + 40_000), XidCount(79, 1, T0 + 20_000)),
    ]
    assert all(one.xids_unread for one in seen)


def test_memory_errors_and_slowdowns_are_the_drivers_and_codes_for_no_value_are_unknown() -> None:
    pages = Pages()
    told = pages.condition(
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{} 2", "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{} 9223372036854775794",
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{} 64", "DCGM_FI_DEV_XID_ERRORS{} 0",
    )  # fmt: skip
    assert (told.ecc_uncorrected, told.throttle_reasons) == (2, 64)
    assert isinstance(told.ecc_corrected, Unavailable)
    errors = GpuErrorLog()
    errors.observe(T0, pages.source.read(pages.at_ms + 10_000).devices)
    (gpu,) = errors.gpus
    assert {(one.kind, one.count) for one in gpu.errors} == {(ECC, 2), ("hardware thermal slowdown", 1)}
    assert gpu.unread == {}


def test_errors_are_unknown_while_the_exporter_does_not_answer_and_counts_stay() -> None:
    pages = Pages()
    pages.condition("DCGM_FI_DEV_XID_ERRORS{} 0", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{} 0")
    pages.condition("DCGM_FI_DEV_XID_ERRORS{} 48", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{} 1")
    pages.clock.advance(MAX_AGE_MS)
    silent = pages.again()
    assert silent.xids == (XidCount(48, 1, T0 + 20_000),)
    assert silent.xids_unread
    assert isinstance(silent.ecc_uncorrected, Unavailable)
    assert pages.condition("DCGM_FI_DEV_GPU_UTIL{} 3").xids_unread, "a page without errors tells none"


@pytest.mark.parametrize("health", ["ok", "lost"])
def test_errors_that_the_driver_reads_stay_and_a_lost_gpu_keeps_those_of_the_exporter(health: Health) -> None:
    read = DeviceCondition(xids=(XidCount(13, 7, T0),), xids_unread="", ecc_uncorrected=0)
    pages = Pages(lambda _: DeviceReading(GPU, health, condition=read))
    pages.condition("DCGM_FI_DEV_XID_ERRORS{} 0")
    assert pages.condition("DCGM_FI_DEV_XID_ERRORS{} 79", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{} 5") == read
    unread = Pages(lambda _: DeviceReading(GPU, health))
    unread.condition("DCGM_FI_DEV_XID_ERRORS{} 0")
    assert unread.condition("DCGM_FI_DEV_XID_ERRORS{} 79").xids == (XidCount(79, 1, T0 + 20_000),)


def test_an_exporter_that_fails_is_named_and_left_alone_for_a_while() -> None:
    def fail() -> str:
        raise ConnectionRefusedError("refused")

    exporter = Exporter(fail, VirtualClock(T0))
    pauses = [exporter.refresh() for _ in range(FAILURES_BEFORE_PAUSE)]
    assert pauses == [PERIOD_MS] * (FAILURES_BEFORE_PAUSE - 1) + [PAUSE_MS]
    snapshot = with_exporter(exporter).read(T0)
    assert snapshot.sources == (("nvml", ""), ("dcgm", "ConnectionRefusedError: refused"))
    assert isinstance(snapshot.devices[0].sm_active_us, Unavailable)


def test_an_instance_cut_into_compute_instances_is_not_guessed_at() -> None:
    one, other = MIG.mig
    double = replace(MIG, mig=(one, replace(other, uuid="MIG-x", gi=one.gi, ci=1)))
    instances = tuple(InstanceReading(m.uuid, UNREAD) for m in double.mig)
    source = exported(lambda at_ms: DeviceReading(double, busy_us=UNREAD, instances=instances))
    (device,) = source.read(T0).devices
    assert [i.busy_us for i in device.instances] == [UNREAD, UNREAD]


def test_over_http() -> None:
    answers = [(200, OLD_PAGE.encode())]

    class Page(Handler):
        def do_GET(self) -> None:
            self.say(*answers[-1])

    with listening(Page) as url:
        fetch = fetch_from(f"{url}/metrics")
        assert fetch() == OLD_PAGE
        answers.append((503, b"starting"))
        with pytest.raises(ValueError, match="HTTP 503"):
            fetch()
        exporter = Exporter(fetch, VirtualClock(T0))
        exporter.start(BackgroundTasks(VirtualClock(T0)))
        exporter.close()


@pytest.mark.parametrize("url", ["https://x/metrics", "localhost:9400", "http:///x", "http://x/?collect=1"])
def test_an_address_that_cannot_be_scraped_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="gpu_readers: dcgm"):
        fetch_from(url)


def test_the_refusal_of_an_address_hides_its_password() -> None:
    with pytest.raises(SettingsError, match=r"got 'http://user:\*\*\*@x/metrics'"):
        fetch_from("http://user:word@x/metrics")


@given(st.one_of(st.text(max_size=200), st.text(alphabet='DCGM_FI_PROF_SM_ACTIVE{}="U,ID 0.1e9\n#', max_size=200)))
def test_no_page_is_too_strange(text: str) -> None:
    try:
        seen = dcgm.read(text)
    except ValueError:
        return
    assert all(0 <= ratio <= 1 for values in seen.ratios.values() for ratio in values.values())


values = st.one_of(st.floats(), st.sampled_from([9.2e18, 2147483632.0, -1.0, 100.0, 1.3]))


@given(st.lists(st.tuples(st.sampled_from(sorted(dcgm._FIELDS)), st.text(max_size=6), values), max_size=8))
def test_any_number_is_a_ratio_or_left_out(lines: list[tuple[str, str, float]]) -> None:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    page = "".join(f'{name}{{UUID="GPU-a",GPU_I_ID="{quoted(gi)}"}} {value!r}\n' for name, gi, value in lines)
    try:
        seen = dcgm.read(page)
    except ValueError:
        return
    assert all(0 <= ratio <= 1 for found in seen.ratios.values() for ratio in found.values())


@pytest.mark.parametrize(
    "url", ["node:9400", "http://node:port/metrics", "http://node:99999/metrics", "http://[::1/metrics"]
)
def test_an_address_that_cannot_be_scraped_is_refused_at_the_start(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--once", "--holders=processes", "--gpu-readers", f"dcgm={url}"]) == 2
    expected = f"gputally agent: gpu_readers: dcgm: expected http://HOST:PORT/metrics, got {url!r}\n"
    assert capsys.readouterr().err == expected
