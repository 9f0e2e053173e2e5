"""`askew.run`: the same runs as the command line's, with your own data, network and method where you want."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn

from ..core.algorithm import Algorithm
from ..core.records import Record
from ..core.settings import Settings, setting
from ..data.adapt import library_type
from ..data.dataset import Dataset, Source
from ..data.federation import LocalSettings
from ..data.own_files import OwnFiles
from ..data.partition import Partition
from ..data.transform import InputTransform
from ..data.user import from_user, is_divided
from ..engine.settings import EngineSettings
from ..errors import ConfigError, DataWarning, ModelError, Remark
from ..models import Network
from ..participation import Participation
from .build import OWNERS_PASSED_OVER, passes_over_owners
from .code_text import network_text, source_text
from .config import CHOICES, OPTIONAL_TABLES, Config, Evaluation, FromPython, load_config
from .hook_fault import explain_hooks
from .launch import run_config
from .network_check import first_line, require_sizes
from .process_state import torch_lock
from .progress import ScriptProgress
from .run import OnRound
from .store import Run
from .sweep import grid, read_sweep
from .trackers import tracking
from .value_text import fingerprint, is_library, module_shape, tensors_of

Table = str | Mapping[str, Any]


class HeldObject(FromPython):
    """Settings that stand for an object handed in from Python, and hold it.

    Copies of the settings find the object by its fingerprint while any of them exists; with the last one it is freed.
    """

    fingerprint: str
    objects: ClassVar[WeakValueDictionary[str, Any]] = WeakValueDictionary()  # by fingerprint

    def hold_object(self) -> None:
        """Find the object, and keep it as long as these settings exist."""
        object.__setattr__(self, "_object", self.objects.get(self.fingerprint))

    def held_object(self, what: str) -> Any:
        """The object; `what` names it in the sentence where no settings held it any more when these were made."""
        if self.__dict__["_object"] is None:
            raise ConfigError(
                f"the {what} of this configuration was handed in from Python and is gone; call askew.run with it again."
            )
        return self.__dict__["_object"]

    def __deepcopy__(self, memo: object) -> Self:
        return self  # settings never change, and the object must not be copied


class OwnData(HeldObject, Source):
    """Data handed in from Python; the fingerprint differs between datasets."""

    fingerprint: str = setting("hash of the samples", default="")

    @classmethod
    def of(cls, data: Any, test: Any, client: str = "", label: str = "") -> OwnData:
        """The settings that stand for a user's data; the arguments are as for `askew.run`."""
        dataset = from_user(data, test, client=client, label=label)
        owner = torch.zeros(0) if dataset.owner is None else torch.as_tensor(dataset.owner)
        about = f"{dataset.classes} {source_text(dataset.criterion)} {transform_text(dataset.transform)}"
        if dataset.client_names or dataset.class_names:
            about += f" {dataset.client_names} {dataset.class_names}"
        of_test = () if dataset.test_owner is None else (torch.as_tensor(dataset.test_owner),)
        mark = fingerprint(*dataset.train, *dataset.test, owner, *of_test, about=about)
        cls.objects[mark] = dataset
        return cls(fingerprint=mark)

    def check(self) -> None:
        self.hold_object()

    @property
    def seeded(self) -> bool:
        return False

    @property
    def owners(self) -> int:
        owner = self.load(0, 0).owner
        return 0 if owner is None else int(owner.max()) + 1

    @property
    def regression(self) -> bool:
        return self.load(0, 0).classes == 0

    def load(self, seed: int, clients: int) -> Dataset:
        dataset: Dataset = self.held_object("data")
        return dataset


class OwnNetwork(HeldObject, Network):
    """A network handed in from Python, which starts from the weights it has."""

    kind: str = setting("its class", default="")
    fingerprint: str = setting("hash of its weights", default="")
    structure: str = setting("hash of its layers and its code, without the weights", default="")
    seeds: ClassVar[dict[str, set[int]]] = {}  # of runs that started from a network, by its fingerprint

    @classmethod
    def of(cls, module: nn.Module) -> OwnNetwork:
        """The settings that stand for a user's module."""
        require_sizes(module)
        about = f"{module_shape(module)} {network_text(module)}"
        mark = fingerprint(*tensors_of(module), about=about)
        cls.objects[mark] = module
        return cls(kind=type(module).__name__, fingerprint=mark, structure=fingerprint(about=about))

    def note_seed(self, seed: int) -> None:
        """Remark, once, that runs with several seeds start from the same weights."""
        seeds = self.seeds.setdefault(self.fingerprint, set())
        already = seed in seeds
        seeds.add(seed)
        if len(seeds) == 2 and not already:
            warnings.warn(
                f"model: every seed starts from the weights of this one {self.kind}; to draw them by the seed, give "
                f"what makes a network instead: model={self.kind}, or model=lambda: {self.kind}(…).",
                Remark,
                stacklevel=5,  # whoever calls askew.run
            )

    def check(self) -> None:
        super().check()
        self.hold_object()

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        module: nn.Module = self.held_object("model")
        return module


