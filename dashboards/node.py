"""A node and its cards: readings, throttling, errors, links and the map of MIG slices."""

from __future__ import annotations

from dashboards.panels import (
    BY_CARD,
    CARD,
    CARD_LEGEND,
    LIMIT,
    NODE,
    NOTHING,
    Column,
    Page,
    Query,
    absent,
    card,
)

_SHARES = ("qgpu-shares", ("node", "gpu"))


def _reading(page: Page, title: str, text: str, unit: str, metric: str, **more: object) -> None:
    """A graph of one reading, with its limit where the card gives one."""
    limit = more.get("limit")
    queries = [Query(card(metric), CARD_LEGEND)]
    if isinstance(limit, str):
        queries.append(Query(card(limit), f"{CARD_LEGEND}, {LIMIT}"))
    page.graph(title, text, unit, *queries, absent(metric), width=8, goes_to=_SHARES)


def build() -> Page:
    """The dashboard of a node, down to a single card."""
    page = Page(
        "qgpu-node",
        "The readings of a node's cards, and what is wrong with them.",
        single=frozenset({"node"}),
        hidden=frozenset({"namespace", "pod"}),
    )
    _cards(page)
    _readings(page)
    _throttling(page)
    _errors(page)
    _links(page)
    _mig(page)
    return page


def _cards(page: Page) -> None:
    page.row("Cards")
    page.table(
        "Cards",
        "One row a known card. `not offered`: the card gives no such reading, or does not answer.",
        [
            Column("cluster", "cluster"),
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("model", "model"),
            Column("uuid", "UUID"),
            Column("pci_bus_id", "PCI"),
            Column("Value #B", "answers", states={"1": ("yes", "green"), "0": ("no", "red")}),
            Column("Value #C", "containers"),
            Column("Value #D", "busy", "percentunit"),
            Column("Value #E", "memory used", "bytes"),
            Column("Value #F", "memory", "bytes"),
            Column("Value #G", "temperature", "celsius"),
            Column("Value #H", "power", "watt"),
        ],
        f"max by (cluster, node, gpu, model, uuid, pci_bus_id) (node_gpu_info{{{CARD}}})",
        card("node_gpu_up"),
        card("node_gpu_containers"),
        f"max {BY_CARD} (rate(node_gpu_busy_seconds_total{{{CARD}}}[5m]))",
        card("node_gpu_memory_used_bytes"),
        card("node_gpu_memory_capacity_bytes"),
        card("node_gpu_temperature_celsius"),
        card("node_gpu_power_watts"),
        height=9,
        cell="not offered",
        sort=("node", "gpu"),
        goes_to=_SHARES,
    )
    page.states(
        "Does it answer?",
        "Whether each card gave its readings.",
        Query(card("node_gpu_up"), CARD_LEGEND),
        {"0": ("does not answer", "red"), "1": ("answers", "green")},
        width=12,
    )
    page.table(
        "Recovery and reasons",
        "What the driver asks to be done about a card, and why a card does not answer.",
        [
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("action", "recovery action"),
            Column("reason", "does not answer"),
        ],
        f'max by (cluster, node, gpu, action) (node_gpu_recovery_action{{{CARD},action!="none"}})',
        f"max by (cluster, node, gpu, reason) (node_gpu_down_info{{{CARD}}})",
        width=12,
        empty="All known cards answer and need no recovery; or nothing scraped",
    )


def _readings(page: Page) -> None:
    page.row("Readings")
    page.graph(
        "Busy",
        "Mean part of the time in which a kernel ran, from the driver's samples without gaps; not "
        "offered in MIG mode.",
        "percentunit",
        Query(
            f"max {BY_CARD} (rate(node_gpu_busy_seconds_total{{{CARD}}}[$__rate_interval]))",
            CARD_LEGEND,
        ),
        absent("node_gpu_busy_seconds_total"),
        width=8,
        largest=1,
        goes_to=_SHARES,
    )
    _reading(
        page,
        "Memory used",
        "Without the driver's own reserve where that is known; the limit is the card's memory.",
        "bytes",
        "node_gpu_memory_used_bytes",
        limit="node_gpu_memory_capacity_bytes",
    )
    _reading(
        page,
        "Temperature",
        "With the temperature at which the card slows itself down.",
        "celsius",
        "node_gpu_temperature_celsius",
        limit="node_gpu_temperature_slowdown_limit_celsius",
    )
    _reading(
        page,
        "Power",
        "With the limit in force.",
        "watt",
        "node_gpu_power_watts",
        limit="node_gpu_power_limit_watts",
    )
    _reading(page, "SM clock", "Of the multiprocessors.", "hertz", "node_gpu_sm_clock_hertz")
    _reading(
        page,
        "Memory temperature",
        "Boards with HBM.",
        "celsius",
        "node_gpu_memory_temperature_celsius",
        limit="node_gpu_memory_temperature_limit_celsius",
    )
    _reading(
        page,
        "Tensor pipes",
        "Part of the time in which any tensor pipe was busy; since Hopper.",
        "percentunit",
        "node_gpu_tensor_active_ratio",
    )
    _reading(
        page,
        "Multiprocessors",
        "Part of the time in which a multiprocessor had work, averaged over all; since Hopper.",
        "percentunit",
        "node_gpu_sm_active_ratio",
    )
    _reading(
        page,
        "Fan",
        "Speed that the fan is set to, of its maximum; boards with a fan of their own.",
        "percentunit",
        "node_gpu_fan_speed_ratio",
    )


