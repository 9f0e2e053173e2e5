"""Secure aggregation, both sides: the server learns the sum of the clients' vectors and no vector.

It works even if some clients do not answer.

Client i masks its vector v_i with a mask of its own and with one for every other client j, which i and j add and
subtract:

    y_i = v_i + PRG(b_i) + Σ_{j>i} PRG(s_ij) − Σ_{j<i} PRG(s_ij)          in whole numbers modulo 2^64

The other clients hold shares of b_i and of the key that gives s_ij. Once the y_i are in, they reveal the share of b_i
of each client that answered, and the share of the key of each client that did not, never both; so the server can
subtract the masks from the sum.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, with the complete graph
and against a server that is curious but keeps to the protocol. Keys, shares and encryption are those of Flower; its
masks are not used, as they come from 32 bits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from hashlib import sha256
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from torch import Tensor

from ..core.text import count_text
from ..core.types import State
from ..engine.distributed import TensorSpec
from .wire import SAME_SETUP, InvalidMessage, Numbers, Payload, RawPayload, read_tensors, read_value

UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]
Secrets = MutableMapping[str, Any]  # what a client keeps between the stages: in memory, never in a file
T = TypeVar("T")

SCALE = 2.0**32  # a number is summed as the nearest whole multiple of 1 / SCALE
MAX_VALUE = 2.0**20  # absolute value of a number that can be summed
SHARE_BYTES = 4 + 48  # bytes of one share of a secret of 32 bytes
MAX_ITEM = 1_000  # bytes of one key or one share in a list
KEY_NAMES = ("mask", "encryption")  # a client's two key pairs: for masks, and for shares sent to other clients


def to_fixed_point(t: Tensor) -> UInt64Array:
    """Numbers as whole ones modulo 2^64, to the nearest 2^-33."""
    if not bool((t.abs() < MAX_VALUE).all()):
        raise InvalidMessage(
            f"an upload has numbers of {MAX_VALUE:g} and more, or none at all, which cannot be summed; "
            "lower the learning rate."
        )
    return (t.detach().cpu().double() * SCALE).round().long().numpy().view(np.uint64)


def from_fixed_point(words: UInt64Array) -> Tensor:
    """The numbers, in float64, that `to_fixed_point` made whole."""
    return torch.from_numpy(words.view(np.int64).astype(np.float64)) / SCALE


def vector_length(specs: Mapping[str, TensorSpec]) -> int:
    """How many numbers the vector of an upload with these tensors has."""
    return sum(math.prod(spec.shape) for spec in specs.values()) + 1


def pack_upload(tensors: State, weight: float, loss: float) -> UInt64Array:
    """The vector that a client adds to the sum: its tensors by name, multiplied by its weight, and then its loss."""
    parts = [weight * tensors[name].flatten().double().cpu() for name in sorted(tensors)]
    return to_fixed_point(torch.cat([*parts, torch.tensor([loss], dtype=torch.float64)]))


def unpack_mean(
    total: Tensor, specs: Mapping[str, TensorSpec], weight: float, clients: int, device: torch.device
) -> tuple[State, float]:
    """The weighted mean of the tensors, and the mean loss, from the sum of the vectors of so many clients.

    `weight` is the sum of the clients' weights.
    """
    names = sorted(specs)
    mean, sizes = total[:-1].to(device) / weight, [math.prod(specs[name].shape) for name in names]
    parts = torch.split(mean, sizes)
    tensors = {
        name: part.view(specs[name].shape).to(specs[name].dtype) for name, part in zip(names, parts, strict=True)
    }
    return tensors, float(total[-1]) / clients


def pseudorandom_words(secret: bytes, count: int) -> UInt64Array:
    """Words that cannot be distinguished from random ones without the secret: AES-256 in counter mode."""
    cipher = Cipher(algorithms.AES(sha256(secret).digest()), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype=np.uint64)


def shared_secret(private_key: bytes, public_key: bytes) -> bytes:
    """The secret that two clients share, from the private key of one and the public key of the other."""
    try:
        secret: bytes = generate_shared_key(bytes_to_private_key(private_key), bytes_to_public_key(public_key))
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm):
        raise InvalidMessage("a key came that is none of secure aggregation; the round is thrown away.") from None
    return secret


def pairwise_masks(private_key: bytes, client: int, public_keys: Mapping[int, bytes], count: int) -> UInt64Array:
    """The sum of a client's masks with other clients, whose public keys are given."""
    total = np.zeros(count, np.uint64)
    for other, public_key in public_keys.items():
        mask = pseudorandom_words(shared_secret(private_key, public_key), count)
        total = total + mask if client < other else total - mask
    return total