class NetworkMaker(HeldObject, Network):
    """A class or function of a user's that makes a network: the run's seed decides its weights."""

    kind: str = setting("the class of the network", default="")
    fingerprint: str = setting("hash of the network that it makes with seed 0", default="")
    structure: str = setting("hash of its layers and its code, without the weights", default="")

    @classmethod
    def of(cls, make: Callable[[], nn.Module]) -> NetworkMaker:
        """The settings that stand for what makes a user's network."""
        with torch_lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = call_maker(make)
        require_sizes(module)
        about = f"made: {module_shape(module)} {network_text(module)}"
        mark = fingerprint(*tensors_of(module), about=about)
        cls.objects[mark] = make
        return cls(kind=type(module).__name__, fingerprint=mark, structure=fingerprint(about=about))

    def check(self) -> None:
        super().check()
        self.hold_object()

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return call_maker(self.held_object("model"))


def call_maker(make: Callable[[], nn.Module]) -> nn.Module:
    """The network that a class or function makes; what is none is refused."""
    name = getattr(make, "__name__", repr(make))
    try:
        module = make()
    except TypeError as e:
        raise ModelError(
            f"model={name} is called without arguments, and that failed: {first_line(e)}; "
            f"give what needs none, such as model=lambda: {name if name.isidentifier() else 'Net'}(…)."
        ) from e
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"model={name} must make a network, an nn.Module, and made a value of type {type(module).__name__}; "
            "let it return the network."
        )
    return module


def own_model(model: Any) -> Any:
    """What stands for a user's network, or for what makes one; a name, a table or settings stay as they are."""
    if isinstance(model, nn.Module):
        return OwnNetwork.of(model)
    if model is None or isinstance(model, (str, Mapping, Network)):
        return model
    if isinstance(model, type) and issubclass(model, Network):
        return model()
    if not callable(model):
        raise ConfigError(
            f"model must be a network's name, a table, an nn.Module, or a class or function that makes one, "
            f"got {type(model).__name__}; write for example model=MyNet."
        )
    return NetworkMaker.of(model)


def transform_text(transform: InputTransform | None) -> str:
    """A text that stands for an input transform: of askew's the representation, which says all."""
    return str(transform) if transform is None or is_library(type(transform)) else source_text(transform)


def run(
    what: str | Path | Mapping[str, Any] | Config | Algorithm | type[Algorithm] | None = None,
    *,
    method: str | Algorithm | type[Algorithm] | None = None,
    data: Table | Source | Any = None,
    test: Any = None,
    client: str = "",
    label: str = "",
    model: Table | Network | nn.Module | Callable[[], nn.Module] | None = None,
    partition: Table | Partition | None = None,
    participation: Table | Participation | None = None,
    local: Mapping[str, Any] | LocalSettings | None = None,
    evaluation: Mapping[str, Any] | Evaluation | None = None,
    engine: Table | EngineSettings | None = None,
    seed: int | None = None,
    rounds: int | None = None,
    clients: int | None = None,
    cohort: int | None = None,
    lr: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    watch: OnRound | None = None,
    track: Any = None,
    save_every: float = 5.0,
    progress: bool = True,
    **parameters: Any,
) -> Run:
    """Train one federation and return its run.

    - `what`: an algorithm's name or instance, a TOML file, tables or a Config; for the last three `method` names it.
    - `data`: a dataset's name, a table, a pair (x, y) or triple (x, y, owner) of tensors or arrays, a torch Dataset, a
      dictionary {client: data}, a list of such data, one a client, or a DataFrame of which `client` and `label` name
      columns; `test` likewise, a fifth is held out without it.
    - `model`: a network's name, a table, any nn.Module, or a class or function that makes one, whose weights the seed
      then decides.
    - `clients`, `cohort`, `lr`, `epochs`, `batch_size` and `device` stand for partition.clients, participation.cohort,
      local.lr, local.epochs, local.batch and engine.device.
    - Further keywords are the algorithm's hyper-parameters, or tables that most runs do not need, such as `faults`.
    - `out`: the run is kept in a folder there, as the command line's are; a finished one is read back, unless `fresh`
      is true. A checkpoint is written at most every `save_every` seconds.
    - `watch`: a function of the run and a record, called before the first round, with None, and after every round.
    - `track`: "tensorboard", "mlflow", "wandb" or "trackio", which record every round, or an object of your own.
    - `progress` is shown on a terminal and in a notebook; elsewhere a line every half minute.
    """
    tables: dict[str, Any] = {"model": model, "partition": partition, "participation": participation, "local": local}
    tables |= {"evaluation": evaluation, "engine": engine, "seed": seed, "rounds": rounds, "data": data, "test": test}
    words = {"clients": clients, "cohort": cohort, "device": device, "lr": lr, "epochs": epochs}
    given = {"method": method, "batch_size": batch_size} | tables | words | parameters
    given |= {"client": client, "label": label}
    check_storage(out, save_every)
    config = Config.build(tables_from_keywords(what, given))
    with tracking(track, [config.name()]) as trackers, watched([config], watch, progress) as on_round:
        result = run_config(config, out, fresh=fresh, watch=trackers.beside(on_round), save_every=save_every)
        trackers.end(result)
    remark_run(result)
    return result


