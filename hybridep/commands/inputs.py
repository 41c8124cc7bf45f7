"""Clusters, models, runs and plans as the command line names them: a shipped config's name or a path, plus ``--set``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import hybridep
from hybridep.config import ModelT, Strict, apply_override, build, load
from hybridep.errors import DataError, UserError
from hybridep.hugging_face import CONFIG_FILE, config_file, workload_data
from hybridep.matrix import matrix_profile
from hybridep.pipeline import AnyPlan, load_any_plan
from hybridep.plan import Plan
from hybridep.provenance import provenance
from hybridep.run import Data, Run
from hybridep.shares import on_sites
from hybridep.sites import ClusterFile
from hybridep.topology import Cluster
from hybridep.workload import Workload

MADE_FOR_RUNS = ("auto", "stages", "ep", "full_gather")
"""Plans that a run may name in place of a file."""
CONFIGS = Path(hybridep.__file__).resolve().parent / "configs"


class Kind(Enum):
    """What a config holds; the value is its folder below ``configs``."""

    CLUSTER = "clusters"
    WORKLOAD = "models"
    RUN = "runs"
    FABRIC = "fabrics"

    @property
    def prefix(self) -> str:
        """How ``--set`` names it."""
        return self.name.lower()

    @property
    def model(self) -> type[Strict]:
        """The type that the file holds."""
        models: dict[Kind, type[Strict]] = {Kind.CLUSTER: Cluster, Kind.WORKLOAD: Workload, Kind.RUN: Run}
        return models[self]


def config_names(kind: Kind) -> list[str]:
    """Names of the shipped configs of this kind."""
    return sorted(path.stem for path in (CONFIGS / kind.value).glob("*.yaml"))


def find(kind: Kind, text: str) -> Path:
    """The file that ``text`` names: a path, or a shipped config's name; of a model also the folder of a public one, whose
    ``config.json`` it is. Raises UserError with the nearest name."""
    try:
        if kind is Kind.WORKLOAD and (public := config_file(Path(text))) is not None:
            return public
        if Path(text).is_file():
            return Path(text)
    except OSError as error:
        raise UserError(f"{kind.prefix} {text}: cannot be read ({error.strerror})") from None
    names = config_names(kind)
    if text in names:
        return CONFIGS / kind.value / f"{text}.yaml"
    if Path(text).suffix or len(Path(text).parts) > 1:
        raise UserError(f"{kind.prefix} {text}: no such file")
    raise UserError(f"{kind.prefix} {text!r}: no such config; {_nearest(text, names)}, or give the path of a file")


def load_cluster(text: str, overrides: Iterable[str] = ()) -> Cluster:
    """A cluster from a YAML file or a CSV matrix (see ``hybridep.matrix``)."""
    return _load_cluster(Cluster, text, overrides)


def load_cluster_file(text: str, overrides: Iterable[str] = ()) -> ClusterFile:
    """As ``load_cluster``, with sites of several pods as they are written."""
    return _load_cluster(ClusterFile, text, overrides)


def _load_cluster(model: type[ModelT], text: str, overrides: Iterable[str]) -> ModelT:
    path = find(Kind.CLUSTER, text)
    if path.suffix.lower() != ".csv":
        return load(model, path, overrides)
    return build_with(model, matrix_profile(path), str(path), overrides)


def build_with(model: type[ModelT], data: dict[str, Any], where: str, overrides: Iterable[str]) -> ModelT:
    """``build`` after ``--set``."""
    return build(model, data, where, {apply_override(data, override): f"--set {override}" for override in overrides})


def load_workload(text: str, overrides: Iterable[str] = ()) -> Workload:
    """A workload from a YAML file, or with the model of a ``config.json`` (see ``hybridep.hugging_face``)."""
    path = find(Kind.WORKLOAD, text)
    if path.name != CONFIG_FILE:
        return load(Workload, path, overrides)
    return build_with(Workload, workload_data(path), str(path), overrides)


def load_run(text: str, overrides: Sequence[str] = (), *, resume: bool = False) -> Run:
    """A run with ``--set`` applied: its own keys changed, those of cluster and workload added to ``overrides``. Paths
    become absolute, because workers start in other folders. One that is to ``resume`` reads no ``weights``."""
    sorted_out = sort_overrides(overrides, (Kind.CLUSTER, Kind.WORKLOAD, Kind.RUN))
    run = load(Run, find(Kind.RUN, text), sorted_out[Kind.RUN])
    more = [f"{kind.prefix}.{entry}" for kind in (Kind.CLUSTER, Kind.WORKLOAD) for entry in sorted_out[kind]]
    data, validation = _with_path("data", run.data), run.validation
    if validation is not None:
        validation = validation.model_copy(update={"data": _with_path("validation.data", validation.data)})
    weights = run.weights and _absolute("weights", run.weights)
    if weights is not None and not resume:
        _check_readable("weights", weights)
    folder = run.checkpoints.folder
    checkpoints = run.checkpoints.model_copy(update={"folder": folder and _absolute("checkpoints.folder", folder)})
    return run.model_copy(
        update={
            "overrides": (*run.overrides, *more),
            "output": _absolute("output", run.output),
            "weights": weights,
            "data": data,
            "validation": validation,
            "checkpoints": checkpoints,
        }
    )


def _with_path(key: str, data: Data) -> Data:
    path = data.path and _absolute(f"{key}.path", data.path)
    if path is not None:
        _check_readable(f"{key}.path", path)
    return data.model_copy(update={"path": path})


def _absolute(key: str, path: Path) -> Path:
    """With the home folder for ``~``. Raises UserError for what no path may hold."""
    try:
        if b"\0" in os.fsencode(path):
            raise UserError(f"{key}: {str(path)!r} is no path (it holds a null character)")
        return path.expanduser().absolute()
    except (RuntimeError, UnicodeEncodeError) as error:
        raise UserError(f"{key}: {str(path)!r} is no path ({error})") from None


def _check_readable(key: str, path: Path) -> None:
    """Ranks would find out, too, but only once all of them have started."""
    try:
        with os.scandir(path) if path.is_dir() else path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read ({error.strerror})") from None


def cluster_and_workload(cluster: str, workload: str, overrides: Iterable[str]) -> tuple[Cluster, Workload]:
    """Both, each with its share of ``overrides``."""
    sorted_out = sort_overrides(overrides, (Kind.CLUSTER, Kind.WORKLOAD))
    return load_cluster(cluster, sorted_out[Kind.CLUSTER]), load_workload(workload, sorted_out[Kind.WORKLOAD])


def without_sites(cluster: Cluster, workload: Workload, names: Iterable[str]) -> tuple[Cluster, Workload]:
    """The other sites, and the global batch shared out among them; the name of a site with pods means all of them. Raises
    UserError for a name that no site has, and where none is left."""
    left, named = list(cluster.site_names), list[str]()
    for name in names:
        if not any(name in cluster.site_labels(dc) for dc in range(cluster.sizes[0])):
            raise UserError(f"--without {name}: {cluster.name} has no such site; {_nearest(name, cluster.site_names)}")
        named.append(name)
        left = sites_left(cluster, named)
        if not left:
            raise UserError(f"--without {name}: no site of {cluster.name} is left")
    return on_sites(cluster, workload, left)


def sites_left(cluster: Cluster, names: Collection[str]) -> list[str]:
    """Sites of the cluster, each pod by itself, that have none of these names, nor are pods of one that has."""
    return [cluster.site_name(dc) for dc in range(cluster.sizes[0]) if not {*names} & {*cluster.site_labels(dc)}]


def resolve_plan(run: Run) -> AnyPlan:
    """The plan of a run: made now (``auto``, ``stages``, ``ep``, ``full_gather``), or read from its file and compared with the
    run's cluster and workload. Raises what the planner raises, ConfigError and PlanMismatchError."""
    cluster, workload = cluster_and_workload(run.cluster, run.workload, run.overrides)
    if run.plan in MADE_FOR_RUNS:
        from hybridep.commands.named_plans import named_plan
        from planner import predict

        made = named_plan(run.plan, cluster, workload)
        if not isinstance(made, Plan) or run.plan not in ("ep", "full_gather"):
            return made
        return made.model_copy(update={"prediction": predict(made), "provenance": provenance() | made.provenance})
    return load_any_plan(plan_file(run.plan, MADE_FOR_RUNS), cluster=cluster, workload=workload)


