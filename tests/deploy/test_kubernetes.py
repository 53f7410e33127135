"""The manifests: valid by Kubernetes' own schema, and their commands run as two pods would run them.

There is no cluster here. Job, Service and pod templates are checked by Kubernetes' strict JSON schema
(kubernetes.schema.json); of Kubeflow's PyTorchJob, whose schema comes with the operator, the fields that we use.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.launch.harness import COMMAND, Run
from tools.blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
SCHEMA = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text())
STEPS = 300


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def _validate(value: Any, kind: str) -> None:
    jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": SCHEMA["$defs"]}).validate(value)


def test_the_indexed_job_is_valid() -> None:
    service, job = _documents("indexed-job.yaml")
    _validate(service, "io.k8s.api.core.v1.Service")
    _validate(job, "io.k8s.api.batch.v1.Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert variables["PET_NNODES"] == str(spec["completions"]) == str(spec["parallelism"])
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    spec["completion_mode"] = "Indexed"
    with pytest.raises(jsonschema.ValidationError, match="completion_mode"):  # the schema does say no
        _validate(job, "io.k8s.api.batch.v1.Job")


def test_the_pytorchjob_is_valid() -> None:
    (job,) = _documents("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    _validate(job["metadata"], "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
    assert set(job["spec"]) == {"nprocPerNode", "pytorchReplicaSpecs"}
    assert isinstance(job["spec"]["nprocPerNode"], str)
    for name, replica in job["spec"]["pytorchReplicaSpecs"].items():
        assert name in ("Master", "Worker")
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        _validate(replica["template"], "io.k8s.api.core.v1.PodTemplateSpec")
        assert [container["name"] for container in replica["template"]["spec"]["containers"]] == ["pytorch"]


def _containers() -> list[dict[str, Any]]:
    job, other = _documents("indexed-job.yaml")[1], _documents("pytorchjob.yaml")[0]
    templates = [job["spec"]["template"], *(each["template"] for each in other["spec"]["pytorchReplicaSpecs"].values())]
    return [container for template in templates for container in template["spec"]["containers"]]


def test_an_image_that_the_nodes_have_is_not_pulled() -> None:
    """Kubernetes' default for the tag latest is to ask a registry, which knows no image that was built here."""
    containers = _containers()
    assert len(containers) == 3
    assert all(each["imagePullPolicy"] == "IfNotPresent" for each in containers if each["image"].endswith(":latest"))


def _pod(container: dict[str, Any], folder: Path, **variables: str) -> subprocess.Popen[str]:
    """The container's command, with what Kubernetes, or the operator, puts into its environment."""
    words = [*container["command"], *container["args"]]
    assert words[0] == "unisono"
    words = [*COMMAND, *words[1:]]
    words = [str(ROOT / word) if word.startswith("examples/") else word.replace("/runs/", "runs/") for word in words]
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    given = {each["name"]: each["value"] for each in container.get("env", [])}
    environment = own | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"} | given | variables
    return _started([*words, "--steps", str(STEPS)], folder, environment)


def _started(words: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **output)  # type: ignore[call-overload,no-any-return]


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return str(door.getsockname()[1])


def _ended(pods: list[subprocess.Popen[str]]) -> str:
    try:
        outputs = [pod.communicate(timeout=240)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0] * len(pods), outputs
    return "".join(outputs)


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "runs" / "train" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


@pytest.mark.thorough
def test_two_pods_of_the_indexed_job_and_one_that_is_replaced(tmp_path: Path) -> None:
    """The first time nothing happens to them; the second time a pod is killed, and Kubernetes starts another."""
    container = _documents("indexed-job.yaml")[1]["spec"]["template"]["spec"]["containers"][0]
    losses = []
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        folder.mkdir()
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "PET_NPROC_PER_NODE": "1"}
        pods = [_pod(container, folder, JOB_COMPLETION_INDEX=str(index), **variables) for index in (1, 0)]
        if disturbed:
            _await_step(folder, 120)
            _kill_tree(pods[0].pid)
            pods[0].communicate()
            pods[0] = _pod(container, folder, JOB_COMPLETION_INDEX="1", **variables)
        output = _ended(pods)
        assert f"[0] step {STEPS}: done" in output
        assert ("restart 1 of 10: rank 0 " in output) == disturbed, output
        losses.append(_losses(folder))
    assert losses[0] == losses[1]
    script = str(ROOT / "examples" / "slurm" / "train.py")
    done = Run(["run", "-n", "1", script, "--save", "runs/train", "--steps", str(STEPS)], tmp_path)
    assert done.finish(240).returncode == 0
    assert losses[0] == pytest.approx(_losses(tmp_path), rel=1e-3)


