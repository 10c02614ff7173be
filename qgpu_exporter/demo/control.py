"""Lets people and tests make things happen on the simulated node, by POST requests on loopback."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from qgpu_exporter.demo.workloads import (
    GPU,
    QGPU_CARDS,
    WHOLE_CARDS,
    Work,
    Workload,
    device_pod,
    qgpu_pod,
)
from qgpu_exporter.demo.world import NoSuchPod, Refused, World
from qgpu_exporter.reader.simulated import card_uuid

_GIB = 1 << 30
_DEFAULT_NAMESPACE = "demo"

HELP = """\
POST /add-pod?pod=NAME&gpu=0&core=20&memory=8   a qGPU share (percent, GiB) of card 0 or 1
POST /add-pod?pod=NAME&gpu=5                    a whole card: 3, 5 or 6, where it is free
POST /finish-pod?pod=NAME                       its containers end by themselves
POST /delete-pod?pod=NAME&grace=1               (all three take &namespace=, else demo)
POST /lose-card?gpu=3                           the card falls off the bus
POST /hang-card?gpu=3&seconds=30                the card answers no call
POST /xid?gpu=1&xid=79                          the driver reports an error
POST /driver?reason=driver_not_loaded           no card answers
POST /recover                                   cards and driver are well again
POST /kubelet/stop | /kubelet/start | /kubelet/restart
POST /api/stop | /api/start
"""

Action = Callable[[web.Request], Awaitable[None]]


class Control:
    """The HTTP server of the actions; each answers when it is done.

    400 means a wrong parameter, 404 no such pod, 409 that it cannot be done now.
    """

    def __init__(self, world: World) -> None:
        self.url = ""
        self._world = world
        self._runner: web.AppRunner | None = None
        self._api_port = 0

    async def start(self, port: int = 0) -> None:
        """Listen on 127.0.0.1; port 0 is any free one."""
        application = web.Application()
        application.router.add_get("/", _tell)
        actions: dict[str, Action] = {
            "/add-pod": self._add_pod,
            "/finish-pod": self._finish_pod,
            "/delete-pod": self._delete_pod,
            "/lose-card": self._lose_card,
            "/hang-card": self._hang_card,
            "/xid": self._xid,
            "/driver": self._driver,
            "/recover": self._recover,
            "/kubelet/stop": self._stop_kubelet,
            "/kubelet/start": self._start_kubelet,
            "/kubelet/restart": self._restart_kubelet,
            "/api/stop": self._stop_api,
            "/api/start": self._start_api,
        }
        for path, action in actions.items():
            application.router.add_post(path, _handler(action))
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ------------------------------------------------------------------ pods

    async def _add_pod(self, request: web.Request) -> None:
        await self._world.create(_workload(request))

    async def _finish_pod(self, request: web.Request) -> None:
        self._world.finish(_key(request))

    async def _delete_pod(self, request: web.Request) -> None:
        await self._world.delete(_key(request), _number(request, "grace", 1.0))

    # ------------------------------------------------------------------ cards

    async def _lose_card(self, request: web.Request) -> None:
        self._world.cards.lose(_gpu(request))

    async def _hang_card(self, request: web.Request) -> None:
        self._world.cards.hang(_gpu(request), _number(request, "seconds", 30.0))

    async def _xid(self, request: web.Request) -> None:
        self._world.cards.xid(_gpu(request), int(_number(request, "xid")))

    async def _driver(self, request: web.Request) -> None:
        self._world.cards.fail_driver(request.query.get("reason", "unknown_error"))

    async def _recover(self, _: web.Request) -> None:
        self._world.cards.recover()

    # ------------------------------------------------------------------ servers

    async def _stop_kubelet(self, _: web.Request) -> None:
        await self._world.kubelet.stop()

    async def _start_kubelet(self, _: web.Request) -> None:
        await self._world.kubelet.restart()

    async def _restart_kubelet(self, _: web.Request) -> None:
        await self._world.kubelet.restart()

    async def _stop_api(self, _: web.Request) -> None:
        self._api_port = urlsplit(self._world.api.url).port or 0
        await self._world.api.stop()

    async def _start_api(self, _: web.Request) -> None:
        if not self._api_port:
            raise Refused("the API server runs")
        await self._world.api.start(self._api_port)
        self._api_port = 0


def _handler(action: Action) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            await action(request)
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        except NoSuchPod as error:
            return web.Response(status=404, text=f"{error}\n")
        except Refused as error:
            return web.Response(status=409, text=f"{error}\n")
        return web.Response(text="done\n")

    return handle


async def _tell(_: web.Request) -> web.Response:
    return web.Response(text=HELP)


def _number(request: web.Request, name: str, default: float = math.nan) -> float:
    """A parameter from 0 on; raises ValueError, also where one without default is missing."""
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}= is missing or no number from 0 on")
    return value


def _gpu(request: web.Request) -> int:
    return int(_number(request, "gpu"))


def _key(request: web.Request) -> str:
    namespace = request.query.get("namespace", _DEFAULT_NAMESPACE)
    return f"{namespace}/{request.query.get('pod', '')}"


def _workload(request: web.Request) -> Workload:
    """The pod that a request describes; raises ValueError."""
    query, gpu = request.query, _gpu(request)
    name, namespace = query.get("pod", ""), query.get("namespace", _DEFAULT_NAMESPACE)
    if not name:
        raise ValueError("pod= is missing")
    if gpu in WHOLE_CARDS:
        work = [Work(gpu, 20 * _GIB, 0.5)]
        return device_pod(namespace, name, GPU, [card_uuid(gpu)], work)
    if gpu not in QGPU_CARDS:
        raise ValueError(f"gpu= is one of {QGPU_CARDS} for a share, of {WHOLE_CARDS} for all of it")
    core, memory = int(_number(request, "core", 10.0)), int(_number(request, "memory", 4.0))
    work = [Work(gpu, memory * _GIB // 2, core / 200)]
    return qgpu_pod(namespace, name, [gpu], core=core, memory=memory, work=work)