def check_storage(out: Any, save_every: Any) -> None:
    """Refuse what is no folder, and no number of seconds."""
    if out is not None and not isinstance(out, (str, Path)):
        raise ConfigError(f'out must be a folder, got {type(out).__name__}; write for example out="runs".')
    if isinstance(save_every, bool) or not isinstance(save_every, (int, float)) or not save_every >= 0:
        raise ConfigError(f"save_every must be a number of seconds from 0 on, got {save_every!r}; write save_every=5.")


@contextmanager
def watched(configs: Sequence[Config], watch: OnRound | None, progress: bool) -> Iterator[OnRound | None]:
    """What is called after every round of these runs, which are trained inside: a user's function, and the progress."""
    for config in configs:
        if isinstance(config.model, OwnNetwork):
            config.model.note_seed(config.seed)
    for remark in dict.fromkeys(remark for config in configs for remark in own_data_remarks(config)):
        warnings.warn(remark, DataWarning, stacklevel=4)  # whoever calls askew.run
    if watch is not None and not callable(watch):
        raise ConfigError(f"watch must be a function of a run and a record, got {watch!r}; write watch=print.")
    if not progress:
        with explain_hooks():
            yield watch
        return
    shown = ScriptProgress(len(configs))

    def both(run: Run, record: Record | None) -> None:
        shown(run, record)
        if watch is not None:
            watch(run, record)

    try:
        with explain_hooks():
            yield both
    finally:
        shown.close()


def remark_run(run: Run) -> None:
    """Say what nobody sees who looks at a run's numbers alone: another engine than the one that was named, random
    numbers that the seed does not decide, or that it has diverged.
    """
    named, engine = run.config.get("engine", {}).get("name", "auto"), run.facts.get("engine", "")
    if named != "auto" and engine not in ("", named):
        warnings.warn(f"engine: {engine} trained, and not {named}: {run.facts.get('reason')}.", Remark, stacklevel=3)
    if "draws" in run.facts:
        warnings.warn(f"{run.algorithm}, seed {run.config.get('seed', 0)}: {run.facts['draws']}.", Remark, stacklevel=3)
    if "diverged" in run.facts:
        warnings.warn(f"{run.algorithm}, seed {run.config.get('seed', 0)}: {run.facts['diverged']}.", Remark, 3)


# keywords -------------------------------------------------------------------------------------------------------------

# single settings that have a keyword of their own, and the algorithm
WORDS = {
    "clients": "partition.clients",
    "cohort": "participation.cohort",
    "device": "engine.device",
    "lr": "local.lr",
    "epochs": "local.epochs",
    "batch_size": "local.batch",
}
PARTS = ("model", "partition", "participation", "local", "evaluation", "engine", "seed", "rounds")


