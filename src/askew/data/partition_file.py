"""A partition from a user's own file of sample indices."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..core.files import is_readable_file, map_array
from ..core.settings import setting
from ..errors import ConfigError, DataError
from .assignment import Assignment, group_by_owner
from .partition import Partition


class FromFile(Partition):
    """A split of your own.

    A .json file holds a list of clients, each a list of its sample indices, or an object of such lists by the clients'
    names, in the file's order. A .npy file holds the client number of every sample, −1 for nobody's. Samples left out
    are nobody's.
    """

    idea: ClassVar[str] = "a split of your own, from a file of sample indices"
    path: str = setting(
        "a .json file, lists of sample indices, or a .npy file, the owner of every sample", default="partition.json"
    )

    def check(self) -> None:
        if Path(self.path).suffix.lower() not in (".json", ".npy"):
            raise ConfigError(
                f"{self.display_name()}: path must name a .json or .npy file, got {self.path!r}; "
                "save the split as one of them."
            )

    def reads(self) -> tuple[Path, ...]:
        return (Path(self.path).expanduser(),)

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        (path,) = self.reads()
        try:
            if path.exists() and not is_readable_file(path):
                raise self.refusal("cannot be read: it is no regular file, or far too large", "check partition.path")
            if path.suffix.lower() == ".json":
                content = json.loads(path.read_bytes(), object_pairs_hook=self.unique_names)
                holder, clients = self.owners_from_lists(content, len(labels))
            else:
                holder, clients = self.owners_from_array(map_array(path), len(labels))
        except OSError as error:
            raise self.refusal(f"cannot be read: {error.strerror or error}", "check partition.path") from None
        except (ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise self.refusal(
                f"is no valid {path.suffix} file ({' '.join(str(error).split())})", "save it anew"
            ) from None
        if not (holder >= 0).any():
            raise self.refusal("gives nobody a sample", "one client at least must have one")
        if clients != self.clients:
            raise self.refusal(
                f"divides the samples among {clients} clients, not {self.clients}", f"set partition.clients = {clients}"
            )
        return group_by_owner(holder, clients)

    def refusal(self, what: str, advice: str) -> DataError:
        """The error that the file is wrong in some way, and what to do."""
        return DataError(f"the partition's file {self.path} {what}; {advice}.")

    def unique_names(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        """An object of the file as a dictionary; JSON itself lets a name come twice."""
        clients: dict[str, object] = {}
        for name, value in pairs:
            if name in clients:
                raise self.refusal(f"names the client {name!r} twice", "give every client a name of its own")
            clients[name] = value
        return clients

    def owners_from_lists(self, content: object, n: int) -> tuple[np.ndarray, int]:
        """The owner of every sample, from the lists of the clients' samples, and the number of clients."""
        clients = list(content.values()) if isinstance(content, dict) else content
        if not isinstance(clients, list) or not all(isinstance(indices, list) for indices in clients):
            raise self.refusal(
                "must hold a list of lists, or an object of lists", "list the sample indices of every client"
            )
        listed = list(chain.from_iterable(clients))
        for index in listed:
            if type(index) is not int or not 0 <= index < n:
                raise self.refusal(
                    f"lists {json.dumps(index)[:40]}, which is no sample",
                    f"samples are the whole numbers from 0 to {n - 1}",
                )
        samples = np.array(listed, dtype=np.int64)
        owners = np.repeat(np.arange(len(clients)), [len(indices) for indices in clients])
        self.check_once(samples, owners)
        holder = np.full(n, -1, dtype=np.int64)
        holder[samples] = owners
        return holder, len(clients)

    def check_once(self, samples: np.ndarray, owners: np.ndarray) -> None:
        """Refuse a sample that is listed twice."""
        order = np.argsort(samples, kind="stable")
        repeated = order[1:][np.diff(samples[order]) == 0]
        if len(repeated):
            sample = samples[repeated[0]]
            clients = " and ".join(f"client {i}" for i in dict.fromkeys(owners[samples == sample].tolist()))
            raise self.refusal(
                f"lists sample {sample} twice, for {clients}", "a sample may belong to one client, and once"
            )

    def owners_from_array(self, content: np.ndarray, n: int) -> tuple[np.ndarray, int]:
        """The owner of every sample, checked, and the number of clients."""
        if not np.issubdtype(content.dtype, np.integer) or content.shape != (n,):
            raise self.refusal(
                f"must hold a whole number for each of the {n} samples, "
                f"got {content.dtype} of shape {list(content.shape)}",
                "save the owners as one row of integers",
            )
        if int(content.min(initial=0)) < -1 or int(content.max(initial=0)) > np.iinfo(np.int32).max:
            raise self.refusal(
                f"has owners from {content.min()} to {content.max()}",
                "number the clients 0, 1, 2, …, and write −1 for nobody's samples",
            )
        return content.astype(np.int64), int(content.max(initial=-1)) + 1
