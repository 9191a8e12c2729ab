"""Check `examples/`: scripts are run with launchers that only write down what they are given, manifests are read.

python scripts/check_examples.py               the plugin's flags, by its own parser; a second
python scripts/check_examples.py --megatron    all other flags as well, by the installed Megatron's and torch's parsers,
                                               and what a job would be refused for

Nothing is trained or submitted, and no cluster is asked. Exit status: 0, or 1 with a line for each thing that is wrong.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mindspeed_tft.cli import config, job_file

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LAUNCHERS = ("tftrun", "torchrun")

# Flags of the NPU example that are MindSpeed's own, which is not installed here: named, so that no typing error passes
# as one of them.
MINDSPEED = frozenset(("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb"))


@dataclass(frozen=True)
class Example:
    """How one file is run, and what has to come of it."""

    path: str
    world: int  # ranks
    environ: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    calls: tuple[str, ...] = ("tftrun",)  # programs that it starts, in their order
    protected: bool = True
    refused: str = ""  # what a job would be refused for today: the flag of the refusal
    says: str = ""  # what its head has to say about that


_NPU = {"NODE_RANK": "0", "MASTER_ADDR": "node0", "DATA": "/data/llama", "SAVE": "SHARED"}
_MINDCLUSTER = {"RANK": "0", "MASTER_ADDR": "llama-master-0"}
_MINDSPORE = {"MS_WORKER_NUM": "16", "MS_LOCAL_WORKER": "8", "MS_NODE_RANK": "0", "MS_SCHED_HOST": "10.0.0.1",
              "MS_SCHED_PORT": "8118"}  # fmt: skip
_SLURM = {"SLURM_JOB_NODELIST": "node[0-3]", "SLURM_NNODES": "4", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1"}
_HONEST = "WHAT IS NOT PROVED YET"
RUNS = (
    Example("pretrain_gpt_cpu.sh", 4, calls=("torchrun",), protected=False),
    Example("pretrain_gpt_cpu.sh", 4, {"PROGRAM": "pretrain_gpt.py"}, calls=("torchrun",),
            words=("--enable-high-availability", "--save", "SHARED", "--save-interval", "1000")),
    Example("llama2_70b_npu.sh", 128, _NPU, refused="--distributed-backend", says=_HONEST),
    Example("llama2_70b_npu.sh", 128, {**_NPU, "DOCTOR": "1"}, calls=("tftctl",)),
    Example("llama2_70b_npu.sh", 128, {**_NPU, "PROTECT": "0"}, protected=False),
    Example("slurm.sbatch", 16, {**_SLURM, "SLURM_SUBMIT_DIR": "HERE"}, calls=("tftctl", "tftrun")),
    Example("kubernetes/job.yaml", 16, {"NODE": "0"}, calls=("tftctl", "tftrun")),
    Example("kubernetes/ascendjob-pytorch.yaml", 128, _MINDCLUSTER, refused="--distributed-backend", says=_HONEST),
    Example("kubernetes/ascendjob-mindspore.yaml", 16, _MINDSPORE, calls=("msrun",), protected=False, says=_HONEST),
    Example("kubernetes/volcano.yaml", 16, {"VC_TASK_INDEX": "0", "POD": "gpt-worker-0"}, calls=("tftctl", "tftrun")),
)  # fmt: skip

# A launcher that writes its words down, each ended by a zero byte, one file a call.
_STUB = """#!/bin/bash
number=$(ls "$RECORD" | wc -l)
printf '%s\\0' "${0##*/}" "$@" > "$RECORD/$number"
"""
# Slurm's own: a task of the first node, and the names of the nodes.
_SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
exec "$@"
"""
_SCONTROL = "#!/bin/bash\nprintf 'node%d\\n' 0 1 2 3\n"


