"""The launch files in examples/: their fields are documented ones, and the commands in them are valid.

They were also validated by the schema of skypilot 0.14.1 and the models of kubeflow-training 1.9.3, which are no
dependencies.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest

from bsi.cli.training import parse

yaml = pytest.importorskip("yaml")
EXAMPLES = Path(__file__).parents[2] / "examples"


def recipe_of(words: list[str]) -> Any:
    """The recipe that `bsi train WORDS` trains."""
    return parse(words)[0].recipe


def test_the_kubernetes_job_starts_torchrun_on_every_node() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "train.yaml").read_text("utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["spec"].keys() == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert job["spec"]["runPolicy"].keys() <= {"cleanPodPolicy", "backoffLimit"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    nodes = sum(replica["replicas"] for replica in replicas.values())
    for replica in replicas.values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] == "OnFailure", "the exit codes of preempted ranks are below 128"
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        launcher, words = container["args"][: container["args"].index("-m")], container["args"]
        waits = {word.partition("=")[0]: word.partition("=")[2] for word in launcher}
        assert int(waits["--shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
        assert words[len(launcher) :][:3] == ["-m", "bsi", "train"]
        recipe = recipe_of(words[len(launcher) + 3 :])
        recipe.check(nodes * int(job["spec"]["nprocPerNode"]))


def test_the_skypilot_task_starts_torchrun_on_every_node() -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text("utf-8"))
    assert task.keys() == {"name", "num_nodes", "workdir", "resources", "volumes", "envs", "setup", "run"}
    assert all(isinstance(value, str) for value in task["envs"].values())
    words = shlex.split(task["run"].replace("$RECIPE", task["envs"]["RECIPE"]))
    assert words[0] == "torchrun"
    recipe = recipe_of(words[words.index("train") + 1 :])
    recipe.check(task["num_nodes"] * int(task["resources"]["accelerators"].partition(":")[2]))
