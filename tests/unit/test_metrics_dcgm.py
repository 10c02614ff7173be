"""The dcgm dialect: labels, holders, MIG rows, units, and counters files as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qgpu_exporter.exposition import TEXT, render
from qgpu_exporter.metrics.dcgm import DCGM, ChosenField, dcgm_families
from qgpu_exporter.metrics.dcgm_collectors import BadRow, Collectors, parse_collectors
from qgpu_exporter.metrics.dcgm_fields import FIELDS
from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CardTotals,
    Power,
    Snapshot,
    Utilization,
)
from tests.worlds import NODE, NOW, card_uuid, identity, mig_reading, mig_uuid, reading

BASE = (
    'DCGM_FI_DRIVER_VERSION="550.1",Hostname="node-1",'
    'UUID="GPU-5ee0d1a0-0000-4000-8000-000000000000"'
)
REST = 'device="nvidia0",gpu="0",modelName="NVIDIA H100 80GB HBM3"'


def snapshot(card: Card, *held: Allocation, complete: bool = True) -> Snapshot:
    result = AllocationResult(held, complete=complete)
    return Snapshot(NODE, NOW, "550.1", cards=(card,), devices_up=True, allocation=result)


def lines(of: Snapshot, name: str) -> list[str]:
    page = render(DCGM, of).decode().splitlines()
    return [line.removeprefix(name) for line in page if line.startswith(f"{name}{{")]


def hold(
    pod: str, mig: str | None = None, container: str = "main", *, exclusive: bool = False
) -> Allocation:
    uuid = card_uuid(0) if mig is None else mig_uuid(int(mig[0]))
    return Allocation(
        "team", pod, container, 0, uuid, "any", "nvidia.com/any", uuid, mig=mig, exclusive=exclusive
    )


CARD = Card(identity(0), reading(0))
PLAIN = f'{{{BASE},{REST},pci_bus_id="00000000:10:00.0"}} 312.5'
LABELLED = (
    f'{{{BASE},container="main",{REST},namespace="team",'
    'pci_bus_id="00000000:10:00.0",pod="one"} 312.5'
)


def test_a_card_without_a_holder_has_no_pod() -> None:
    assert lines(snapshot(CARD), "DCGM_FI_DEV_POWER_USAGE") == [PLAIN]
    off = replace(snapshot(CARD), allocation=None)
    assert lines(off, "DCGM_FI_DEV_POWER_USAGE") == [PLAIN]


def test_the_only_holder_is_on_the_card() -> None:
    assert lines(snapshot(CARD, hold("one")), "DCGM_FI_DEV_POWER_USAGE") == [LABELLED]


def test_two_rows_of_one_container_are_one_holder() -> None:
    twice = snapshot(CARD, hold("one"), hold("one"))
    assert lines(twice, "DCGM_FI_DEV_POWER_USAGE") == [LABELLED]


@pytest.mark.parametrize(
    "other", [hold("two"), hold("one", container="side")], ids=["pods", "containers"]
)
def test_a_shared_card_keeps_one_series_without_a_pod(other: Allocation) -> None:
    assert lines(snapshot(CARD, hold("one"), other), "DCGM_FI_DEV_POWER_USAGE") == [PLAIN]


def test_while_pods_are_unknown_only_a_sole_owner_counts() -> None:
    shared = snapshot(CARD, hold("one"), complete=False)
    assert lines(shared, "DCGM_FI_DEV_POWER_USAGE") == [PLAIN]
    owned = snapshot(CARD, hold("one", exclusive=True), complete=False)
    assert lines(owned, "DCGM_FI_DEV_POWER_USAGE") == [LABELLED]


def test_a_card_in_mig_mode_gives_its_own_readings_once_and_no_pod() -> None:
    card = Card(identity(0), mig_reading(0))
    of = snapshot(card, hold("one", "1"))
    assert lines(of, "DCGM_FI_DEV_POWER_USAGE") == [PLAIN]
    assert lines(of, "DCGM_FI_DEV_GPU_UTIL") == []


def test_slices_are_named_by_their_gpu_instance() -> None:
    card = Card(identity(0), mig_reading(0))
    of = snapshot(card, hold("one", "1"), hold("two", "2/0"), hold("three", "2/1"))
    driver, rest = BASE.split(",", 1)
    first, second = lines(of, "DCGM_FI_DEV_FB_USED")
    assert first == (
        f'{{{driver},GPU_I_ID="1",GPU_I_PROFILE="3g.40gb",{rest},container="main",{REST},'
        'namespace="team",pci_bus_id="00000000:10:00.0",pod="one"} 5120.0'
    )
    assert second == (
        f'{{{driver},GPU_I_ID="2",GPU_I_PROFILE="2g.20gb",{rest},{REST},'
        'pci_bus_id="00000000:10:00.0"} 3072.0'
    )
    assert [line.rpartition(" ")[2] for line in lines(of, "DCGM_FI_PROF_SM_ACTIVE")] == [
        "0.36",
        "0.18",
    ]


def test_a_card_in_mig_mode_without_slices_gives_its_memory() -> None:
    card = Card(identity(0), replace(mig_reading(0), mig_slices=()))
    assert [line.rpartition(" ")[2] for line in lines(snapshot(card), "DCGM_FI_DEV_FB_USED")] == [
        "30720.0"
    ]


def test_units_are_those_of_dcgm() -> None:
    card = Card(
        identity(0),
        replace(
            CARD.reading or reading(0),
            power=Power(energy_joules=55_491_669.881),
            utilization=Utilization(gpu_ratio=0.29, memory_ratio=0.07),
        ),
        totals=CardTotals(last_xid=94),
    )
    values = {
        name: lines(snapshot(card), f"DCGM_FI_DEV_{name}")[0].rpartition(" ")[2]
        for name in (
            "TOTAL_ENERGY_CONSUMPTION",
            "GPU_UTIL",
            "MEM_COPY_UTIL",
            "SM_CLOCK",
            "FB_TOTAL",
            "FB_RESERVED",
            "FB_USED_PERCENT",
            "POWER_VIOLATION",
            "XID_ERRORS",
            "CLOCKS_EVENT_REASONS",
            "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
            "FAN_SPEED",
        )
    }
    assert values == {
        "TOTAL_ENERGY_CONSUMPTION": "5.5491669881e+10",
        "GPU_UTIL": "29.0",
        "MEM_COPY_UTIL": "7.0",
        "SM_CLOCK": "1980.0",
        "FB_TOTAL": "81920.0",
        "FB_RESERVED": "1024.0",
        "FB_USED_PERCENT": "0.379746835443038",
        "POWER_VIOLATION": "3.5e+09",
        "XID_ERRORS": "94.0",
        "CLOCKS_EVENT_REASONS": "4.0",
        "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "4.0",
        "FAN_SPEED": "30.0",
    }


def test_before_any_xid_the_last_one_is_0() -> None:
    assert lines(snapshot(CARD), "DCGM_FI_DEV_XID_ERRORS")[0].endswith(" 0.0")


def test_a_counter_is_typed_under_its_own_name() -> None:
    page = render(DCGM, snapshot(CARD), TEXT).decode()
    assert "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter\n" in page
    assert "_total" not in page


def test_the_host_label_and_other_labels_are_chosen() -> None:
    chosen = dcgm_families(
        [ChosenField("DCGM_FI_DEV_GPU_TEMP", "gauge", "Mine.")],
        ("DCGM_FI_DEV_SERIAL", "DCGM_FI_NVML_VERSION"),
        "hostname",
    )
    assert render(chosen, snapshot(CARD)).decode() == (
        "# HELP DCGM_FI_DEV_GPU_TEMP Mine.\n# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n"
        'DCGM_FI_DEV_GPU_TEMP{DCGM_FI_DEV_SERIAL="1650023000",'
        'UUID="GPU-5ee0d1a0-0000-4000-8000-000000000000",device="nvidia0",gpu="0",'
        'hostname="node-1",modelName="NVIDIA H100 80GB HBM3",pci_bus_id="00000000:10:00.0"} 45.0\n'
    )


def test_the_older_name_of_clock_events_is_served_on_request_only() -> None:
    name = "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"
    assert name not in {family.name for family in DCGM}
    assert set(FIELDS) - {family.name for family in DCGM} == {name}
    (family,) = dcgm_families([ChosenField(name, "gauge", "Help")])
    assert render([family], snapshot(CARD)).decode().rpartition(" ")[2] == "4.0\n"


# --------------------------------------------------------------------------- counters files


def test_a_counters_file_as_it_is_in_the_wild() -> None:
    text = (
        "\ufeff# Format,,\r\n"
        "# FIELD, type, help\r\n"
        "\r\n"
        "    DCGM_FI_DEV_SM_CLOCK,  gauge, SM clock.\r\n"
        "DCGM_FI_DEV_DEC_UTIL ,     gauge, Decoder.\r\n"
        "# DCGM_FI_DEV_POWER_VIOLATION,  counter, Throttling.\r\n"
        ",,\r\n"
        'DCGM_FI_DEV_PCIE_REPLAY_COUNTER, Counter, "Retries, all of them."\r\n'
        "DCGM_FI_DRIVER_VERSION, label, Driver\r\n"
        "DCGM_FI_DEV_OEM_INFOROM_VER, label, Inforom\r\n"
        "DCGM_FI_DEV_ODD, gauge, Odd\r\n"
        "DCGM_FI_DEV_ODD, gauge, Odd again\r\n"
        "DCGM_FI_DEV_GPU_TEMP,    gauge, Temperature"
    )
    assert parse_collectors(text) == Collectors(
        (
            ChosenField("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock."),
            ChosenField("DCGM_FI_DEV_DEC_UTIL", "gauge", "Decoder."),
            ChosenField("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "Retries, all of them."),
            ChosenField("DCGM_FI_DEV_GPU_TEMP", "gauge", "Temperature"),
        ),
        ("DCGM_FI_DRIVER_VERSION",),
        (),
        ("DCGM_FI_DEV_OEM_INFOROM_VER", "DCGM_FI_DEV_ODD"),
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("DCGM_FI_DEV_GPU_TEMP, gauge", "2 columns instead of 3 (a comma in the help needs quotes"),
        ("DCGM_FI_DEV_GPU_TEMP, gauge, a, b", "4 columns instead of 3"),
        ("DCGM_FI_DEV_GPU_TEMP, gauge,", "an empty column"),
        (", gauge, Help", "an empty column"),
        ("DCGM_FI_DEV_GPU_TEMP, histogram, Help", "type 'histogram' is none of gauge, counter"),
        ('DCGM_FI_DEV_GPU_TEMP, gauge, "Help', "unexpected end of data"),
        ("DCGM_FI_DEV_SM_CLOCK, gauge, Help", "DCGM_FI_DEV_SM_CLOCK is there twice"),
    ],
)
def test_a_bad_row_costs_itself_and_is_named_by_its_line(row: str, reason: str) -> None:
    text = f"DCGM_FI_DEV_SM_CLOCK, gauge, Clock\n\n{row}\nDCGM_FI_DEV_DEC_UTIL, gauge, Decoder\n"
    found = parse_collectors(text)
    assert [field.name for field in found.fields] == [
        "DCGM_FI_DEV_SM_CLOCK",
        "DCGM_FI_DEV_DEC_UTIL",
    ]
    (bad,) = found.bad_rows
    assert isinstance(bad, BadRow)
    assert bad.line == 3
    assert bad.reason.startswith(reason)