def record(example: Example) -> list[list[str]]:
    """Run an example with stubs for launchers; the command lines that it has come to, in their order.

    Raises:
        RuntimeError: it ended with another status than 0.
    """
    with tempfile.TemporaryDirectory(prefix="tft-examples-") as folder:
        work = Path(folder)
        for name in ("bin", "record", "shared"):
            (work / name).mkdir()
        shutil.copytree(EXAMPLES, work / "examples")  # not beside a real environment with real launchers
        for name, text in {
            **dict.fromkeys((*LAUNCHERS, "tftctl", "msrun"), _STUB),
            "srun": _SRUN,
            "scontrol": _SCONTROL,
        }.items():
            (work / "bin" / name).write_text(text)
            (work / "bin" / name).chmod(0o755)
        places = {"SHARED": str(work / "shared"), "HERE": str(work)}
        environ = {"PATH": f"{work / 'bin'}:/usr/local/bin:/usr/bin:/bin", "RECORD": str(work / "record")}
        environ |= {name: places.get(value, value) for name, value in example.environ.items()}
        words = [places.get(word, word) for word in example.words]
        command = _command(work / "examples" / example.path, work / "shared", environ)
        done = subprocess.run([*command, *words], env=environ, capture_output=True, text=True, timeout=30, cwd=work)
        if done.returncode:
            raise RuntimeError(f"ended with {done.returncode}: {done.stderr.strip()}")
        files = sorted((work / "record").iterdir(), key=lambda path: int(path.name))
        return [path.read_text().split("\0")[:-1] for path in files]


def _command(path: Path, shared: Path, environ: dict[str, str]) -> list[str]:
    """How a file is run; the environment that a manifest gives to its container is added."""
    if path.suffix != ".yaml":
        return ["bash", str(path)]
    container = next(each for spec in pod_specs(documents(path)) for each in spec["containers"])
    for variable in container.get("env", ()):
        environ.setdefault(variable["name"], str(variable.get("value", "")))
    places = {"/shared/gpt": str(shared), "/opt/examples/llama2": str(path.parents[1] / "llama2")}
    words = list(container["args"])
    for there, here in places.items():
        words = [text.replace(there, here) for text in words]
    return [*container["command"], *words]


# ----------------------------------------------------------------------------------------------- flags


def check_run(example: Example, megatron: bool) -> Iterator[str]:
    """What is wrong with what an example starts."""
    try:
        calls = record(example)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        yield str(error)
        return
    if tuple(call[0] for call in calls) != example.calls:
        yield f"starts {[call[0] for call in calls]}, not {list(example.calls)}"
        return
    flags = [training_words(call) for call in calls]
    if any(words != flags[0] for words in flags):
        yield "the doctor looks at other flags than those of the training"
    found = config.resolve(flags[-1], {})
    for refusal in found.refusals:
        yield str(refusal)
    if found.settings is not None and found.settings.enable_high_availability != example.protected:
        yield f"protected: {not example.protected}"
    for call in calls:
        if call[0] in LAUNCHERS and (world := _world(call)) != example.world:
            yield f"{call[0]} makes {world} ranks, not {example.world}"
    if example.says and example.says not in (EXAMPLES / example.path).read_text():
        yield f"does not say {example.says!r}"
    if megatron and not found.refusals:
        yield from _check_with_megatron(example, calls[-1], flags[-1])


def training_words(call: Sequence[str]) -> list[str]:
    """The flags of the training program in a command line of a launcher or the doctor."""
    if call[0] == "tftctl":
        return list(call[call.index("--") + 1 :])
    program = next(number for number, word in enumerate(call) if word.endswith(".py"))
    return list(call[program + 1 :])


def _world(call: Sequence[str]) -> int:
    sizes = {name: "1" for name in ("--nnodes", "--nproc-per-node")}
    for name, value in itertools.pairwise(call):
        if name in sizes:
            sizes[name] = value
    return int(sizes["--nnodes"]) * int(sizes["--nproc-per-node"])


