"""The files of deploy/ray: by Ray's own schemas, and their settings by ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

pytest.importorskip("ray")

import jsonschema  # type: ignore[import-untyped]
import ray
from ray.serve.schema import ServeDeploySchema

from specrag.integrations.ray import app

DEPLOY = Path(__file__).parents[3] / "deploy" / "ray"

pytestmark = pytest.mark.filterwarnings("default")  # Ray warns of itself


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


@pytest.fixture
def service() -> Any:
    return read("rayservice.yaml")


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_applications_are_those_that_ray_and_specrag_can_build(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    key = tmp_path / "api-key"
    key.write_text("sk-of-a-test-of-files\n")
    key.chmod(0o600)
    text = text.replace("/run/secrets/specrag/api-key", str(key))
    written = yaml.safe_load(text)
    written = yaml.safe_load(written["spec"]["serveConfigV2"]) if name == "rayservice.yaml" else written
    found = ServeDeploySchema.model_validate(written)
    for application in found.applications:
        assert application.import_path == "specrag.integrations.ray:app"
        app(application.args)


def test_the_cluster_file_is_what_ray_up_takes() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(read("cluster.yaml"), schema)


def test_pods_run_one_image_of_the_tested_ray_and_mount_what_the_settings_name(service: Any) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    containers = [container for pod in pods for container in pod["containers"]]
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert cluster["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]
    assert len({container["image"] for container in containers}) == 1
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    settings = application["args"]["settings"]
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = pod["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} == volumes
        for path in (settings["api_key_file"], *settings["kbs"].values()):
            assert any(path.startswith(mount["mountPath"]) for mount in mounts)
