"""Wiring: what is set reaches the part that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu_exporter import app, config


def settings(**given: str) -> config.Settings:
    """Settings of flags whose names have `__` for a dot and `_` for a dash."""
    flags = {name.replace("__", ".").replace("_", "-"): [text] for name, text in given.items()}
    return config.load(flags, {})


def test_the_reader_is_told_what_concerns_it() -> None:
    command = app.reader_command(settings())
    assert command[3:7] == ["--backend", "nvml", "--timeout", "3.0"]
    assert not {"--persistence-mode", "--no-gpm", "--simulation"} & set(command)
    command = app.reader_command(
        settings(
            devices__backend="simulated",
            devices__timeout="500ms",
            devices__persistence_mode="true",
            devices__gpm="false",
            devices__simulation="/scenario.json",
        )
    )
    assert command[3:7] == ["--backend", "simulated", "--timeout", "0.5"]
    assert command[9:] == ["--persistence-mode", "--no-gpm", "--simulation", "/scenario.json"]


def test_the_poller_is_told_what_concerns_it(tmp_path: Path) -> None:
    classes = tmp_path / "classes.yaml"
    classes.write_text("reboot: [5]\nignore: [6]\n")
    made = app.poller_settings(
        settings(
            interval="1m",
            devices__timeout="2s",
            devices__exit_after="10m",
            devices__xid_classes=str(classes),
            kubelet__max_age="90s",
            kubernetes__release_labels="example.com/driver",
            kubernetes__pod_labels="team",
            allocation__gpushare_memory_unit="MiB",
            allocation__volcano_memory_factor="10",
        ),
        "node-1",
    )
    assert made.node == "node-1"
    assert (made.interval_seconds, made.timeout_seconds) == (60.0, 2.0)
    assert (made.exit_after_seconds, made.kubelet_max_age_seconds) == (600.0, 90.0)
    assert (dict(made.xid_classes), made.xid_codes) == (
        {5: "reboot", 6: "ignore"},
        frozenset({5}),
    )
    assert made.release_labels == ("example.com/driver",)
    assert made.pod_labels_exported
    assert (made.gpushare_memory_unit, made.volcano_memory_factor) == ("MiB", 10)


def test_a_bad_table_of_xid_classes_is_a_wrong_setting(tmp_path: Path) -> None:
    classes = tmp_path / "classes.yaml"
    classes.write_text("reboot: [5]\nignore: [5]\n")
    with pytest.raises(config.ConfigError) as raised:
        app.poller_settings(settings(devices__xid_classes=str(classes)), "node-1")
    assert str(raised.value) == (
        f"--devices.xid-classes: {classes}:2: XID 5 has a class already: reboot"
    )


@pytest.mark.parametrize(
    ("dialects", "present", "absent"),
    [
        ("native", {"node_gpu_up"}, {"DCGM_FI_DEV_GPU_TEMP"}),
        ("dcgm", {"DCGM_FI_DEV_GPU_TEMP"}, {"node_gpu_up"}),
        ("native,dcgm,tke", {"node_gpu_up", "DCGM_FI_DEV_GPU_TEMP"}, set()),
    ],
)
def test_only_the_chosen_dialects_are_served(
    dialects: str, present: set[str], absent: set[str]
) -> None:
    names = {family.name for family in app.families(settings(metrics__dialects=dialects))}
    assert present <= names
    assert not absent & names


def test_the_host_label_of_the_dcgm_dialect() -> None:
    for name in ("Hostname", "hostname"):
        chosen = app.families(settings(metrics__dialects="dcgm", dcgm__hostname_label=name))
        assert all(name in family.scope.labels for family in chosen)


def test_sources_that_are_off_are_not_there(tmp_path: Path) -> None:
    off = {"kubelet__socket": "", "kubernetes__pods": "off", "path__validations": ""}
    made = app.App(settings(node_name="a", path__cdi=str(tmp_path / "none"), **off), {})
    assert [health.source for health in made.poller.sources.health()] == ["nvml", "processes"]
    on = app.App(settings(node_name="a", devices__kmsg="true", **off), {})
    assert "kmsg" in [health.source for health in on.poller.sources.health()]