@pytest.mark.thorough
def test_two_pods_of_the_pytorchjob(tmp_path: Path) -> None:
    (job,) = _documents("pytorchjob.yaml")
    specs = job["spec"]["pytorchReplicaSpecs"]
    port = _free_port()
    pods = []
    for rank, name in enumerate(("Master", "Worker")):  # what the operator sets, with one rank in each pod
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
        elastic = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
        elastic |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        pods.append(_pod(specs[name]["template"]["spec"]["containers"][0], tmp_path, **address, **elastic))
    assert f"[0] step {STEPS}: done" in _ended(pods)
    assert len(_losses(tmp_path)) == STEPS


@pytest.mark.thorough
def test_the_pages_launchers(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "docs" / "kubernetes.md")
    (tmp_path / "hello.py").write_text(next(block.text for block in blocks if block.title == "hello.py"))
    lines = next(block.text for block in blocks if "as two" in block.notes.get("not run", "")).splitlines()
    port, pods = _free_port(), []
    for line in lines:
        words = line.partition("#")[0].replace("node0", f"127.0.0.1 --master-port {port}").split()
        pods.append(_started([*COMMAND, *words[1:]], tmp_path, os.environ | {"OMP_NUM_THREADS": "1"}))
    assert _ended(pods) == "[0] 4 ranks, sum 4\n"


def _nodes(folder: Path, numbers: Sequence[tuple[int, str]], patience: str) -> list[str]:
    """What launchers of these nodes, with so many ranks each, print of a job of three nodes that cannot start."""
    (folder / "train.py").write_text("print('started')")
    port, pods = _free_port(), []
    for node, ranks in numbers:
        words = ["run", "--nnodes", "3", "--nproc-per-node", ranks, "--node-rank", str(node)]
        words += ["--master-addr", "127.0.0.1", "--master-port", port, "--start-timeout", patience, "train.py"]
        pods.append(_started([*COMMAND, *words], folder, os.environ))
    outputs = [pod.communicate(timeout=120)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [1] * len(pods)
    assert not any("started" in output or "Traceback" in output for output in outputs), outputs
    return outputs


@pytest.mark.thorough
def test_nodes_that_do_not_fit_each_other_say_so_at_once(tmp_path: Path) -> None:
    outputs = _nodes(tmp_path, [(0, "1"), (1, "2"), (2, "1")], patience="1000")
    assert all("of 2 ranks" in output and "of 1 ranks" in output for output in outputs), outputs


@pytest.mark.thorough
def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    outputs = _nodes(tmp_path, [(0, "1"), (1, "1"), (1, "1")], patience="15")
    words = "not all 3 nodes have joined within 15 s; missing: node 2; more than one launcher said that it is node 1"
    assert any(words in output for output in outputs), outputs


def _await_step(folder: Path, step: int) -> None:
    file, deadline = folder / "runs" / "train" / "steps.jsonl", time.monotonic() + 180
    while not file.exists() or len(file.read_bytes().splitlines()) < step:
        assert time.monotonic() < deadline, "the pods do not train"
        time.sleep(0.1)


def _kill_tree(pid: int) -> None:
    """As when a pod is lost: nothing in it gets to react."""
    tree, found = [pid], True
    while found:
        children = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _parent(p) in tree]
        found = bool(set(children) - set(tree))
        tree += [child for child in children if child not in tree]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for each in tree:
            if Path(f"/proc/{each}").exists():
                os.kill(each, signum)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