def address_bytes(sender: int, receiver: int) -> bytes:
    """The first bytes of encrypted shares, so that they cannot be given to another client or sent back."""
    return sender.to_bytes(8, "little") + receiver.to_bytes(8, "little")


def majority(clients: int) -> int:
    """The number of shares that reveal a secret: more than half, so that two groups cannot reveal two."""
    return clients // 2 + 1


def read_list(payload: RawPayload, name: str, kind: type[int] | type[bytes], sender: str) -> list[Any]:
    """A list of whole numbers, or of bytes of at most MAX_ITEM each, from a payload."""
    values = read_value(payload, name, list, sender)
    if not all(type(v) is kind and (isinstance(v, int) or len(v) <= MAX_ITEM) for v in values):
        raise InvalidMessage(
            f"{sender}: {name} must be a list of {kind.__name__}, got {values!r:.60}; take part again in another round."
        )
    return values


# a client -------------------------------------------------------------------------------------------------------


class SecureClient:
    """A client's part in one sum: its replies to the four stages; `secrets` holds what a later stage needs."""

    def __init__(self, secrets: Secrets, client: int, min_clients: int, sender: str) -> None:
        self.secrets, self.client, self.min_clients, self.sender = secrets, client, min_clients, sender

    def create_keys(self, sum_name: str, payload: RawPayload) -> Numbers:
        """Stage 1: the public keys of two new key pairs; `sum_name` says which sum all this is about."""
        pairs = {name: generate_key_pairs() for name in KEY_NAMES}
        public_keys = {name: public_key_to_bytes(public) for name, (_, public) in pairs.items()}
        self.secrets.clear()
        self.secrets.update(
            {f"{name}_private_key": private_key_to_bytes(private) for name, (private, _) in pairs.items()}
        )
        self.secrets.update(sum_name=sum_name, public_keys=list(public_keys.values()))
        return public_keys

    def share_secrets(self, sum_name: str, payload: RawPayload) -> Numbers:
        """Stage 2: encrypted shares of this client's secrets, for every client the ones that it shall hold."""
        clients, mask_keys, encryption_keys = (
            self._read_list(payload, name, kind)
            for name, kind in (("clients", int), ("mask", bytes), ("encryption", bytes))
        )
        self._check_stage(sum_name, "mask_private_key", "encryption_private_key")
        lengths_agree = len({*clients}) == len(clients) == len(mask_keys) == len(encryption_keys)
        all_different = len({*mask_keys, *encryption_keys}) / 2 == len(encryption_keys)
        own_keys = [self.client, *self.secrets["public_keys"]]
        if not (lengths_agree and all_different) or own_keys not in map(
            list, zip(clients, mask_keys, encryption_keys, strict=True)
        ):
            raise InvalidMessage(
                f"{self.sender}: keys came that are not one of each for {len(clients)} clients, this one's own among "
                "them; begin again."
            )
        if len(clients) < self.min_clients:
            raise InvalidMessage(
                f"{self.sender}: a sum of {len(clients)} clients was asked for, at least {self.min_clients} must hide "
                "each other; wait for more."
            )
        seed, needed = os.urandom(32), majority(len(clients))
        seed_shares = create_shares(seed, needed, len(clients))
        key_shares = create_shares(self.secrets["mask_private_key"], needed, len(clients))
        encrypted_shares = [
            encrypt(
                shared_secret(self.secrets["encryption_private_key"], public_key),
                address_bytes(self.client, receiver) + seed_share + key_share,
            )
            for receiver, public_key, seed_share, key_share in zip(
                clients, encryption_keys, seed_shares, key_shares, strict=True
            )
        ]
        self.secrets.update(seed=seed, clients=clients, mask_keys=mask_keys, encryption_keys=encryption_keys)
        return {"encrypted_shares": encrypted_shares}

    def mask(self, sum_name: str, payload: RawPayload, vector: UInt64Array) -> UInt64Array:
        """Stage 3: the vector under its masks; those with whom it is masked are the clients whose shares came."""
        present = self._read_list(payload, "present", int)
        encrypted_shares = self._read_list(payload, "encrypted_shares", bytes)
        self._check_stage(sum_name, "seed", "clients")
        if (
            not {self.client} <= {*present} <= {*self.secrets["clients"]}
            or len({*present}) != len(present)
            or len(present) != len(encrypted_shares)
        ):
            raise InvalidMessage(
                f"{self.sender}: shares came of clients that have no part in this sum; start the round again."
            )
        if len(present) < self._clients_needed():
            raise InvalidMessage(
                f"{self.sender}: {count_text(len(present), 'client is', 'clients are')} left, "
                "too few to hide each other; wait for more."
            )
        public_keys = dict(zip(self.secrets["clients"], self.secrets["mask_keys"], strict=True))
        others = {i: public_keys[i] for i in present if i != self.client}
        masked = (
            vector
            + pseudorandom_words(self.secrets["seed"], len(vector))
            + pairwise_masks(self.secrets["mask_private_key"], self.client, others, len(vector))
        )
        self.secrets.update(present=present, encrypted_shares=encrypted_shares)
        del self.secrets["seed"]  # so that no second vector gets the same mask
        return masked

    def reveal_shares(self, sum_name: str, payload: RawPayload) -> Numbers:
        """Stage 4: of every client one share, of its own mask if it answered, of its key if it did not."""
        answered = self._read_list(payload, "answered", int)
        self._check_stage(sum_name, "present", "encrypted_shares")
        if not {*answered} <= {*self.secrets["present"]} or len({*answered}) < self._clients_needed():
            raise InvalidMessage(
                f"{self.sender}: {count_text(len(answered), 'client')} answered, "
                "too few to tell their sum; start the round again."
            )
        public_keys = dict(zip(self.secrets["clients"], self.secrets["encryption_keys"], strict=True))
        shares = []
        for client, encrypted in zip(self.secrets["present"], self.secrets["encrypted_shares"], strict=True):
            both = self._decrypt_shares(client, public_keys[client], encrypted)
            shares.append(both[:SHARE_BYTES] if client in answered else both[SHARE_BYTES:])
        self.secrets.clear()  # so that a second question gets no second share
        return {"shares": shares}

    def _clients_needed(self) -> int:
        """The smallest number of clients whose sum this client helps to reveal."""
        return max(self.min_clients, majority(len(self.secrets["clients"])))

    def _decrypt_shares(self, owner: int, public_key: bytes, encrypted: bytes) -> bytes:
        """Both shares of another client's secrets; nothing if that client did not send them to this one."""
        try:
            both: bytes = decrypt(shared_secret(self.secrets["encryption_private_key"], public_key), encrypted)
        except InvalidToken:
            return b""
        address = address_bytes(owner, self.client)
        return both[len(address) :] if both.startswith(address) else b""

    def _check_stage(self, sum_name: str, *names: str) -> None:
        """Refuse a stage whose stages before were not of this sum: these secrets must be there."""
        if self.secrets.get("sum_name") != sum_name or not {*names} <= {*self.secrets}:
            raise InvalidMessage(
                f"{self.sender}: this stage of {sum_name} does not follow from what was asked before; "
                "it takes part again in another round."
            )

    def _read_list(self, payload: RawPayload, name: str, kind: type[int] | type[bytes]) -> list[Any]:
        return read_list(payload, name, kind, self.sender)


