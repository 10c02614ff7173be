"""The chart's renderings: golden output, API schemas, and what holds for each of them."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import kubernetes_validate
import pytest

from qgpu_exporter import __version__
from tests.chart import charts
from tests.chart.charts import CASES, GOLDEN, Tool, exporter, objects, only, settings, template

KUBERNETES = ("1.25", "1.29", "1.33", "1.37")
OPERATOR_KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "SecurityContextConstraints")
"""Kinds that are no part of Kubernetes, so that it has no schema for them."""


@pytest.mark.parametrize("case", CASES)
def test_golden_output(tool: Tool, update_golden: bool, case: str) -> None:
    text = template(tool, case)
    path = GOLDEN / f"{case}.yaml"
    if update_golden:
        path.write_text(text)
    assert text == path.read_text()


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_it(tool: Tool, case: str, version: str) -> None:
    found = objects(template(tool, case, ["dashboards.enabled=true"]))
    assert len(found) > 3
    for one in found:
        if one["kind"] not in OPERATOR_KINDS:
            validate(one, version)


def validate(one: dict[str, Any], version: str) -> None:
    """Raises where that version's API has another shape, or does not know a field."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_refuse_what_is_wrong(tool: Tool) -> None:
    daemonset = only(objects(template(tool)), "DaemonSet")
    daemonset["spec"]["template"]["spec"]["hostPidd"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(daemonset, "1.33")


def test_helm_lint(tool: Tool) -> None:
    for case in CASES.values():
        said = charts.helm(tool, "lint", "--strict", "-f", str(case), str(charts.CHART))
        assert "0 chart(s) failed" in said


# --------------------------------------------------------------------------- privileges


@pytest.mark.parametrize("case", CASES)
def test_least_privilege(tool: Tool, case: str) -> None:
    values_privileged = "privileged: true" in CASES[case].read_text()
    for spec in charts.pod_specs(objects(template(tool, case))):
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"] + spec.get("initContainers", []):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert context["capabilities"].get("add", []) == (
                ["SYSLOG"] if case == "everything" and container["name"] == "exporter" else []
            )
            if values_privileged and container["name"] == "exporter":
                assert context["privileged"] is True
            else:
                assert "privileged" not in context
                assert context["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("case", CASES)
def test_no_card_is_taken_and_every_container_is_guaranteed(tool: Tool, case: str) -> None:
    for spec in charts.pod_specs(objects(template(tool, case))):
        for container in spec["containers"] + spec.get("initContainers", []):
            resources = container["resources"]
            assert resources["requests"] == resources["limits"]
            assert {"cpu", "memory"} <= resources["limits"].keys()
            assert not any(name.startswith("nvidia.com/") for name in resources["limits"])


@pytest.mark.parametrize("case", CASES)
def test_what_is_mounted_is_read_only_and_there(tool: Tool, case: str) -> None:
    for spec in charts.pod_specs(objects(template(tool, case))):
        volumes = {one["name"]: one for one in spec.get("volumes", [])}
        containers = spec["containers"] + spec.get("initContainers", [])
        mounts = [one for container in containers for one in container.get("volumeMounts", [])]
        assert {one["name"] for one in mounts} == set(volumes)
        for mount in mounts:
            assert mount["readOnly"] is True
            assert "subPath" not in mount  # an edited object would never arrive
        for container in containers:
            paths = [one["mountPath"] for one in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)


def test_host_paths_by_default(tool: Tool) -> None:
    (spec, *_) = charts.pod_specs(objects(template(tool)))
    assert [one["hostPath"]["path"] for one in spec["volumes"]] == [
        "/var/lib/kubelet/pod-resources",
        "/proc",
        "/run/nvidia/validations",
        "/var/run/cdi",
        "/etc/cdi",
    ]


# --------------------------------------------------------------------------- access to the driver


def test_driver_by_the_runtime(tool: Tool) -> None:
    found = objects(template(tool))
    assert only(found, "DaemonSet")["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
    environment = {one["name"]: one.get("value") for one in exporter(found)["env"]}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert "LD_LIBRARY_PATH" not in environment


def test_driver_of_a_default_runtime(tool: Tool) -> None:
    for case in ("tke", "eks"):
        found = objects(template(tool, case))
        assert "runtimeClassName" not in only(found, "DaemonSet")["spec"]["template"]["spec"]
        environment = {one["name"]: one.get("value") for one in exporter(found)["env"]}
        assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"


@pytest.mark.parametrize(
    ("case", "host", "mounted", "libraries"),
    [
        (
            "driver-root",
            "/run/nvidia/driver",
            "/run/nvidia/driver",
            (
                "/run/nvidia/driver/usr/lib/x86_64-linux-gnu:"
                "/run/nvidia/driver/usr/lib/aarch64-linux-gnu:/run/nvidia/driver/usr/lib64"
            ),
        ),
        (
            "host-driver",
            "/usr/lib/x86_64-linux-gnu/nvidia/current",
            "/host/driver",
            "/host/driver",
        ),
        ("gke", "/home/kubernetes/bin/nvidia", "/usr/local/nvidia", "/usr/local/nvidia/lib64"),
    ],
)
def test_driver_by_a_directory_of_the_host(
    tool: Tool, case: str, host: str, mounted: str, libraries: str
) -> None:
    found = objects(template(tool, case))
    spec = only(found, "DaemonSet")["spec"]["template"]["spec"]
    volumes = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"]}
    mounts = {one["name"]: one["mountPath"] for one in exporter(found)["volumeMounts"]}
    environment = {one["name"]: one.get("value") for one in exporter(found)["env"]}
    assert (volumes["driver"], mounts["driver"]) == (host, mounted)
    assert environment["LD_LIBRARY_PATH"] == libraries
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "runtimeClassName" not in spec


# --------------------------------------------------------------------------- settings


@pytest.mark.parametrize("case", CASES)
def test_the_exporter_takes_its_settings(tool: Tool, case: str) -> None:
    made = settings(exporter(objects(template(tool, case))))
    assert made.devices_exit_after == 600.0
    assert made.devices_backend == "nvml"


def test_settings_by_default(tool: Tool) -> None:
    made = settings(exporter(objects(template(tool))))
    assert made.metrics_dialects == ("native",)
    assert made.kubernetes_dra == "off"
    assert made.kubernetes_pods == "apiserver"
    assert made.kubelet_socket == "/var/lib/kubelet/pod-resources/kubelet.sock"
    assert made.path_procfs == "/host/proc"
    assert made.path_validations == "/run/nvidia/validations"
    assert made.path_cdi == ("/var/run/cdi", "/etc/cdi")
    assert made.web_listen_address == ((None, 5678),)


def test_settings_with_everything(tool: Tool) -> None:
    made = settings(exporter(objects(template(tool, "everything"))))
    assert made.metrics_dialects == ("native", "dcgm", "tke")
    assert made.kubernetes_release_labels == ("nvidia.com/gpu.deploy.client", "example.com/pause")
    assert made.kubernetes_gpu_objects is True
    assert made.devices_gpm is False
    assert made.devices_kmsg is True
    assert made.web_probe_address == ((None, 9401),)
    assert made.web_config_file == "/etc/qgpu-exporter/web/web-config.yml"
    assert made.dcgm_collectors == "/etc/qgpu-exporter/files/collectors.csv"
    assert made.tke_request_unit == "cards"


def test_settings_alone(tool: Tool) -> None:
    made = settings(exporter(objects(template(tool, "alone"))))
    assert made.kubelet_socket == ""
    assert made.kubernetes_pods == "off"
    assert made.path_validations == ""
    assert made.path_cdi == ("",)


def test_probes_follow_the_listener(tool: Tool) -> None:
    plain = exporter(objects(template(tool)))["livenessProbe"]["httpGet"]
    assert plain == {"path": "/-/healthy", "port": "metrics", "scheme": "HTTP"}
    tls = exporter(objects(template(tool, sets=["web.scheme=https", "web.configSecret=s"])))
    assert tls["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    mutual = exporter(objects(template(tool, "everything")))["livenessProbe"]["httpGet"]
    assert mutual == {"path": "/-/healthy", "port": "probe", "scheme": "HTTP"}


# --------------------------------------------------------------------------- rights


def test_rights_by_default(tool: Tool) -> None:
    assert charts.rules(objects(template(tool))) == set(
        itertools.product([""], ["pods", "nodes"], ["get", "list", "watch"])
    )


@pytest.mark.parametrize(
    ("sets", "added"),
    [
        (["settings.kubernetes.dra=auto"], ("resource.k8s.io", "resourceslices")),
        (["settings.kubernetes.gpu-objects=true"], ("elasticgpu.io", "gpus")),
    ],
)
def test_rights_of_a_feature(tool: Tool, sets: list[str], added: tuple[str, str]) -> None:
    more = charts.rules(objects(template(tool, sets=sets))) - charts.rules(objects(template(tool)))
    assert more == {(*added, verb) for verb in ("get", "list", "watch")}


@pytest.mark.parametrize("case", ["alone", "node-kubeconfig"])
def test_without_the_api_server_there_is_neither_token_nor_role(tool: Tool, case: str) -> None:
    found = objects(template(tool, case))
    assert charts.rules(found) == set()
    spec = only(found, "DaemonSet")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize("case", CASES)
def test_nothing_may_be_written(tool: Tool, case: str) -> None:
    verbs = {verb for _, _, verb in charts.rules(objects(template(tool, case)))}
    assert verbs <= {"get", "list", "watch"}


# --------------------------------------------------------------------------- the DaemonSet


def test_a_tenth_of_the_nodes_is_updated_at_a_time(tool: Tool) -> None:
    spec = only(objects(template(tool)), "DaemonSet")["spec"]
    assert spec["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": "10%"},
    }
    assert spec["template"]["spec"]["priorityClassName"] == "system-node-critical"


def test_nodes_by_labels_and_without(tool: Tool) -> None:
    spec = only(objects(template(tool)), "DaemonSet")["spec"]["template"]["spec"]
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [term["matchExpressions"][0]["key"] for term in required["nodeSelectorTerms"]]
    assert {"qgpu-device-enable", "nvidia.com/gpu.present"} <= set(keys)
    assert all(len(term["matchExpressions"]) == 1 for term in required["nodeSelectorTerms"])
    everywhere = only(objects(template(tool, "k3s")), "DaemonSet")["spec"]["template"]["spec"]
    assert "affinity" not in everywhere
    paused = only(objects(template(tool, "everything")), "DaemonSet")["spec"]["template"]["spec"]
    assert paused["nodeSelector"]["nvidia.com/gpu.deploy.client"] == "true"


def test_files_that_change_make_new_pods(tool: Tool) -> None:
    def checksum(text: str) -> str:
        found = objects(template(tool, sets=[f"dcgmCollectors={text}"]))
        annotations = only(found, "DaemonSet")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/files"])

    assert checksum("a") != checksum("b")


def test_versions_are_the_package_s(tool: Tool) -> None:
    chart = charts.objects((charts.CHART / "Chart.yaml").read_text())[0]
    assert chart["version"] == chart["appVersion"] == __version__
    assert exporter(objects(template(tool)))["image"] == f"qgpu-exporter:{__version__}"
