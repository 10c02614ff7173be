"""What all dashboards share: variables, links, and panels that can tell absent from broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

NODE = 'cluster=~"$cluster",node=~"$node"'
CARD = f'{NODE},gpu=~"$gpu"'
POD = f'{CARD},namespace=~"$namespace",pod=~"$pod"'
BY_CARD = "by (cluster, node, gpu)"
BY_CONTAINER = "by (cluster, node, gpu, namespace, pod, container)"
NODE_LEGEND = "{{cluster}} {{node}}"
CARD_LEGEND = f"{NODE_LEGEND} GPU {{{{gpu}}}}"
LIMIT = "its own limit"
"""How a legend ends whose line is not a reading but the card's own limit of it."""

NOTHING = "Nothing scraped: no exporter of this selection answers"
UIDS = {
    "qgpu-fleet": "GPU fleet",
    "qgpu-node": "GPU node and card",
    "qgpu-workloads": "GPU workloads",
    "qgpu-shares": "GPU shares of one card",
    "qgpu-exporter": "GPU exporter health",
}
VARIABLES = {
    "cluster": "label_values(node_gpu_cards, cluster)",
    "node": 'label_values(node_gpu_cards{cluster=~"$cluster"}, node)',
    "gpu": f"label_values(node_gpu_info{{{NODE}}}, gpu)",
    "namespace": f"label_values(node_gpu_allocation_info{{{CARD}}}, namespace)",
    "pod": f'label_values(node_gpu_allocation_info{{{CARD},namespace=~"$namespace"}}, pod)',
}
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True)
class Query:
    """One expression of a panel; `refers` is its letter, which tables name their columns by."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Column:
    """How one column of a table looks: its name, its unit, and states that have a colour."""

    source: str
    name: str
    unit: str = ""
    states: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """From a value to the text and colour that are shown for it."""


def absent(metric: str, selector: str = CARD, by: str = "cluster, node, gpu") -> Query:
    """A series without values for each living card that does not offer a reading.

    It draws nothing and names the card in the legend, so that "not offered by this card" can be
    told from "nothing scraped", where the panel is empty and shows `NOTHING`.
    """
    return Query(
        f"(max {BY_CARD} (node_gpu_up{{{CARD}}}) == 1"
        f" unless on (cluster, node, gpu) max by ({by}) ({metric}{{{selector}}})) * NaN",
        f"{CARD_LEGEND}: not offered by this card",
    )


def card(metric: str, scale: str = "", more: str = "") -> str:
    """A card's reading, once a card whoever scraped it."""
    return f"max {BY_CARD} ({metric}{{{CARD}{more}}}){scale}"


def top(expression: str, *, number: int = 10, lowest: bool = False) -> str:
    """The series with the highest (or lowest) mean of the chosen time, the same at each moment.

    Keeps a graph readable where there are hundreds of nodes or pods; topk alone would choose anew
    at each moment and draw many more.
    """
    choice = "bottomk" if lowest else "topk"
    mean = f"avg_over_time(({expression})[$__range:$__interval] @ end())"
    return f"({expression}) and {choice}({number}, {mean})"


def link(uid: str, *, fields: str = "__field.labels", names: Sequence[str] = ()) -> str:
    """The address of another dashboard that keeps data source, time, and the named labels."""
    kept = "".join(f"&var-{name}=${{{fields}.{name}}}" for name in names)
    others = "".join(f"&${{{name}:queryparam}}" for name in VARIABLES if name not in names)
    return f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{kept}{others}"


def _data_link(uid: str, fields: str, names: Sequence[str]) -> dashboard.DashboardLink:
    title = f"{UIDS[uid]}: ${{{fields}.{names[-1]}}}"
    return dashboard.DashboardLink(title).url(link(uid, fields=fields, names=names))


def _target(number: int, query: Query, *, instant: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expression).ref_id(chr(ord("A") + number))
    target = target.datasource(_SOURCE)
    if instant and not query.legend:
        return target.instant().format(PromQueryFormat.TABLE)
    if instant:
        return target.instant().legend_format(query.legend)
    return target.range().legend_format(query.legend)


