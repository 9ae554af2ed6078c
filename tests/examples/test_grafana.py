"""The Grafana dashboard queries existing metrics, and shows all of them."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from graftlm.outputs import GatheredOutput
from graftlm.processes.messages import Load
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.step_metrics import StepMetrics
from graftlm.records import EngineStats, TierStats
from graftlm.server.metrics import ServerMetrics
from graftlm.types import Completion, FinishReason, Timings, Usage

EXAMPLE = Path(__file__).parents[2] / "examples" / "grafana"
DASHBOARD = json.loads((EXAMPLE / "graftlm.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = [variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def samples():
    """Name of each sample at /metrics -> its labels, including those that Prometheus adds."""
    replicas = ReplicaSet(["scheduler-0"], can_recover=False)
    stats = EngineStats(
        **dict.fromkeys(EngineStats.__dataclass_fields__, 1)
        | {"tiers": TierStats(1), "states": None, "drafts": {"suffix": (1, 1)}}
    )
    replicas.replicas[0].load = Load(process="scheduler-0", stats=stats, histograms=StepMetrics().snapshot())
    metrics = ServerMetrics()
    metrics.watch(replicas)
    completion = Completion(0, "", (1,), FinishReason.STOP)
    metrics.finished(GatheredOutput((completion,), Usage(1, 1, 0), Timings(0.1, 0.2, 0.3)), 1.0, "stop")
    families = list(text_string_to_metric_families(metrics.exposition("")[0].decode()))
    return {
        sample.name: set(sample.labels) | {"instance", "job"}
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def names(expression):
    return set(re.findall(r"\bgraftlm_\w+", expression))


@pytest.mark.parametrize(("title", "expression"), QUERIES, ids=[title for title, _ in QUERIES])
def test_a_query_names_existing_metrics_and_labels(title, expression, samples):
    assert names(expression)
    for name, matchers in re.findall(r"(graftlm_\w+)\{([^}]*)\}", expression):
        assert name in samples
        assert set(re.findall(r"(\w+)=~", matchers)) <= samples[name]
    for grouping in re.findall(r"by \(([^)]*)\)", expression):
        for name in names(expression):
            assert set(grouping.split(", ")) <= samples[name]
    assert names(expression) == {name for name, _ in re.findall(r"(graftlm_\w+)(\{)", expression)}


@pytest.mark.parametrize(
    "query", [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
)
def test_a_variable_is_read_from_an_existing_metric(query, samples):
    name, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()
    assert label in samples[name]


def test_every_metric_has_a_panel(samples):
    families = {re.sub("_(bucket|count|sum)$", "", name) for name in samples}
    shown = {re.sub("_bucket$", "", name) for _, expression in QUERIES for name in names(expression)}
    assert shown == families


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_uses_the_chosen_data_source_and_has_a_description(panel):
    assert panel["datasource"]["uid"] == "${datasource}"
    assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]


def test_no_panels_overlap():
    def cells(panel):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        across, down = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        return {(x, y) for x in across for y in down}

    for one, other in combinations(DASHBOARD["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_readmes_scrape_configuration_is_yaml_for_the_default_port():
    (text,) = re.findall(r"```yaml\n(.*?)```", (EXAMPLE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:30000"]}]