def _throttling(page: Page) -> None:
    page.row("Throttling")
    held = (
        f"node_gpu_clock_event_active{{{CARD},"
        'reason!~"gpu_idle|applications_clocks_setting|display_clock_setting"}'
    )
    page.states(
        "What holds the clocks down",
        "Reasons that a card gave at some moment of the chosen time, idling left out.",
        Query(
            f"max by (cluster, node, gpu, reason) ({held}) and on (cluster, node, gpu, reason)"
            f" max by (cluster, node, gpu, reason) (max_over_time({held}[$__range] @ end())) > 0",
            f"{CARD_LEGEND} {{{{reason}}}}",
        ),
        {"0": ("no", "transparent"), "1": ("yes", "orange")},
        width=12,
        empty="No clock was held down, or no card offers it; or nothing scraped",
    )
    page.graph(
        "Part of the time that clocks were held down",
        "By reason, from the driver's counters; not all drivers have them.",
        "percentunit",
        Query(
            "max by (cluster, node, gpu, reason)"
            f" (rate(node_gpu_clock_event_seconds_total{{{CARD}}}[$__rate_interval]))",
            f"{CARD_LEGEND} {{{{reason}}}}",
        ),
        absent("node_gpu_clock_event_seconds_total"),
        goes_to=_SHARES,
    )


def _errors(page: Page) -> None:
    page.row("Errors")
    actions = (
        "topk by (cluster, node, xid) (1, max by (cluster, node, xid, action)"
        f" (node_gpu_xid_info{{{NODE}}}))"
    )
    page.table(
        "XIDs",
        "Codes that the driver reported, with what they ask for and when the last one came.",
        [
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("xid", "XID"),
            Column("action", "asks for"),
            Column("Value #A", "last", "dateTimeFromNow"),
            Column("Value #B", "count"),
        ],
        f"max by (cluster, node, gpu, xid) (node_gpu_xid_last_timestamp_seconds{{{CARD}}}) * 1000"
        " * on (cluster, node, xid) group_left (action)"
        f" {actions}",
        "(max by (cluster, node, gpu, xid)"
        f" (node_gpu_xid_errors_total{{{CARD}}}) > 0)"
        " * on (cluster, node, xid) group_left (action)"
        f" {actions}",
        width=12,
        sort=("-last",),
        empty="No XID was reported since the exporter started; or nothing scraped",
    )
    ecc = "node_gpu_ecc_%s_volatile_errors_total"
    page.graph(
        "Memory errors",
        "That ECC could and could not correct, since the driver was loaded.",
        "none",
        Query(card(ecc % "corrected"), f"{CARD_LEGEND} corrected"),
        Query(card(ecc % "uncorrected"), f"{CARD_LEGEND} not corrected"),
        absent(ecc % "uncorrected"),
        goes_to=_SHARES,
    )
    page.graph(
        "Remapped rows and retired pages",
        "By cause; rows since Ampere, pages before.",
        "none",
        Query(
            f"max by (cluster, node, gpu, cause) (node_gpu_remapped_rows{{{CARD}}})",
            f"{CARD_LEGEND} rows, {{{{cause}}}}",
        ),
        Query(
            f"max by (cluster, node, gpu, cause) (node_gpu_retired_pages{{{CARD}}})",
            f"{CARD_LEGEND} pages, {{{{cause}}}}",
        ),
        goes_to=_SHARES,
        empty=f"{NOTHING}, or its cards have no such counts",
    )
    page.table(
        "Software of the node",
        "What the GPU software says of itself: driver, CDI specifications, validations.",
        [
            Column("node", "node"),
            Column("subject", "subject"),
            Column("value", "value"),
            Column("Value #B", "written", "dateTimeFromNow"),
        ],
        f"max by (cluster, node, subject, value) (node_gpu_stack_info{{{NODE}}})",
        f"max by (cluster, node, subject) (node_gpu_stack_timestamp_seconds{{{NODE}}}) * 1000",
        width=12,
        empty="The node's software says nothing, or is not asked; or nothing scraped",
    )