@dataclass
class Page:
    """One dashboard while it is built; panels get their numbers in the order of their making."""

    uid: str
    description: str
    hidden: frozenset[str] = frozenset()
    single: frozenset[str] = frozenset()
    """Variables of which exactly one value is chosen."""
    _number: int = 0
    builder: dashboard.Dashboard = field(init=False)

    def __post_init__(self) -> None:
        self.builder = (
            dashboard.Dashboard(UIDS[self.uid])
            .uid(self.uid)
            .description(self.description)
            .tags(["gpu", "qgpu-exporter"])
            .editable()
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .time("now-3h", "now")
            .timezone("browser")
            .refresh("1m")
        )
        self.builder.with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        for name, query in VARIABLES.items():
            self.builder.with_variable(self._variable(name, query))
        for uid, title in UIDS.items():
            if uid != self.uid:
                self.builder.link(
                    dashboard.DashboardLink(title)
                    .type(models.DashboardLinkType.LINK)
                    .url(f"/d/{uid}")
                    .include_vars(True)
                    .keep_time(True)
                )

    def _variable(self, name: str, query: str) -> dashboard.QueryVariable:
        variable = (
            dashboard.QueryVariable(name)
            .label(name.capitalize() if name != "gpu" else "GPU")
            .datasource(_SOURCE)
            .query(query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.NUMERICAL_ASC if name == "gpu" else _ALPHABETICAL)
        )
        if name in self.hidden:
            variable = variable.hide(models.VariableHide.HIDE_VARIABLE)
        if name in self.single:
            return variable
        # ".*" and not the list of values: a series without the label, of one cluster alone, counts.
        everything = models.VariableOption(selected=True, text="All", value="$__all")
        return variable.multi(True).include_all(True).all_value(".*").current(everything)

    def row(self, title: str) -> None:
        """Begin a row of panels."""
        self._number += 1
        self.builder.with_row(dashboard.Row(title).id(self._number))

    def graph(
        self,
        title: str,
        description: str,
        unit: str,
        *queries: Query,
        width: int = 12,
        height: int = 8,
        stacked: bool = False,
        largest: float | None = None,
        empty: str = NOTHING,
        goes_to: tuple[str, Sequence[str]] | None = ("qgpu-node", ("node", "gpu")),
    ) -> timeseries.Panel:
        """A panel over time; its lines lead to another dashboard."""
        panel = (
            timeseries.Panel()
            .unit(unit)
            .min(0)
            .fill_opacity(30 if stacked else 5)
            .line_width(1)
            .show_points(options.VisibilityMode.AUTO)
            .tooltip(
                common.VizTooltipOptions()
                .mode(options.TooltipDisplayMode.MULTI)
                .sort(options.SortOrder.DESCENDING)
            )
            .legend(
                common.VizLegendOptions()
                .display_mode(options.LegendDisplayMode.TABLE)
                .placement(options.LegendPlacement.BOTTOM)
                .show_legend(True)
                .calcs(["mean", "max", "lastNotNull"])
            )
        )
        if stacked:
            panel = panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
        if largest is not None:
            panel = panel.max(largest)
        if goes_to is not None:
            panel = panel.data_links([_data_link(goes_to[0], "__field.labels", goes_to[1])])
            for query in queries:
                # A sum has none of the labels that the link would keep.
                if "{{" not in query.legend:
                    panel = panel.override_by_name(
                        query.legend, [models.DynamicConfigValue("links", [])]
                    )
        for number, query in enumerate(queries):
            panel = panel.with_target(_target(number, query, instant=False))
        if any(query.legend.endswith(LIMIT) for query in queries):
            panel = panel.override_by_regexp(f"/{LIMIT}$/", _DASHED)
        self._add(panel, title, description, width, height, empty)
        return panel

    def line(self, panel: timeseries.Panel, name: str) -> None:
        """Show a series of a stacked graph as a dashed line of its own, for a limit."""
        panel.override_by_name(
            name, [models.DynamicConfigValue("custom.stacking", {"mode": "none"}), *_DASHED]
        )

    def number(
        self,
        title: str,
        description: str,
        unit: str,
        expression: str,
        *,
        width: int = 4,
        alarm: bool = False,
        empty: str = NOTHING,
    ) -> None:
        """The present value of an expression; with `alarm` it is green at zero and red above."""
        steps = [models.Threshold(None, "text")]
        if alarm:
            steps = [models.Threshold(None, "green"), models.Threshold(1, "red")]
        panel = (
            stat.Panel()
            .unit(unit)
            .thresholds(
                dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
            )
            .graph_mode(options.BigValueGraphMode.NONE)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            # Of now alone: over a time it would show the last value of an exporter that is gone.
            .with_target(_target(0, Query(expression, title), instant=True))
        )
        self._add(panel, title, description, width, 4, empty)

    def bars(
        self,
        title: str,
        description: str,
        unit: str,
        query: Query,
        *,
        width: int = 12,
        states: Sequence[tuple[float | None, str]] = ((None, "blue"),),
        goes_to: Sequence[str] = ("node", "gpu"),
        empty: str = NOTHING,
    ) -> None:
        """Bars of the present values; `states` are the colours, each from a value on."""
        steps = [models.Threshold(value, color) for value, color in states]
        panel = (
            bargauge.Panel()
            .unit(unit)
            .min(0)
            .thresholds(
                dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
            )
            .orientation(options.VizOrientation.HORIZONTAL)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .data_links([_data_link("qgpu-node", "__field.labels", goes_to)])
            .with_target(_target(0, query, instant=True))
        )
        self._add(panel, title, description, width, 8, empty)

    def states(
        self,
        title: str,
        description: str,
        query: Query,
        mappings: dict[str, tuple[str, str]],
        *,
        width: int = 24,
        empty: str = NOTHING,
    ) -> None:
        """States over time; `mappings` is from a value to its text and colour."""
        panel = (
            statetimeline.Panel()
            .unit("none")
            .mappings([_mapping(mappings)])
            .show_value(options.VisibilityMode.NEVER)
            .merge_values(True)
            .row_height(0.8)
            .legend(
                common.VizLegendOptions()
                .display_mode(options.LegendDisplayMode.LIST)
                .placement(options.LegendPlacement.BOTTOM)
                .show_legend(True)
            )
            .with_target(_target(0, query, instant=False))
        )
        self._add(panel, title, description, width, 8, empty)

    def table(
        self,
        title: str,
        description: str,
        columns: Sequence[Column],
        *expressions: str,
        width: int = 24,
        height: int = 8,
        empty: str = NOTHING,
        cell: str = "-",
        sort: Sequence[str] = (),
        goes_to: tuple[str, Sequence[str]] | None = ("qgpu-node", ("node", "gpu")),
    ) -> None:
        """The present rows of several expressions, joined by their labels.

        A table without rows shows `empty`, a cell without a value `cell`.  `sort` names columns as
        they are shown; one with a minus in front has its largest value first.
        """
        names = {column.source: column.name for column in columns}
        order = {column.source: index for index, column in enumerate(columns)}
        letters = [chr(ord("A") + number) for number in range(len(expressions))]
        # Grafana calls a value "Value" where only one of the expressions gives rows.
        values = {"Value", *(f"Value #{letter}" for letter in letters)}
        unwanted = {"Time", "__name__", "job", "instance", "uuid", *values} - names.keys()
        hidden = dict.fromkeys(sorted(unwanted), True)
        panel = (
            table.Panel()
            .unit("none")
            .show_header(True)
            .sort_by(
                [
                    common.TableSortByFieldState()
                    .display_name(name.removeprefix("-"))
                    .desc(name.startswith("-"))
                    for name in sort
                ]
            )
            .with_transformation(models.DataTransformerConfig("merge", options={}))
            .with_transformation(
                models.DataTransformerConfig(
                    "organize",
                    options={
                        "excludeByName": hidden,
                        "indexByName": order,
                        "renameByName": names,
                    },
                )
            )
        )
        for number, expression in enumerate(expressions):
            panel = panel.with_target(_target(number, Query(expression), instant=True))
        for column in columns:
            properties = [models.DynamicConfigValue("noValue", cell)]
            if column.states:
                properties += [
                    models.DynamicConfigValue("mappings", [_mapping(column.states)]),
                    models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
                ]
            if column.unit:
                properties.append(models.DynamicConfigValue("unit", column.unit))
            if goes_to is not None and column.source in goes_to[1]:
                target = {
                    "title": UIDS[goes_to[0]],
                    "url": link(goes_to[0], fields="__data.fields", names=goes_to[1]),
                }
                properties.append(models.DynamicConfigValue("links", [target]))
            panel = panel.override_by_name(column.name, properties)
        self._add(panel, title, description, width, height, empty)

    def _add(
        self, panel: object, title: str, description: str, width: int, height: int, empty: str
    ) -> None:
        self._number += 1
        built = panel.id(self._number).title(title).description(description)  # type: ignore[attr-defined] # all builders of panels have these, and no common type
        self.builder.with_panel(
            built.datasource(_SOURCE).span(width).height(height).no_value(empty)
        )


def _mapping(states: Mapping[str, tuple[str, str]]) -> models.ValueMap:
    return models.ValueMap(
        options={
            value: models.ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(states.items())
        }
    )


_ALPHABETICAL = models.VariableSort.ALPHABETICAL_ASC
_DASHED = [
    models.DynamicConfigValue("custom.fillOpacity", 0),
    models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
]
