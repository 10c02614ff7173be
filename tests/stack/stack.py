"""The demo beside a real Prometheus and a real Alertmanager, each on a free loopback port."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import yaml

from tests import tools
from tests.stack.ask import ask
from tests.stack.processes import Running, alertmanager, free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "alerts"
CLUSTER = "demo"
NODE = "demo-node"


class Stack:
    """Starts all three in `folder`; `values` go over those of the rules, `webhook` is told alerts.

    The demo is scraped once more for each of `also`, with these labels as its target's.
    `seconds` is the interval of scrapes and of rules, those with an interval of their own too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        values: Mapping[str, str],
        seconds: int = 1,
        webhook: str | None = None,
        also: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.demo_port = free_port()
        self.prometheus_port = free_port()
        self.alertmanager_port = free_port()
        self.control_port = 0
        self._folder = folder
        self._values = values
        self._seconds = seconds
        self._webhook = webhook
        self._labels = ({"cluster": CLUSTER, "node": NODE}, *also)
        self._children = ExitStack()
        self._running: dict[str, Running] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._children.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._children.close()

    def control(self, action: str) -> None:
        """Let something happen on the simulated node, such as ``lose-card?gpu=3``."""
        status, answer = ask(self.control_port, f"/{action}", parameters={})
        assert status == 200, answer

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The present result of an expression, as a vector; raises ValueError where it is wrong."""
        status, answer = ask(self.prometheus_port, "/api/v1/query", {"query": expression})
        if status != 200 or answer.get("warnings"):
            raise ValueError(f"{expression}: {answer}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def log(self, name: str) -> str:
        """What ``demo``, ``prometheus`` or ``alertmanager`` has said."""
        return (self._folder / f"{name}.log").read_text(encoding="utf-8")

    def end(self, name: str) -> None:
        """End one of them for good."""
        self._running[name].interrupt()

    def ended(self) -> list[str]:
        """The names of those that do not run any more."""
        return [name for name, child in self._running.items() if not child.alive]

    # ------------------------------------------------------------------ starting

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        listen = f"127.0.0.1:{self.demo_port}"
        demo = [sys.executable, "-m", "qgpu_exporter", "demo", "--web.listen-address", listen]
        self._run("demo", demo)
        self._run("alertmanager", self._alertmanager())
        self._run("prometheus", self._prometheus())
        self.control_port = int(wait_for(self._control_address))
        for port in (self.demo_port, self.prometheus_port, self.alertmanager_port):
            wait_for(lambda port=port: ask(port, "/-/ready")[0] == 200)  # type: ignore[misc] # a default binds the port, which mypy cannot infer

    def _run(self, name: str, command: list[str]) -> None:
        child = Running(command, self._folder / f"{name}.log")
        self._running[name] = self._children.enter_context(child)

    def _control_address(self) -> str | None:
        match = re.search(r"http://127\.0\.0\.1:(\d+)/lose-card", self.log("demo"))
        return match[1] if match else None

    def _alertmanager(self) -> list[str]:
        config = yaml.safe_load((ALERTS / "alertmanager.example.yml").read_text(encoding="utf-8"))
        hooks = [{"url": self._webhook, "send_resolved": True}] if self._webhook else []
        for receiver in config["receivers"]:
            receiver["webhook_configs"] = hooks
        for route in (config["route"], *config["route"]["routes"]):
            route |= {"group_wait": "1s", "group_interval": "1s"}
        path = self._folder / "alertmanager.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return [
            *alertmanager(str(tools.find("alertmanager"))),
            f"--config.file={path}",
            f"--storage.path={self._folder / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{self.alertmanager_port}",
            "--cluster.listen-address=",
        ]

    def _prometheus(self) -> list[str]:
        interval = f"{self._seconds}s"
        rules = self._folder / "rules"
        rules.mkdir(exist_ok=True)
        build = _build_module()
        for name, text in build.rule_files(build.load_values() | dict(self._values)).items():
            own = re.sub(r"(?m)^( +interval:) .*$", rf"\1 {interval}", text)
            # Of the rule that counts its samples, one a minute as it is delivered.
            own = own.replace(") * 60 / 100", f") * {self._seconds} / 100")
            (rules / name).write_text(own, encoding="utf-8")
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [f"{rules}/*.rules.yml"],
            "alerting": {
                "alertmanagers": [
                    {"static_configs": [{"targets": [f"127.0.0.1:{self.alertmanager_port}"]}]}
                ]
            },
            "scrape_configs": [
                {
                    "job_name": f"qgpu-exporter{number or ''}",
                    # The labels namespace, pod and container name the card's user.
                    "honor_labels": True,
                    "static_configs": [
                        {"targets": [f"127.0.0.1:{self.demo_port}"], "labels": dict(labels)}
                    ],
                }
                for number, labels in enumerate(self._labels)
            ],
        }
        path = self._folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return [
            str(tools.find("prometheus")),
            f"--config.file={path}",
            f"--storage.tsdb.path={self._folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{self.prometheus_port}",
        ]


def _build_module() -> Any:
    """alerts/build.py is a script of its own folder, no module of a package."""
    specification = importlib.util.spec_from_file_location("alerts_build", ALERTS / "build.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