def _links(page: Page) -> None:
    page.row("Links")
    pcie = "node_gpu_pcie_%s_bytes_total"
    page.graph(
        "PCIe traffic",
        "Sent and received by the card.",
        "Bps",
        *(
            Query(
                f"max {BY_CARD} (rate({pcie % way}{{{CARD}}}[$__rate_interval]))",
                f"{CARD_LEGEND} {way}",
            )
            for way in ("transmitted", "received")
        ),
        absent(pcie % "transmitted"),
        width=8,
        goes_to=_SHARES,
    )
    page.graph(
        "PCIe link, of its maximum",
        "Lanes and generation; the generation falls while the card is idle.",
        "percentunit",
        Query(
            f"{card('node_gpu_pcie_width')} / {card('node_gpu_pcie_max_width')}",
            f"{CARD_LEGEND} lanes",
        ),
        Query(
            f"{card('node_gpu_pcie_generation')} / {card('node_gpu_pcie_max_generation')}",
            f"{CARD_LEGEND} generation",
        ),
        absent("node_gpu_pcie_width"),
        width=8,
        largest=1,
        goes_to=_SHARES,
    )
    page.graph(
        "PCIe packets sent again",
        "A few are usual; a rising number is a bad contact.",
        "none",
        Query(f"max {BY_CARD} (increase(node_gpu_pcie_replays_total{{{CARD}}}[1h]))", CARD_LEGEND),
        absent("node_gpu_pcie_replays_total"),
        width=8,
        goes_to=_SHARES,
    )
    nvlink = "node_gpu_nvlink_%s_bytes_total"
    page.graph(
        "NVLink traffic",
        "Over all ports of the card.",
        "Bps",
        *(
            Query(
                f"sum {BY_CARD} (max by (cluster, node, gpu, link)"
                f" (rate({nvlink % way}{{{CARD}}}[$__rate_interval])))",
                f"{CARD_LEGEND} {way}",
            )
            for way in ("transmitted", "received")
        ),
        absent(nvlink % "transmitted"),
        width=8,
        goes_to=_SHARES,
    )
    page.graph(
        "Active NVLink ports",
        "Of each card.",
        "none",
        Query(
            f"sum {BY_CARD} (max by (cluster, node, gpu, link) (node_gpu_nvlink_active{{{CARD}}}))",
            CARD_LEGEND,
        ),
        absent("node_gpu_nvlink_active"),
        width=8,
        goes_to=_SHARES,
    )
    page.graph(
        "NVLink errors in an hour",
        "By kind, over all ports of the card.",
        "none",
        Query(
            "sum by (cluster, node, gpu, kind)"
            f" (increase(node_gpu_nvlink_errors_total{{{CARD}}}[1h]))",
            f"{CARD_LEGEND} {{{{kind}}}}",
        ),
        absent("node_gpu_nvlink_errors_total"),
        width=8,
        goes_to=_SHARES,
    )


def _mig(page: Page) -> None:
    page.row("MIG")
    mig = "cluster, node, gpu, mig"
    page.table(
        "Map of the slices",
        "Each slice with its place on the card, and who holds it.",
        [
            Column("node", "node"),
            Column("gpu", "gpu"),
            Column("mig", "slice"),
            Column("profile", "profile"),
            Column("placement_start", "from"),
            Column("Value #B", "core", "percent"),
            Column("Value #C", "memory", "bytes"),
            Column("Value #D", "memory used", "bytes"),
            Column("namespace", "namespace"),
            Column("pod", "pod"),
            Column("container", "container"),
        ],
        f"max by ({mig}, profile, placement_start, uuid) (node_gpu_mig_info{{{CARD}}})",
        f"max by ({mig}) (node_gpu_mig_core_capacity{{{CARD}}})",
        f"max by ({mig}) (node_gpu_mig_memory_capacity_bytes{{{CARD}}})",
        f"max by ({mig}) (node_gpu_mig_memory_used_bytes{{{CARD}}})",
        f"max by ({mig}, uuid) (node_gpu_mig_info{{{CARD}}})"
        " * on (cluster, node, gpu, uuid) group_right (mig)"
        " max by (cluster, node, gpu, uuid, namespace, pod, container)"
        f" (node_gpu_allocation_info{{{CARD}}})",
        sort=("gpu", "from"),
        empty="No card of the selection has slices; or nothing scraped",
        goes_to=_SHARES,
    )
    page.graph(
        "Work of the slices",
        "Part of the time in which the slice's engine was busy; since Hopper.",
        "percentunit",
        Query(
            f"max by ({mig}) (node_gpu_mig_graphics_engine_active_ratio{{{CARD}}})",
            f"{CARD_LEGEND} slice {{{{mig}}}}",
        ),
        empty=f"{NOTHING}, or no card is in MIG mode, or it is older than Hopper",
        largest=1,
        goes_to=_SHARES,
    )
    page.graph(
        "Memory of the slices",
        "In use; compute instances of one GPU instance share it.",
        "bytes",
        Query(
            f"max by ({mig}) (node_gpu_mig_memory_used_bytes{{{CARD}}})",
            f"{CARD_LEGEND} slice {{{{mig}}}}",
        ),
        empty=f"{NOTHING}, or no card is in MIG mode",
        goes_to=_SHARES,
    )
