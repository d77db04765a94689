"""The files for those who run a server: they say what the program does, and nothing careless."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic_settings")

from specrag.serving.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]


def shown(default: Any) -> str:
    if default in (None, (), {}):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:,}" if isinstance(default, int) and default > 9999 else str(default)


def test_the_guide_names_every_setting_with_its_default() -> None:
    guide = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    for name, field in Settings.model_fields.items():
        default = "chosen" if field.default_factory else shown(field.default)
        assert f"| `{name}` | {default} | {field.description} |" in guide, name


def test_the_guide_names_no_figure_that_is_not_there() -> None:
    from specrag.serving.operation.metrics import Metrics

    guide = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    watched = {"running_texts", "queue_length", "kv_reserved_bytes", "kv_budget_bytes"}
    known = {f"specrag_{name}" for name in watched}
    for family in Metrics().registry.collect():
        known |= {family.name, f"{family.name}_total"}
    assert set(re.findall(r"`(specrag_[a-z_]+)`", guide)) <= known


def test_the_sample_of_settings_can_be_used() -> None:
    settings = load_settings(ROOT / "deploy" / "server.toml")
    assert settings.loopback
    text = (ROOT / "deploy" / "server.toml").read_text(encoding="utf-8")
    named = set(re.findall(r"^(?:# )?(\w+) =", text, re.MULTILINE)) - {
        "handbook",
        "url",
        "table",
        "index",
        "name",
        "digest",
        "upload",
    }
    assert named <= Settings.model_fields.keys()


def test_the_image_runs_as_nobody_special() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    words = [line.split()[0] for line in lines if line and line[0].isupper()]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "ADD" not in words
    assert all(re.search(r":\d+\.\d+\.\d+", line) for line in lines if line.startswith("FROM"))
    image = "\n".join(lines)
    for setting in re.findall(r"SPECRAG_SERVE_([A-Z_]+)", image):
        assert setting.lower() in Settings.model_fields
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"  # only what is named gets in: no keys, no data


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "Dockerfile"),
        ("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"),
    ],
    ids=["image", "compose"],
)
def test_the_linters_have_nothing_to_say(command: tuple[str, ...]) -> None:
    """hadolint of the image, and the compose file against Compose's own schema."""
    program = Path(sys.executable).parent / command[0]
    if not program.exists():
        pytest.skip(f"{command[0]} has no wheel for this machine")
    checked = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_compose_file() -> None:
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    services = content["services"]
    assert set(services) == {"specrag", "postgres"}
    for service in services.values():
        assert set(service["networks"]) <= content["networks"].keys()
        assert set(service["secrets"]) <= content["secrets"].keys()
        assert {volume.split(":")[0] for volume in service["volumes"]} <= content["volumes"].keys()
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert not any("PASSWORD" in name and not name.endswith("_FILE") for name in service["environment"])
    assert content["networks"]["back"]["internal"] is True
    assert "ports" not in services["postgres"]
    assert all(port.startswith("127.0.0.1:") for port in services["specrag"]["ports"])
    for name in services["specrag"]["environment"]:
        if name.startswith("SPECRAG_SERVE_"):
            assert name.removeprefix("SPECRAG_SERVE_").lower() in Settings.model_fields


def test_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    text = (ROOT / "deploy" / "specrag.service").read_text(encoding="utf-8")
    unit = tmp_path / "specrag.service"
    unit.write_text(text.replace("/usr/local/lib/specrag/bin/specrag", "/bin/true"), encoding="utf-8")
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