def plan_file(text: str, names: Sequence[str]) -> Path:
    """The path that ``text`` is, where it is none of ``names``. Raises UserError for what looks like a name and is no file."""
    if os.path.isfile(text) or Path(text).suffix or len(Path(text).parts) > 1:
        return Path(text)
    raise UserError(f"plan {text!r}: no such plan; {_nearest(text, names)}, or give the path of a plan file")


def sort_overrides(overrides: Iterable[str], kinds: Iterable[Kind]) -> dict[Kind, list[str]]:
    """Which config each ``key=value`` belongs to, by its prefix (``cluster.``, ``workload.``, ``run.``) or by its first
    key where only one of ``kinds`` has it; prefixes are taken off. Raises UserError with the nearest valid key."""
    wanted = tuple(kinds)
    sorted_out: dict[Kind, list[str]] = {kind: [] for kind in wanted}
    for override in overrides:
        key = override.partition("=")[0]
        first, dot, rest = key.partition(".")
        prefixed = [kind for kind in wanted if kind.prefix == first and dot and rest]
        if prefixed:
            sorted_out[prefixed[0]].append(override.removeprefix(f"{first}."))
            continue
        owners = [kind for kind in wanted if first in kind.model.model_fields]
        if len(owners) > 1:
            choices = " or ".join(f"{kind.prefix}.{key}" for kind in owners)
            raise UserError(f"--set {override}: {first!r} is ambiguous; write {choices}")
        if not owners and any(kind.prefix == first for kind in wanted):
            raise UserError(f"--set {override}: write which key of it, as in {first}.name=...")
        if not owners:
            roots = [kind.prefix for kind in wanted] + [field for kind in wanted for field in kind.model.model_fields]
            raise UserError(f"--set {override}: unknown key {first!r}; {_nearest(first, roots)}")
        sorted_out[owners[0]].append(override)
    return sorted_out


def _nearest(text: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(dict.fromkeys(names))}"
