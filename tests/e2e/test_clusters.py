"""Each example for a cluster says what its scheduler expects, and its command is one that `fsdptrain` accepts.

The schedulers are not here: their scripts run in a real shell with their variables, and with commands of theirs that
pass on what they are given.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def shell(tmp_path):
    """Runs a script; the value of each option of its `fsdptrain` command."""
    commands = {
        "fsdptrain": f'exec {shlex.quote(sys.executable)} -m fsdptrain "$@" --dry-run',
        "scontrol": 'test "$*" = "show hostnames gpu[1-2]" && printf "gpu1\\ngpu2\\n"',
        "srun": 'test "$1" = --kill-on-bad-exit=1 && shift && exec "$@"',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def run(script, variables):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/"}
        done = subprocess.run(
            ["bash", "-c", script.replace("export PATH=~/fsdptrain/bin:$PATH\n", "")],
            env=environment | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return {**(values := yaml.safe_load(done.stdout))["launch"], **values["run"]}

    return run


def check(found, endpoint, folder):
    assert (found["nnodes"], found["node_rank"], found["nproc_per_node"]) == (2, 1, 8)
    assert (found["rdzv_endpoint"], found["max_restarts"]) == (endpoint, 3)
    assert found["log_rank_dir"] == f"{found['output_dir']}/logs" == f"{folder}/logs"


def test_slurm(shell):
    script = (EXAMPLES / "slurm/train.sbatch").read_text()
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if line.startswith("#SB")
    )
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    variables = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_NNODES": options["nodes"], "SLURM_NODEID": "1"}
    check(shell(script, variables), "gpu1:29500", "runs/slurm")


def test_kubernetes(shell):
    jobset = yaml.safe_load((EXAMPLES / "kubernetes/train.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    found = shell(shlex.join(["exec", *container["command"], *container["args"]]), {"JOB_COMPLETION_INDEX": "1"})
    name = jobset["metadata"]["name"]
    check(found, f"{name}-{replicated['name']}-0-0.{name}:29500", "/runs/kubernetes")
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == found["nnodes"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == found["nproc_per_node"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in job["template"]["spec"]["volumes"]
    }


def test_skypilot(shell):
    task = yaml.safe_load((EXAMPLES / "skypilot/train.yaml").read_text())
    gpus = task["resources"]["accelerators"].partition(":")[2]
    variables = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": "1"}
    variables |= {"SKYPILOT_NUM_GPUS_PER_NODE": gpus, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    check(shell(task["run"], variables), "10.0.0.1:29500", "/runs/skypilot")
    assert list(task["volumes"]) == ["/runs"]
