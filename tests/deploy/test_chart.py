"""The chart renders, fits Kubernetes' schemas, is restricted, and refuses contradictions."""

from __future__ import annotations

import copy
import json
import tomllib
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from kvladder.cli.dashboards import RULES as RULES_FILE
from kvladder.cli.dashboards import dashboards
from kvladder.config.stack import load_config
from kvladder.export.sealed import server_layout
from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    ROOT,
    containers,
    of_kind,
    pods,
    render,
    stacks,
    values_of,
)
from tests.deploy.commands import require_command, require_vllm

NAMES = ["", *(path.stem for path in EXAMPLES)]
OF_OPERATOR = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, without a schema among Kubernetes' own."""
VERSIONS = ["1.30.0", kubernetes_validate.latest_version()]
ENVIRONMENT = {"KVLADDER_REDIS_URL": "redis://redis:6379", "POD_IP": "10.0.0.9"}
ENCRYPTED = {"name": "aes-gcm", "key_file": "/run/secrets/encryption/KVLADDER_KEY"}
RULES = "groups: [{name: kvladder, rules: [{alert: Down, expr: 'up == 0'}]}]"


@pytest.fixture(params=NAMES, ids=lambda name: name or "defaults")
def manifests(request):
    return render(values_of(request.param))


@pytest.mark.parametrize("name", NAMES)
def test_helm_finds_nothing_but_the_missing_icon(name):
    found = helm_python.lint(CHART, values_of(name), strict=True)
    assert not found["errors"]
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_schemas_of_kubernetes(manifests, version):
    ours = [one for one in manifests if one["kind"] not in OF_OPERATOR]
    assert len(ours) >= 5
    for one in ours:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_manifest_with_an_unknown_field_is_found():
    (one,) = of_kind(render({}), "StatefulSet")
    one["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        kubernetes_validate.validate(one, VERSIONS[0], strict=True)


def test_each_stack_is_accepted(manifests, tmp_path):
    assert stacks(manifests)
    for name, text in stacks(manifests).items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(text)
        found = load_config(file, env=ENVIRONMENT)
        if found.block.size_bytes is not None:
            found.check(server_layout(found.block.size_bytes))
        assert found.control.path == "/run/kvladder/kv.sock"


def test_pods_are_restricted(manifests):
    """Each rule of Kubernetes' level "restricted" that a chart can break."""
    assert pods(manifests)
    for pod in pods(manifests).values():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["fsGroupChangePolicy"] == "OnRootMismatch"
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "emptyDir", "secret", "ephemeral", "persistentVolumeClaim"}
        for one in containers(pod):
            own = one["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "procMount", "runAsUser"} & set(own)
            assert not [port for port in one.get("ports", ()) if "hostPort" in port]
            assert "memory" in one["resources"]["limits"]


def test_every_mount_has_a_volume_and_every_volume_a_mount(manifests):
    for workload in of_kind(manifests, "StatefulSet", "DaemonSet"):
        pod = workload["spec"]["template"]["spec"]
        claims = workload["spec"].get("volumeClaimTemplates", ())
        volumes = [one["name"] for one in pod["volumes"]]
        volumes += [one["metadata"]["name"] for one in claims]
        mounted = {mount["name"] for one in containers(pod) for mount in one["volumeMounts"]}
        assert sorted(volumes) == sorted(mounted)


def test_what_a_pod_runs_exists(manifests):
    for name, pod in pods(manifests).items():
        (one,) = pod["containers"]
        if name == "kv-engine":
            assert one["command"] == ["vllm", "serve"]
            given = require_vllm(one["args"])
            assert int(given["--port"]) == one["ports"][0]["containerPort"]
        else:
            require_command(one["command"] + one["args"])
            probes = one["readinessProbe"], one["livenessProbe"]
            if "httpGet" in probes[0]:
                assert [probe["httpGet"]["path"] for probe in probes] == ["/readyz", "/livez"]
            else:
                require_command(probes[1]["exec"]["command"])
        mounts = {mount["mountPath"] for mount in one["volumeMounts"]}
        assert {"/etc/kvladder", "/run/kvladder", "/cache", "/tmp"} <= mounts


def test_ports_agree(manifests):
    found = {name: yaml.safe_load(text) for name, text in stacks(manifests).items()}
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests, "Service")}
    assert set(services) == set(pods(manifests))
    for name, pod in pods(manifests).items():
        (one,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in one["ports"]}
        for service in services[name]["ports"]:
            assert service["port"] == ports[service["targetPort"]]
        assert {service["name"] for service in services[name]["ports"]} == {*ports}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = one[probe].get("httpGet") or one[probe].get("tcpSocket")
            assert asked is None or asked["port"] in ports
        if name == "kv-server":
            assert found[name]["export"]["listen"] == f"0.0.0.0:{ports['nixl']}"
            http = found[name].get("http", {}).get("listen")
            assert http == (f"0.0.0.0:{ports['http']}" if "http" in ports else None)
    for policy in of_kind(manifests, "NetworkPolicy"):
        (one,) = pods(manifests)[policy["metadata"]["name"]]["containers"]
        env = {entry["name"]: entry.get("value") for entry in one["env"]}
        names = {port["name"] for port in one["ports"]}
        rules = [port for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        assert {port["port"] for port in rules if "endPort" not in port} == names
        ranges = {f"{port['port']}-{port['endPort']}" for port in rules if "endPort" in port}
        assert ranges == ({env["UCX_TCP_PORT_RANGE"]} if "UCX_TCP_PORT_RANGE" in env else set())


@pytest.mark.parametrize(("kind", "replicas"), [("StatefulSet", 3), ("DaemonSet", 1)])
def test_engines_know_the_servers(kind, replicas):
    server = {"enabled": True, "kind": kind, "replicas": replicas, "port": 7999}
    manifests = render({"server": server, "keys": {"secret": "pair"}})
    (level,) = [one for one in tiers(manifests) if one["type"] == "nixl"]
    names = (
        [f"kv-server-{i}.kv-server" for i in range(3)] if kind == "StatefulSet" else ["kv-server"]
    )
    assert level["servers"] == [f"{name}.llm.svc:7999" for name in names]
    (service,) = [
        one["spec"]
        for one in of_kind(manifests, "Service")
        if one["metadata"]["name"] == "kv-server"
    ]
    local = {"internalTrafficPolicy": "Local"} if kind == "DaemonSet" else {"clusterIP": "None"}
    assert local.items() <= service.items()


def tiers(manifests) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(stacks(manifests)["kv-engine"])["tiers"]
    return found


def test_secrets_are_references_alone():
    manifests = render(values_of("shared"))
    pod = pods(manifests)["kv-engine"]
    env = {one["name"]: one for one in pod["containers"][0]["env"]}
    url = env["KVLADDER_REDIS_URL"]
    assert set(url) == {"name", "valueFrom"}
    assert url["valueFrom"]["secretKeyRef"]["name"] == "kvladder-redis"
    assert not of_kind(manifests, "Secret")
    assert "redis://" not in json.dumps(manifests)
    added = [one for one in tiers(manifests) if one["type"] in {"nixl", "redis"}]
    assert [one["codecs"] for one in added] == [[ENCRYPTED], [ENCRYPTED]]


def mounted(pod: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the Secret whose files a pod's container has in a folder."""
    (one,) = pod["containers"]
    (mount,) = [mount for mount in one["volumeMounts"] if mount["mountPath"] == folder]
    assert mount["readOnly"]
    assert "subPath" not in mount, "such a file does not change while the pod runs"
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    found: dict[str, Any] = volume["secret"]
    assert found["defaultMode"] == 0o440, "kvladder reports a file that every user may read"
    return found


def test_keys_and_tokens_are_files_that_change_while_pods_run():
    values = values_of("shared")
    values["engine"]["secretFiles"] = values["server"]["secretFiles"] = "kvladder-more"
    own = {"name": "aes-gcm", "key_file": "/run/secrets/files/own"}
    level = {"type": "files", "path": "/cache/kv", "capacity": "10 GiB"}
    values["engine"]["stack"] = {
        "arena": {"size": "8 GiB"},
        "forget": {"path": "/cache/forget", "key_file": "/run/secrets/files/receipt"},
        "tiers": [
            {"name": "host", "type": "host"},
            {"name": "nvme", "codecs": ["zstd", "aes-gcm"], **level},
            {"name": "other", "codecs": [own], **level},
        ],
    }
    manifests = render(values)
    found = {one["name"]: one.get("codecs") for one in tiers(manifests)}
    assert found["nvme"] == ["zstd", ENCRYPTED]
    assert found["other"] == [own]
    assert found["host"] is None
    engine, server = (pods(manifests)[f"kv-{part}"] for part in ("engine", "server"))
    secret = mounted(engine, "/run/secrets/encryption")
    assert secret["secretName"] == "kvladder-encryption"
    assert secret["items"] == [{"key": "KVLADDER_KEY", "path": "KVLADDER_KEY"}]
    assert mounted(server, "/run/secrets/http")["secretName"] == "kvladder-http"
    http = yaml.safe_load(stacks(manifests)["kv-server"])["http"]
    assert http["token_file"] == "/run/secrets/http/token"
    for pod in (engine, server):
        assert mounted(pod, "/run/secrets/files")["secretName"] == "kvladder-more"
    assert "secrets/files" not in json.dumps(pods(render(values_of("shared"))))


def test_keys_are_copied_for_their_user_alone():
    """A Secret's files are open to fsGroup, and kvladder refuses keys that others may read."""
    for name, pod in pods(render(values_of("shared"))).items():
        file = "client.keys" if name == "kv-engine" else "server.keys"
        (init,) = pod["initContainers"]
        assert init["command"] == ["install", "-m", "0600", f"/secret/{file}", f"/run/keys/{file}"]
        (volume,) = [one for one in pod["volumes"] if one["name"] == "keys"]
        assert volume["emptyDir"]["medium"] == "Memory"


def test_there_is_time_to_write_before_the_kill(manifests):
    for pod in pods(manifests).values():
        (one,) = pod["containers"]
        sleep = one.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        flags = dict(arg.split("=", 1) for arg in one["args"] if arg.startswith("--"))
        writes = float(flags.get("--shutdown-timeout") or flags["--flush"])
        assert pod["terminationGracePeriodSeconds"] >= sleep + writes + 10


def test_the_operators_kinds_watch_the_engines():
    found = render({"monitoring": {"serviceMonitor": True, "rules": RULES}})
    (monitor,) = of_kind(found, "ServiceMonitor")
    (service,) = of_kind(found, "Service")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"] == [{"port": "http", "path": "/metrics"}]
    assert service["spec"]["ports"][0]["name"] == "http"
    (rule,) = of_kind(found, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES)


def test_the_rules_of_the_command_arrive_unchanged(tmp_path):
    """Their templates for alerts are text to Helm."""
    dashboards(out=tmp_path)
    text = (tmp_path / RULES_FILE).read_text()
    assert "{{" in text
    (rule,) = of_kind(render({"monitoring": {"rules": text}}), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(text)


def test_servers_with_a_port_are_watched():
    manifests = render(values_of("shared"))
    services = {one["metadata"]["name"]: one for one in of_kind(manifests, "Service")}
    monitors = of_kind(manifests, "ServiceMonitor")
    assert [one["metadata"]["name"] for one in monitors] == ["kv-engine", "kv-server"]
    for one in monitors:
        service = services[one["metadata"]["name"]]
        wanted = one["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= service["metadata"]["labels"].items()
        assert "http" in [port["name"] for port in service["spec"]["ports"]]


def test_drains_take_one_pod_at_a_time():
    found = of_kind(render(values_of("shared")), "PodDisruptionBudget")
    assert [one["spec"]["maxUnavailable"] for one in found] == [1, 1]
    assert not of_kind(render({"podDisruptionBudget": False}), "PodDisruptionBudget")


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == project["version"]


def test_every_value_is_described():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def undescribed(node, given, path):
        for name, one in node["properties"].items():
            if "description" not in one:
                yield f"{path}{name}"
            if one.get("additionalProperties") is False:
                yield from undescribed(one, given[name], f"{path}{name}.")
            elif path + name != "global" and name not in given:
                yield f"{path}{name}: no default"

    assert not list(undescribed(schema, values, ""))


FILES = {"type": "files", "path": "/cache/kv", "capacity": "1 GiB"}
SERVER = {"server": {"enabled": True}, "keys": {"secret": "pair"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"engine": {"replica": 2}}, "replica"),
    "an unknown kind": ({"server": {"kind": "Deployment"}}, "server/kind"),
    "a low port": ({"engine": {"port": 80}}, "engine/port"),
    "a flag of the chart": ({"engine": {"args": ["--port=1"]}}, "engine/args/0"),
    "a variable of the chart": ({"engine": {"env": [{"name": "HOME"}]}}, "engine/env/0"),
    "a name that is no Secret's": ({"redis": {"secret": "redis://me"}}, "redis/secret"),
    "a stack without tiers": ({"engine": {"stack": {"tiers": []}}}, "engine/stack/tiers"),
    "an arena as large as the limit": (
        {"engine": {"stack": {"arena": {"size": "32 GiB"}}}},
        "engine.stack.arena.size is 32 GiB, and engine.resources.limits.memory is 32Gi",
    ),
    "files outside the volume": (
        {
            "engine": {
                "stack": {"tiers": [files := {"type": "files", "path": "/data", "capacity": 1}]}
            }
        },
        "engine.stack.tiers: the path /data is not below /cache",
    ),
    "files larger than the volume": (
        {"engine": {"stack": {"tiers": [FILES | {"path": "/cache/kv", "capacity": "1 TiB"}]}}},
        "engine.stack.tiers: the capacity 1 TiB is more than engine.cache.size, 110Gi",
    ),
    "a socket of one's own": (
        {"engine": {"stack": {"control": "/tmp/s"}}},
        "engine.stack.control: the chart sets it",
    ),
    "no time to write": (
        {"engine": {"terminationGracePeriodSeconds": 30}},
        "engine.terminationGracePeriodSeconds is 30: expected engine.preStopSeconds +",
    ),
    "no time to flush": (
        SERVER | {"server": {"enabled": True, "flushSeconds": 600}},
        "server.terminationGracePeriodSeconds is 90: expected server.flushSeconds + 10",
    ),
    "replicas of a DaemonSet": (
        SERVER | {"server": {"enabled": True, "kind": "DaemonSet", "replicas": 2}},
        "server.replicas has no effect with server.kind DaemonSet",
    ),
    "servers without keys": ({"server": {"enabled": True}}, "keys.secret is missing"),
    "keys without servers": ({"keys": {"secret": "pair"}}, "keys.secret has no effect"),
    "a port of HTTP without servers": ({"http": {"secret": "token"}}, "http.secret has no effect"),
    "nothing to run": ({"engine": {"enabled": False}}, "enable one of them"),
    "a Redis without engines": (
        SERVER | {"engine": {"enabled": False}, "redis": {"secret": "redis"}},
        "redis.secret is for engines",
    ),
    "a key that encrypts nothing": (
        {"encryption": {"secret": "key"}},
        "encryption.secret has no effect",
    ),
    "encryption without its key": (
        {"engine": {"stack": {"tiers": [FILES | {"path": "/cache/kv", "codecs": ["aes-gcm"]}]}}},
        "set encryption.secret to the Secret with its key",
    ),
    "a range from above": ({"nixlPorts": {"first": 25000}}, "nixlPorts.first is greater"),
    "a size that is none": (
        {"engine": {"stack": {"arena": {"size": "8 GiX"}}}},
        "engine/stack/arena/size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_contradiction_is_refused(name):
    values, said = REFUSED[name]
    with pytest.raises(helm_python.HelmError) as refused:
        render(copy.deepcopy(values))
    assert said in str(refused.value)


@pytest.mark.parametrize("size", ["31 GiB", "33285996544", 33285996544, "33GB", "31gib"])
def test_a_size_is_read_as_kvladder_reads_it(size):
    found = render({"engine": {"stack": {"arena": {"size": size}}}})
    assert yaml.safe_load(stacks(found)["kv-engine"])["arena"]["size"] == size