# the server -----------------------------------------------------------------------------------------------------


class Exchange(Protocol):
    """Sends payloads by client and returns what `read` makes of the replies, once enough of them came."""

    def __call__(
        self, kind: str, payloads: Mapping[int, Payload], enough: int, read: Callable[[RawPayload, str], T]
    ) -> dict[int, T]: ...


class SecureServer:
    """The server's part in one sum: four exchanges with the clients. `header` are numbers that begin every payload."""

    def __init__(self, exchange: Exchange, header: Numbers, min_clients: int) -> None:
        self.exchange, self.header, self.min_clients = exchange, header, min_clients

    def sum_vectors(self, training: Mapping[int, Payload], length: int, enough: int) -> tuple[list[int], Tensor]:
        """The clients whose vectors are in the sum, and the sum [length] in float64.

        `training` are the payloads that make clients train and send their vectors; of so many, `enough` may take part.
        """
        mask_keys, encryption_keys = self._collect_keys(list(training), enough)
        clients = list(mask_keys)
        encrypted_shares = self._collect_shares(mask_keys, encryption_keys)
        present = sorted(encrypted_shares)
        for_receiver = {i: [encrypted_shares[j][k] for j in present] for k, i in enumerate(clients)}
        payloads = {
            i: training[i]._replace(
                numbers={**training[i].numbers, "present": present, "encrypted_shares": for_receiver[i]}
            )
            for i in present
        }
        spec = {"masked": TensorSpec((length,), torch.int64)}
        read = lambda reply, sender: read_tensors(reply, spec, sender)["masked"].numpy().view("uint64")
        masked = self.exchange("train", payloads, len(present), read)
        self._check_left(masked, self._clients_needed(clients))
        shares = self._collect_revealed(sorted(masked), present, majority(len(clients)))
        total = from_fixed_point(unmask_sum(masked, mask_keys, shares, length))
        if bool((total.abs() > len(masked) * MAX_VALUE).any()):
            raise InvalidMessage(
                "a client gave false shares or false numbers to secure aggregation; the round is thrown away."
            )
        return list(masked), total

    def _collect_keys(self, clients: Sequence[int], enough: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Stage 1: the clients' public keys for masks and for encryption."""
        payloads = {i: Payload(self.header, {}) for i in clients}
        keys = self.exchange("train.keys", payloads, enough, read_public_keys)
        self._check_left(keys, self._clients_needed(keys))
        mask_keys, encryption_keys = ({i: keys[i][n] for i in sorted(keys)} for n in range(len(KEY_NAMES)))
        return mask_keys, encryption_keys

    def _collect_shares(
        self, mask_keys: Mapping[int, bytes], encryption_keys: Mapping[int, bytes]
    ) -> dict[int, list[bytes]]:
        """Stage 2: by sender the encrypted shares for all clients, in the order of their keys."""
        clients = list(mask_keys)
        keys = {"mask": list(mask_keys.values()), "encryption": list(encryption_keys.values())}
        payloads = {i: Payload({**self.header, "clients": clients, **keys}, {}) for i in clients}
        read = list_reader("encrypted_shares", len(clients))
        shares = self.exchange("train.shares", payloads, len(clients), read)
        self._check_left(shares, self._clients_needed(clients))
        return shares

    def _collect_revealed(self, answered: Sequence[int], present: Sequence[int], needed: int) -> dict[int, list[bytes]]:
        """Stage 4: by client the shares of the secret that has to be known of it."""
        payloads = {i: Payload({**self.header, "answered": list(answered)}, {}) for i in answered}
        revealed = self.exchange("train.unmask", payloads, needed, list_reader("shares", len(present)))
        self._check_left(revealed, needed)
        return {client: [shares[k] for shares in revealed.values()] for k, client in enumerate(present)}

    def _clients_needed(self, clients: Sequence[int] | Mapping[int, object]) -> int:
        """The smallest number of these clients whose sum may be revealed."""
        return max(self.min_clients, majority(len(clients)))

    def _check_left(self, clients: Sequence[int] | Mapping[int, object], needed: int) -> None:
        if len(clients) < needed:
            raise InvalidMessage(
                f"secure aggregation has {count_text(len(clients), 'client')} left, "
                f"at least {needed} are needed; the round is thrown away."
            )


def read_public_keys(payload: RawPayload, sender: str) -> list[bytes]:
    """A client's public keys, one for each of KEY_NAMES; a key that gives no secret with another one is refused."""
    own_key, keys = private_key_to_bytes(generate_key_pairs()[0]), list[bytes]()
    for name in KEY_NAMES:
        value = payload.numbers.get(name)
        key = value if isinstance(value, bytes) and len(value) <= MAX_ITEM else b""
        try:
            shared_secret(own_key, key)
        except InvalidMessage:
            raise InvalidMessage(
                f"{sender}: {name} must be a key of secure aggregation, got {value!r:.60}; "
                "it is left out of this round."
            ) from None
        keys.append(key)
    return keys


def list_reader(name: str, count: int) -> Callable[[RawPayload, str], list[bytes]]:
    """A function that reads a list of so many bytes objects from a payload."""

    def read(payload: RawPayload, sender: str) -> list[bytes]:
        values: list[bytes] = read_list(payload, name, bytes, sender)
        if len(values) != count:
            raise InvalidMessage(f"{sender}: {len(values)} {name} came, expected {count}; {SAME_SETUP}.")
        return values

    return read


def recover_secret(shares: Sequence[bytes], needed: int) -> bytes:
    """A secret from its shares, of which empty ones do not count."""
    given = [share for share in shares if share]
    try:
        secret: bytes = combine_shares(given) if len(given) >= needed else b""
    except (ValueError, IndexError):
        secret = b""
    if not secret:
        raise InvalidMessage("the shares of a secret do not fit together; the round is thrown away.")
    return secret


def unmask_sum(
    masked: Mapping[int, UInt64Array],
    mask_keys: Mapping[int, bytes],
    shares: Mapping[int, Sequence[bytes]],
    length: int,
) -> UInt64Array:
    """The sum [length] of the vectors of the clients that answered, from their masked vectors.

    `mask_keys` are the public keys of all clients; `shares` are, by each client that was masked with, those of one
    secret of it.
    """
    total = np.zeros(length, np.uint64)
    for vector in masked.values():
        total = total + vector
    for client, client_shares in shares.items():
        secret = recover_secret(client_shares, majority(len(mask_keys)))
        if client in masked:
            total = total - pseudorandom_words(secret, length)
        else:  # the clients that answered hold masks with this one
            total = total + pairwise_masks(secret, client, {i: mask_keys[i] for i in masked}, length)
    return total