def plain_numbers(value: Any) -> Any:
    """The value with Python's numbers in place of numpy's, also in tables: settings tell whole numbers from others."""
    if isinstance(value, dict):
        return {name: plain_numbers(inner) for name, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def tables_from_keywords(what: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The nested tables of a configuration from the first argument and the keywords of `run`."""
    rest = {name: plain_numbers(value) for name, value in keywords.items()}
    tables = with_method(what, rest.pop("method", None))
    data, test, client, label = (rest.pop(name, None) for name in ("data", "test", "client", "label"))
    if data is not None:
        tables["data"] = data_settings(data, test, client or "", label or "")
    given = {name: rest.pop(name) for name in PARTS if name in rest}
    given["model"] = own_model(given.get("model"))
    short = {path: rest.pop(word) for word, path in WORDS.items() if word in rest}
    put_settings(tables, given | take_tables(rest), short, rest)
    return tables


def sweep_configs(
    what: Any, over: Mapping[str, Any], seeds: int | Iterable[int] | None, keywords: Mapping[str, Any]
) -> list[Config]:
    """The configurations of every combination of some settings' values; the arguments are those of `askew.sweep`."""
    tables, spans = sweep_tables(what, keywords)
    if seeds is not None and "seed" in over:
        raise ConfigError("sweep: seeds and over = {'seed': …} both name the seeds; leave one of them out.")
    own, varied = method_settings(tables, over), set[str]()
    if seeds is not None:
        over = {**over, "seed": range(seeds) if isinstance(seeds, int) else seeds}
    for word, values in over.items():
        if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
            raise ConfigError(f"sweep: {word} must be a list of values, got {values!r}; write [{values!r}].")
        key = "algorithm.name" if word == "method" else WORDS.get(word, word)
        key = f"algorithm.{key}" if key in own and key not in PARTS else key
        given = [plain_numbers(value) for value in values]
        if key == "algorithm.name" and any(isinstance(value, Algorithm) for value in given):
            key = "algorithm"
        name, _, inner = key.partition(".")
        table = keywords.get(name)
        if key in varied or keywords.get(word) is not None or (isinstance(table, Mapping) and inner in table):
            raise ConfigError(f"sweep: {word} is given twice; leave it out of over, or out of the other settings.")
        varied.add(key)
        spans[key] = [table_of(key, value) for value in given] if key in CHOICES else given
    return grid(tables, spans)


def method_settings(tables: Mapping[str, Any], over: Mapping[str, Any]) -> set[str]:
    """The settings that the methods of a sweep have, as far as these are named."""
    chosen = tables.get("algorithm")
    names = [*over.get("method", ()), *over.get("algorithm.name", ())]
    names += [chosen.get("name")] if isinstance(chosen, Mapping) else []
    registry = CHOICES["algorithm"].members
    return {f.name for name in names if isinstance(name, str) and name in registry for f in fields(registry[name])}


def sweep_tables(what: Any, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The nested tables of a configuration and the lists of its [sweep] table, from the arguments of `askew.sweep`."""
    spans: dict[str, Any] = {}
    if isinstance(what, Path) or (isinstance(what, str) and what.endswith(".toml")):
        what, spans = read_sweep(what)
    return tables_from_keywords(what, keywords), spans


def table_of(name: str, value: Any) -> Any:
    """One value of a whole table in a sweep, as a configuration holds it: settings, or a table."""
    if name == "model":
        value = own_model(value)
    elif name == "data":
        value = data_settings(value, None, "", "")
    return {"name": value} if isinstance(value, str) else value


def data_settings(data: Any, test: Any, client: str, label: str) -> Any:
    """The settings of the data: a name or a table as they are, and settings that stand for anything else."""
    if isinstance(data, (str, Path)) and (kind := file_kind(data)):
        data, test = {"name": kind, "file": str(data), **({} if test is None else {"test": str(test)})}, None
    if isinstance(data, Mapping) and not data:
        raise ConfigError("data is an empty dictionary; pass the pair (x, y) of every client, or a dataset's name.")
    by_settings = isinstance(data, (str, Mapping, Source)) and not library_type(data) and not is_divided(data)
    if by_settings and isinstance(data, Mapping) and any(hasattr(value, "__len__") for value in data.values()):
        refuse_arrays(data)
    if not by_settings:
        return OwnData.of(data, test, client, label)
    if test is not None:
        raise ConfigError("test is for data handed in from Python; leave it out, or name a file in data.test.")
    table = {"name": data} if isinstance(data, str) else data
    given = {key: value for key, value in (("client", client), ("label", label)) if value}
    if given and isinstance(table, Source):
        raise ConfigError("client and label belong to the settings of the data; set them there.")
    return {**table, **given} if given else table


def file_kind(data: str | Path) -> str:
    """The kind of a file or folder of data, by its ending; empty where the text is a dataset's name."""
    path = Path(data)
    kinds = {".csv": "csv", ".gz": "csv", ".tsv": "csv", ".parquet": "parquet", ".npz": "npz"}
    is_folder = path.is_dir() and (isinstance(data, Path) or "/" in data)
    return "folder" if is_folder else kinds.get(path.suffix.lower(), "")


def refuse_arrays(data: Mapping[str, Any]) -> None:
    """Refuse a dictionary that is neither settings nor clients' data."""
    for key, value in data.items():
        if (
            isinstance(value, Mapping)
            or hasattr(value, "shape")
            or (isinstance(value, list) and len(value) > 1 and not isinstance(value[0], str))
        ):
            raise ConfigError(
                f"data[{key!r}] is no setting but {type(value).__name__}; pass (x, y), (x, y, owner), or a dictionary "
                "with the pair (x, y) of every client."
            )


def own_data_remarks(config: Config) -> list[str]:
    """What was done to a user's data, and whether their owners are passed over."""
    if not isinstance(config.data, (OwnData, OwnFiles)):
        return []
    dataset = config.data.load(config.seed, config.partition.clients)
    passed_over = dataset.owner is not None and passes_over_owners(config)
    return [*dataset.remarks, *([OWNERS_PASSED_OVER] if passed_over else [])]


def with_method(
    what: str | Path | Mapping[str, Any] | Config | Algorithm | type[Algorithm] | None,
    method: str | Algorithm | type[Algorithm] | None,
) -> dict[str, Any]:
    """The nested tables of the first argument of `run`, with the algorithm that `method` names, if any."""
    tables = tables_from("fedavg" if what is None else what)
    if method is None:
        return tables
    if isinstance(what, (Algorithm, type)) or (isinstance(what, str) and not what.endswith(".toml")):
        raise ConfigError(f"the first argument and method={method!r} both name a method; leave one of them out.")
    return tables | tables_from(method)


def put_settings(
    tables: dict[str, Any], given: Mapping[str, Any], short: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
    """Put into nested tables: other tables, single settings by dotted keys, and the algorithm's; None is not given."""
    if "seeds" in parameters:
        raise ConfigError(
            "askew.run trains one run, which has one seed; for several write askew.sweep(…, seeds=[0, 1, 2])."
        )
    tables |= {name: value for name, value in given.items() if value is not None}
    for name in ("data", "model", "partition", "participation", "engine"):
        if isinstance(tables.get(name), str):
            tables[name] = {"name": tables[name]}
    for path, value in short.items():
        name, _, key = path.partition(".")
        if value is not None:
            refuse_two_values(path, value, given.get(name))
            merge(tables, name, {key: value})
    if parameters:
        merge(tables, "algorithm", parameters)


def refuse_two_values(path: str, value: Any, table: Any) -> None:
    """Refuse a setting that a keyword of its own and the keyword of its table give different values."""
    name, _, key = path.partition(".")
    if isinstance(table, Mapping) and key in table and table[key] != value:
        word = next(word for word, its in WORDS.items() if its == path)
        raise ConfigError(
            f"{word} = {value!r} and {name} = {{{key!r}: {table[key]!r}}} contradict each other; leave one of them out."
        )


def take_tables(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove optional tables of the configuration from keywords, and return them."""
    return {name: keywords.pop(name) for name in [*keywords] if name in OPTIONAL_TABLES}


def tables_from(what: str | Path | Mapping[str, Any] | Config | Algorithm | type[Algorithm]) -> dict[str, Any]:
    """The nested tables of what the first argument of `run` stands for."""
    if isinstance(what, type) and issubclass(what, Algorithm):
        what = what()
    if isinstance(what, Algorithm):
        return {"algorithm": what}
    if isinstance(what, Mapping):
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in what.items()}
    if isinstance(what, str) and not what.endswith(".toml"):
        return {"algorithm": {"name": what}}
    if not isinstance(what, (str, Path, Config)):
        raise ConfigError(
            "the first argument must be a method's name or instance, a TOML file, nested tables or a Config, got "
            f'{type(what).__name__}; write for example askew.run("fedavg").'
        )
    config = what if isinstance(what, Config) else load_config(what)
    return {field.name: getattr(config, field.name) for field in fields(config)}


def merge(tables: dict[str, Any], name: str, values: Mapping[str, Any]) -> None:
    """Put values into one table, which may be a table or settings that were built from one."""
    before = tables.get(name, {})
    if isinstance(before, Settings):
        tables[name] = type(before).build({**before.table(), **values}, name)
    elif isinstance(before, Mapping):
        tables[name] = {**before, **values}
    else:
        raise ConfigError(f"{name} must be a table, got {before!r}; write {name}={{...}}.")
