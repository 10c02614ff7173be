"""The table of XID classes: the package's own, and a user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu_exporter import xids

CLASSES = xids.load()


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (13, "restart_app"),
        (31, "restart_app"),
        (43, "ignore"),
        (45, "workflow_xid_45"),
        (48, "workflow_xid_48"),
        (54, "check_mechanicals"),
        (59, "unused"),
        (63, "ignore"),
        (64, "reset_gpu"),
        (74, "workflow_nvlink_err"),
        (79, "reboot"),
        (94, "restart_app_contained"),
        (95, "reset_gpu"),
        (119, "reset_gpu"),
        (142, "contact_support"),
        (149, "workflow_nvlink5_err"),
        (154, "xid_154"),
        (172, "unspecified"),
    ],
)
def test_class_of_a_code(code: int, name: str) -> None:
    assert CLASSES[code] == name


def test_each_code_of_the_catalogue_has_a_class() -> None:
    assert list(CLASSES) == list(range(1, 173))


def test_codes_that_alerts_name() -> None:
    reset = {46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158}
    links = {74, 144, 145, 146, 147, 148, 149, 150}
    assert xids.alerting(CLASSES) == reset | links | {48, 79, 94, 142}
    assert not xids.PAGE_CLASSES & xids.WARN_CLASSES
    assert set(CLASSES.values()) >= xids.PAGE_CLASSES | xids.WARN_CLASSES


def test_file_replaces_the_table(tmp_path: Path) -> None:
    path = tmp_path / "classes.yaml"
    path.write_text("reset_gpu: [94, 48]\nmine: []\n")
    assert xids.load(str(path)) == {48: "reset_gpu", 94: "reset_gpu"}
    assert xids.load("") == CLASSES


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "t:1: expected a mapping of classes to lists of XIDs"),
        ("- 79\n", "t:1: expected a mapping of classes to lists of XIDs"),
        ("reboot: 79\n", "t:1: reboot: expected a list of XIDs"),
        ("a: [1]\nReset GPU: [2]\n", "t:2: a class is a word in lower case, like reset_gpu"),
        ("a: [1]\n[2]: [2]\n", "t:2: a class is a word in lower case, like reset_gpu"),
        ("a:\n- 1\n- seventy\n", "t:3: a: an XID is a number from 1 to 65535"),
        ("a: [1, [2]]\n", "t:1: a: an XID is a number from 1 to 65535"),
        ("a: [0]\n", "t:1: a: an XID is a number from 1 to 65535"),
        ("a: [65536]\n", "t:1: a: an XID is a number from 1 to 65535"),
        ("a: [-1]\n", "t:1: a: an XID is a number from 1 to 65535"),
        ("a: [1]\n\nb: [2, 1]\n", "t:3: XID 1 has a class already: a"),
        ("a: [1]\na: [1]\n", "t:2: XID 1 has a class already: a"),
        ("a: [1\nb: [2]\n", "t:2: expected ',' or ']', but got ':'"),
        ("a: &x [1]\nb: *y\n", "t:2: found undefined alias 'y'"),
        ("a: [1]\n--- {b: [2]}\n", "t:2: but found another document"),
        ("a: \x00", "t: not YAML"),
        ("[" * 100_000, "t: not YAML"),
    ],
)
def test_wrong_table_is_named_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(xids.ClassesError) as caught:
        xids.parse(text, "t")
    assert str(caught.value) == complaint


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing, binary, huge = tmp_path / "none", tmp_path / "binary", tmp_path / "huge"
    binary.write_bytes(b"\xff\xfe")
    huge.write_bytes(b"#" * (xids.MAX_BYTES + 1))
    for path, complaint in (
        (missing, "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "not UTF-8"),
        (huge, "longer than 1048576 bytes"),
    ):
        with pytest.raises(xids.ClassesError) as caught:
            xids.load(str(path))
        assert str(caught.value) == f"{path}: {complaint}"
