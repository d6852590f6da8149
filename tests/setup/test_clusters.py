"""Images and recipes for clusters, as far as they can be checked without a daemon or a cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_like.core.config.load import LoadedConfig, load

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SLURM, RAYJOB = ROOT / "examples/clusters/slurm.sh", ROOT / "examples/clusters/rayjob.yaml"
IMAGE = f"{PROJECT['name']}:{PROJECT['version']}"
PINS = dict(
    re.findall(
        r"^([a-z0-9-]+)==(\S+)",
        "".join((ROOT / f"requirements/{name}.txt").read_text() for name in ("cpu", "gpu", "jobs")),
        re.MULTILINE,
    )
)


def instructions(file: Path) -> list[tuple[str, str]]:
    """Instruction and arguments of each line of a Dockerfile."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_is_made_of_what_is_there(file: Path) -> None:
    steps = instructions(file)
    assert steps[0][0] == "FROM"
    assert {name for name, _ in steps} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for step, words in steps if step == "COPY" for name in words.split()[:-1]]
    assert set(copied) == allowed, "the image and .dockerignore name the same"
    assert all((ROOT / name).exists() for name in copied)
    sets = [name for step, words in steps if step == "RUN" for name in re.findall(r"requirements/install (\w+)", words)]
    assert sets == {"cpu": ["cpu"], "gpu": ["cpu", "gpu", "jobs"]}[file.stem.partition(".")[0]]
    for step, words in steps:
        if step == "RUN":
            subprocess.run(["bash", "-n", "-c", words], check=True)
    assert f"-t {IMAGE}-{file.stem.partition('.')[0]} ." in file.read_text()


def test_images_have_the_python_and_the_cuda_of_the_pinned_sets() -> None:
    python = (ROOT / ".python-version").read_text().strip()
    bases = {file.stem.partition(".")[0]: instructions(file)[0][1] for file in DOCKERFILES}
    assert bases["cpu"].startswith(f"python:{python}-slim-")
    assert bases["gpu"].startswith(f"nvidia/cuda:{PINS['cuda-toolkit']}-cudnn-devel-")
    assert f"python{python}-dev" in (ROOT / "docker/gpu.Dockerfile").read_text()


def test_the_installer_knows_every_set_and_refuses_others() -> None:
    text = (ROOT / "requirements/install").read_text()
    known = {name for line in re.findall(r"^  ([a-z |]+)\)", text, re.MULTILINE) for name in line.split(" | ")}
    assert known == {file.stem for file in (ROOT / "requirements").glob("*.txt")} - {"uv"}


def test_what_rays_server_of_jobs_needs_is_pinned() -> None:
    needed = [need for need in metadata.requires("ray") or [] if 'extra == "default"' in need]
    names = {re.match(r"[\w.-]+", need)[0].replace("_", "-") for need in needed}  # type: ignore[index]
    assert names and names <= PINS.keys()


def configured(command: list[str]) -> LoadedConfig:
    """What `areal-like run FILE key=value ...` would run."""
    assert command[:2] == ["areal-like", "run"]
    return load(Path(command[2]), command[3:])


def slurm(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script where `srun` writes down what it is to start on every node."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("")
    for name, script in {
        "scontrol": 'test "$*" = "show hostnames node[3-6]" && printf "node%s\\n" 3 4 5 6',
        "srun": 'printf "%s\\0" "$@" > started; printf "%s %s" "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN" > token',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    node = {"SLURM_JOB_NODELIST": "node[3-6]", "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8"}
    environment = os.environ | node | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(["bash", SLURM, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)


def test_slurm_starts_the_run_on_all_nodes(tmp_path: Path) -> None:
    example = ROOT / "examples/math/gsm8k_grpo_moe.yaml"
    result = slurm(tmp_path, str(example), "cluster.fileroot=/shared/a run")
    assert (result.returncode, result.stderr) == (0, "")
    words = (tmp_path / "started").read_text().split("\0")[:-1]
    separator = words.index("--")
    ray = words[words.index("ray") : separator]
    assert ray == [
        *["ray", "symmetric-run", "--address", "node3:6379", "--min-nodes", "4", "--num-gpus", "8", "--no-monitor"]
    ]
    config = configured(words[separator + 1 :]).config
    assert (config.scheduler.type, config.scheduler.address) == ("ray", "node3:6379")
    assert (config.cluster.n_nodes, config.cluster.n_gpus_per_node) == (4, 8)
    assert config.cluster.fileroot == "/shared/a run"
    mode, token = (tmp_path / "token").read_text().split()
    assert mode == "token" and len(token) == 64


def test_slurm_asks_for_the_nodes_that_the_example_needs() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", SLURM.read_text(), re.MULTILINE))
    cluster = load(ROOT / "examples/math/gsm8k_grpo_moe.yaml", []).config.cluster
    assert (int(asked["nodes"]), int(asked["gpus-per-node"])) == (cluster.n_nodes, cluster.n_gpus_per_node)
    assert asked["ntasks-per-node"] == "1"


@pytest.mark.parametrize("words", [[], ["none.yaml"]])
def test_slurm_without_a_configuration_says_how_it_is_used(tmp_path: Path, words: list[str]) -> None:
    result = slurm(tmp_path, *words)
    assert result.returncode == 2 and result.stderr.startswith("usage: sbatch ")
    assert not (tmp_path / "started").exists()


def job() -> dict[str, Any]:
    return yaml.safe_load(RAYJOB.read_text())["spec"]


def test_the_ray_job_runs_an_example_of_the_image() -> None:
    words = shlex.split(job()["entrypoint"])
    assert words[2].startswith("/areal-like/")
    words[2] = str(ROOT / Path(words[2]).relative_to("/areal-like"))
    config = configured(words).config
    assert (config.scheduler.type, config.scheduler.address) == ("ray", "auto")
    workers = job()["rayClusterSpec"]["workerGroupSpecs"][0]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == config.cluster.n_nodes
    assert int(limits["nvidia.com/gpu"]) == config.cluster.n_gpus_per_node
    assert config.cluster.fileroot.startswith("/shared/")


def test_the_ray_job_has_the_pinned_ray_the_built_image_and_a_token() -> None:
    cluster = job()["rayClusterSpec"]
    assert cluster["rayVersion"] == PINS["ray"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == f"{IMAGE}-gpu"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        (home,) = (entry["value"] for entry in container["env"] if entry["name"] == "HF_HOME")
        assert any(home.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])