def _check_with_megatron(example: Example, call: Sequence[str], words: list[str]) -> Iterator[str]:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    import mindspeed_tft.adaptor  # noqa: F401  (Megatron imports on a CPU with it)
    from mindspeed_tft import arguments
    from mindspeed_tft.patches import megatron_arguments
    from mindspeed_tft.settings import Refused

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_flags(parser)
    try:
        space, rest = parser.parse_known_args(words)
        yield from _check_launcher(call)
    except SystemExit:
        yield "a parser has refused it (see above)"
        return
    unknown = {word for word in rest if word.startswith("-")} - MINDSPEED
    if unknown:
        yield f"no flags of Megatron, MindSpeed or the plugin: {', '.join(sorted(unknown))}"
    space.world_size = example.world
    settings, origin = arguments.collect(space, {})
    if not settings.enable_high_availability:
        return
    nodes = {"GROUP_WORLD_SIZE": str(example.world // int(_of(call, "--nproc-per-node"))), "MASTER_ADDR": "node0"}
    try:
        megatron_arguments.check(settings, space, nodes, origin)
        refused = ""
    except Refused as refusal:
        refused = refusal.flag
        if refused != example.refused and example.calls[-1] != "tftctl":
            yield f"a job would be refused: {refusal}"
    if example.refused and not refused:
        yield f"is said to be refused for {example.refused}, and is not"


def _check_launcher(call: Sequence[str]) -> Iterator[str]:
    if call[0] not in LAUNCHERS:
        return
    from torch.distributed.run import parse_args

    parse_args(list(call[1:]))  # type: ignore[no-untyped-call]
    yield from ()


def _of(call: Sequence[str], name: str) -> str:
    return call[call.index(name) + 1] if name in call else "16"


# ----------------------------------------------------------------------------------------------- manifests


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pod_specs(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of a Job, of the tasks of a Volcano job, or of the replicas of an AscendJob."""
    specs = []
    for document in found:
        spec = document.get("spec", {})
        owners = (spec, *spec.get("tasks", ()), *spec.get("replicaSpecs", {}).values())
        specs += [owner["template"]["spec"] for owner in owners if "template" in owner]
    return specs


_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_ASCEND = ("mindxdl.gitee.com/v1", "AscendJob")
_KINDS = {("v1", "Service"), ("batch/v1", "Job"), ("batch.volcano.sh/v1alpha1", "Job"), _ASCEND}


def check_manifest(path: Path) -> Iterator[str]:
    """As much of a manifest as can be wrong without a cluster saying so at once."""
    found = documents(path)
    for document in found:
        kind, name = (document.get("apiVersion"), document.get("kind")), document.get("metadata", {}).get("name", "")
        if kind not in _KINDS:
            yield f"{kind} is none of {sorted(_KINDS)}"
        if not _NAME.fullmatch(name):
            yield f"{kind}: {name!r} is no name"
    for spec in pod_specs(found):
        yield from _check_pod(spec)
    for document in found:
        if document["kind"] == "Service":
            yield from _check_service(document, [other for other in found if other is not document])
        elif document["apiVersion"] == "batch/v1":
            yield from _check_job(document)
        elif document["kind"] == _ASCEND[1]:
            yield from _check_ascend(document, path)
        else:
            yield from _check_volcano(document)


def _check_pod(spec: Mapping[str, Any]) -> Iterator[str]:
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    if spec.get("restartPolicy") not in ("Never", "OnFailure"):
        yield f"restartPolicy {spec.get('restartPolicy')}: a job's is Never or OnFailure"
    for container in spec["containers"]:
        if not container.get("image") or not _NAME.fullmatch(container.get("name", "")):
            yield "a container needs a name and an image"
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in volumes:
                yield f"there is no volume {mount['name']}"
            variables = {variable["name"] for variable in container.get("env", ())}
            for variable in re.findall(r"\$\((\w+)\)", mount.get("subPathExpr", "")):
                if variable not in variables:
                    yield f"subPathExpr: there is no variable {variable}"
        mounted = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
        if "/dev/shm" not in mounted:
            yield "/dev/shm has 64 MiB without a volume of its own"
    tolerated = {each["key"] for each in spec.get("tolerations", ())}
    if "node.kubernetes.io/unreachable" not in tolerated:
        yield "a node that falls silent would be given up after 300 seconds only"


def _check_service(service: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    name = service["metadata"]["name"]
    if service["spec"].get("clusterIP") != "None":
        yield "the service has to be headless: clusterIP None"
    if not service["spec"].get("publishNotReadyAddresses"):
        yield "pods have to find each other before they are ready: publishNotReadyAddresses"
    for job in others:
        if job["spec"]["template"]["spec"].get("subdomain") != name:
            yield f"the pods' subdomain is not the service {name}"
        if service["spec"].get("selector", {}).get("job-name") != job["metadata"]["name"]:
            yield f"the service does not select the pods of job {job['metadata']['name']}"


def _check_job(job: Mapping[str, Any]) -> Iterator[str]:
    spec = job["spec"]
    if spec.get("completionMode") != "Indexed" or spec.get("completions") != spec.get("parallelism"):
        yield "each node needs an index, and all at once: completionMode Indexed, completions = parallelism"
    if "--nnodes " + str(spec.get("completions")) not in spec["template"]["spec"]["containers"][0]["args"][0]:
        yield f"{spec.get('completions')} pods are not --nnodes"


def _check_volcano(job: Mapping[str, Any]) -> Iterator[str]:
    spec = job["spec"]
    replicas = sum(task["replicas"] for task in spec["tasks"])
    if spec.get("minAvailable") != replicas:
        yield f"minAvailable {spec.get('minAvailable')} of {replicas} pods: Megatron needs all of them"
    if not {"svc", "env"} <= set(spec.get("plugins", ())):
        yield "plugins svc (names) and env (VC_TASK_INDEX) are needed"
    actions = {policy["action"] for policy in spec.get("policies", ())}
    if "RestartPod" not in actions or actions & {"RestartJob", "RestartTask"}:
        yield "a lost pod alone has to come again: RestartPod"
    if f"--nnodes {replicas}" not in spec["tasks"][0]["template"]["spec"]["containers"][0]["args"][0]:
        yield f"{replicas} pods are not --nnodes"


_PORTS = {"ascendjob-port": 2222, "taskd-port": 9601, "ttp-port": 8000}
_RESET = "/user/restore/reset/config"


def _check_ascend(job: Mapping[str, Any], path: Path) -> Iterator[str]:
    """What MindCluster's operator, scheduler and ClusterD look for in a job of theirs."""
    spec, name = job["spec"], job["metadata"]["name"]
    found = job_file.read(path)
    yield from (str(refusal) for refusal in found.refusals)
    roles = {"pytorch": {"Master", "Worker"}, "mindspore": {"Scheduler", "Worker"}}[found.framework]
    if set(spec["replicaSpecs"]) != roles:
        yield f"a job of {found.framework} has the replicas {sorted(roles)}"
    if spec.get("schedulerName") != "volcano":
        yield "pods of one job start together: schedulerName volcano"
    replicas = sum(each["replicas"] for each in spec["replicaSpecs"].values())
    if spec["runPolicy"]["schedulingPolicy"]["minAvailable"] != replicas:
        yield f"minAvailable is not {replicas}: all pods are needed"
    if not job["metadata"].get("annotations", {}).get("recover-strategy"):
        yield "without the annotation recover-strategy ClusterD leaves the job alone"
    if any(each.get("restartPolicy") != "Never" for each in spec["replicaSpecs"].values()):
        yield "a pod would come back beside its replacement: restartPolicy Never"
    for pod in pod_specs([job]):
        yield from _check_ascend_pod(pod, name)


def _check_ascend_pod(pod: Mapping[str, Any], name: str) -> Iterator[str]:
    (container,) = pod["containers"]
    if container["name"] != "ascend":
        yield "the operator finds the container by its name: ascend"
    given = {port["name"]: port["containerPort"] for port in container["ports"]}
    yield from (f"port {each} is not {number}" for each, number in _PORTS.items() if given.get(each) != number)
    variables = {variable["name"]: variable for variable in container["env"]}
    if variables.get("POD_IP", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") != "status.podIP":
        yield "POD_IP is not status.podIP"
    if variables.get("TTP_PORT", {}).get("value") != str(_PORTS["ttp-port"]):
        yield "TTP_PORT is not the port ttp-port"
    mounted = {mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == _RESET}
    sources = {volume["name"]: volume.get("configMap", {}).get("name") for volume in pod["volumes"]}
    if {sources.get(volume) for volume in mounted} != {f"reset-config-{name}"}:
        yield f"config map reset-config-{name} is not mounted at {_RESET}"


# ----------------------------------------------------------------------------------------------- all


def check_shell(path: Path) -> Iterator[str]:
    """That it can be read, ends at its first error, and may be executed."""
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=30)
    if done.returncode:
        yield done.stderr.strip()
    text = path.read_text()
    if "set -euo pipefail" not in text:
        yield "does not end at its first error: set -euo pipefail"
    if not os.access(path, os.X_OK):
        yield "is not executable"
    if path.suffix == ".sbatch":
        body = text.partition("set -euo")[2]
        if "#SBATCH" in body:
            yield "sbatch reads no #SBATCH after the first command"


def check_all(megatron: bool) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it)."""
    for path in sorted(EXAMPLES.rglob("*")):
        name = str(path.relative_to(EXAMPLES))
        if path.suffix in (".sh", ".sbatch"):
            yield from ((name, wrong) for wrong in check_shell(path))
        if path.parent.name == "kubernetes":
            yield from ((name, wrong) for wrong in check_manifest(path))
        if (path.suffix in (".sh", ".sbatch") or path.parent.name == "kubernetes") and name not in {
            r.path for r in RUNS
        }:
            yield name, "nothing says how it is run: add it to RUNS"
    for example in RUNS:
        yield from ((example.path, wrong) for wrong in check_run(example, megatron))


def main() -> int:
    wrong = list(check_all("--megatron" in sys.argv[1:]))
    for name, text in wrong:
        print(f"examples/{name}: {text}", file=sys.stderr)
    print(f"{len(RUNS)} command lines checked, {len(wrong)} things wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
