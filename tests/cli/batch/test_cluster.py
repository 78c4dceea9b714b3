"""`ondevice batch --ray` writes the same answers as one machine, also if a worker is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.conftest import ROOT

pytestmark = pytest.mark.needs("ray")

LINES = [{"id": f"p{number}", "prompt": f"def job{number}(", "max_new_tokens": 150} for number in range(60)]
LINES += [{"id": "bad", "prompt": ""}, {"id": "worse", "prompt": "x", "temprature": 1}]


@pytest.fixture(scope="module")
def environment(reference_bundle):
    """Environment of all processes: workers start in other directories and must find the sources and the bundle."""
    paths = [str(ROOT), str(ROOT / "export"), *filter(None, sys.path)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "ONDEVICE_HOME": str(reference_bundle.parent),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture(scope="module")
def cluster(environment):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1)
        yield made
        made.shutdown()


def start(environment, directory, out, *words):
    prompts = directory / "p.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    command = [sys.executable, "-m", "ondevice", "batch", "reference", str(prompts), "--out", str(out)]
    command += ["--temperature", "1", "--seed", "3", "--threads", "1", "--max-sequences", "3", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def model_processes(cluster):
    """Ids of the processes that hold a model."""
    raylets = {process.process.pid for node in cluster.list_all_nodes() for process in node.all_processes["raylet"]}
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = next(line for line in status.read_text().splitlines() if line.startswith("PPid:"))
            title = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent.split()[1]) in raylets and b"RemoteModel" in title:
            found.append(int(status.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers under /proc")
def test_a_killed_worker_changes_no_answer(cluster, environment, tmp_path):
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    process = start(environment, tmp_path, alone)
    assert process.communicate()[1]
    assert process.returncode == 1  # two lines are errors
    process = start(environment, tmp_path, together, "--ray", cluster.address)
    while process.poll() is None and (not together.exists() or len(together.read_bytes().splitlines()) < 8):
        time.sleep(0.01)
    workers = model_processes(cluster)
    assert workers
    os.kill(workers[0], signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert "its prompts are retried" in err
    assert sorted(together.read_bytes().splitlines()) == sorted(alone.read_bytes().splitlines())


@pytest.mark.slow
def test_a_machine_with_another_bundle_is_not_used(cluster, environment, tmp_path, reference_bundle):
    """Here all machines: their $ONDEVICE_HOME has another bundle of the same name."""
    home = tmp_path / "home"
    shutil.copytree(reference_bundle, home / "reference")
    manifest = json.loads((home / "reference" / "bundle.json").read_text())
    entry = next(iter(manifest["files"].values()))
    entry["sha256"] = "0" * 64
    (home / "reference" / "bundle.json").write_text(json.dumps(manifest))
    out = tmp_path / "a.jsonl"
    process = start({**environment, "ONDEVICE_HOME": str(home)}, tmp_path, out, "--ray", cluster.address)
    _, err = process.communicate()
    assert process.returncode == 2, err
    assert "is another bundle" in err
    assert "no machine of the cluster is left" in err


def test_no_cluster_at_the_address(environment, tmp_path):
    process = start(environment, tmp_path, tmp_path / "a.jsonl", "--ray", "127.0.0.1:1")
    _, err = process.communicate()
    assert process.returncode == 2
    assert err.startswith("ondevice: there is no Ray cluster at 127.0.0.1:1")
