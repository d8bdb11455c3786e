"""The examples for clusters give torchrun, and torchrun gives fsdptrain, arguments that they accept.

The scripts run in a real shell with the variables of their schedulers, and with stand-ins for the commands.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from fsdptrain.config import resolve

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def torchrun(tmp_path):
    """Runs a script; what torchrun reads from its command line, and the configuration that fsdptrain does."""
    commands = {
        "torchrun": "printf '%s\\0' \"$@\"",
        "scontrol": 'test "$*" = "show hostnames gpu[1-2]" && printf "gpu1\\ngpu2\\n"',
        "srun": 'test "$1" = --kill-on-bad-exit=1 && shift && exec "$@"',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def run(script, variables):
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/"}
        done = subprocess.run(
            ["bash", "-c", script], env=environment | variables, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        found = get_args_parser().parse_args(done.stdout.split("\0")[:-1])
        assert (found.module, found.training_script) == (True, "fsdptrain")
        return found, resolve(found.training_script_args).config

    return run


def check(found, endpoint, folder):
    launch, config = found
    assert (launch.nnodes, launch.nproc_per_node, launch.max_restarts) == ("2", "8", 3)
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", endpoint)
    assert (config.run.output_dir, launch.log_dir) == (folder, f"{folder}/logs")


def test_slurm(torchrun):
    script = (EXAMPLES / "slurm/train.sbatch").read_text()
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if line.startswith("#SB")
    )
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    variables = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_NNODES": options["nodes"], "SLURM_JOB_ID": "7"}
    check(torchrun(script, variables | {"SLURM_CPUS_ON_NODE": "64"}), "gpu1:29500", "runs/slurm")


def test_kubernetes(torchrun):
    jobset = yaml.safe_load((EXAMPLES / "kubernetes/train.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    script = shlex.join(["exec", *container["command"], *container["args"]])
    found = torchrun(script, {"JOB_COMPLETION_INDEX": "1", "POD_IP": "10.0.0.2"})
    name = jobset["metadata"]["name"]
    check(found, f"{name}-{replicated['name']}-0-0.{name}:29500", "/runs/kubernetes")
    assert (found[0].rdzv_conf, found[0].local_addr) == ("is_host=0", "10.0.0.2")
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(found[0].nnodes)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(found[0].nproc_per_node)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


def test_skypilot(torchrun):
    task = yaml.safe_load((EXAMPLES / "skypilot/train.yaml").read_text())
    gpus = task["resources"]["accelerators"].partition(":")[2]
    variables = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": "1", "SKYPILOT_TASK_ID": "7"}
    variables |= {"SKYPILOT_NUM_GPUS_PER_NODE": gpus, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    script = task["run"].replace("export PATH=~/fsdptrain/bin:$PATH\n", "")
    found = torchrun(script, variables)
    check(found, "10.0.0.1:29500", "/runs/skypilot")
    assert (found[0].rdzv_conf, found[0].local_addr) == ("is_host=0", "10.0.0.2")
    assert list(task["volumes"]) == ["/runs"]
