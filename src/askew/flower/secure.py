"""Secure aggregation: the server learns the sum of the clients' vectors and none of them, also where some do not answer.

A client i hides its vector by a mask of its own and by one with every other client j, which the two add and subtract:

    y_i = v_i + PRG(b_i) + Σ_{j>i} PRG(s_ij) − Σ_{j<i} PRG(s_ij)          in whole numbers modulo 2^64

The others hold shares of b_i and of the key that s_ij comes from. When the y_i are in, they hand out the share of b_i of those who
answered and of the key of those who did not, never both, and the server takes the masks off the sum.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, with a graph that is complete and
against a server that is curious but keeps to the protocol. Keys, shares and encryption are those of Flower; its masks are not used, as
they come from 32 bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from hashlib import sha256
from typing import Any

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

from .wire import Numbers, RawPayload, Refused, told

Words = np.ndarray[Any, np.dtype[np.uint64]]
Vault = MutableMapping[str, Any]  # what a client keeps between the stages: in memory, never in a file

ONE = 2.0**32  # how a number is written as a whole one
LARGEST = 2.0**20  # of a number
SHARE = 4 + 48  # bytes of a share of 32 secret ones


def pressed(t: Tensor) -> Words:
    """Numbers as whole ones modulo 2^64, to the nearest 2^-33."""
    if not bool((t.abs() < LARGEST).all()):
        raise Refused(
            f"an upload has numbers of {LARGEST:g} and more, or none at all, which cannot be summed; lower the learning rate."
        )
    return (t.detach().cpu().double() * ONE).round().long().numpy().view(np.uint64)


def unpressed(words: Words) -> Tensor:
    return torch.from_numpy(words.view(np.int64).astype(np.float64)) / ONE


def stream(secret: bytes, count: int) -> Words:
    """Words that nobody can tell from random ones without the secret."""
    cipher = Cipher(algorithms.AES(sha256(secret).digest()), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype=np.uint64)


def agreed(private: bytes, public: bytes) -> bytes:
    """The secret of two clients."""
    try:
        secret: bytes = generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public))
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm):
        raise Refused("a key came that is none of secure aggregation; the round is thrown away.") from None
    return secret


def between(private: bytes, own: int, others: Mapping[int, bytes], count: int) -> Words:
    """The masks of a client with others."""
    total = np.zeros(count, np.uint64)
    for other, public in others.items():
        mask = stream(agreed(private, public), count)
        total = total + mask if own < other else total - mask
    return total


def way(sender: int, receiver: int) -> bytes:
    """How a letter between two clients begins, so that it cannot be handed to another or sent back."""
    return sender.to_bytes(8, "little") + receiver.to_bytes(8, "little")


def majority(clients: int) -> int:
    """Shares that open a secret: more than half, so that two groups cannot open two."""
    return clients // 2 + 1


# a client -------------------------------------------------------------------------------------------------------


class Hidden:
    """A client's part in one sum: four answers to four letters."""

    def __init__(self, vault: Vault, client: int, fewest: int, sender: str) -> None:
        self.vault, self.client, self.fewest, self.sender = vault, client, fewest, sender

    def keys(self, place: str, letter: RawPayload) -> Numbers:
        """Two new keys: for masks, and for letters to other clients."""
        pairs = {name: generate_key_pairs() for name in ("mask", "letter")}
        self.vault.clear()
        public = {name: public_key_to_bytes(key) for name, (_, key) in pairs.items()}
        self.vault.update({name: private_key_to_bytes(key) for name, (key, _) in pairs.items()})
        self.vault.update(place=place, own=list(public.values()))
        return public

    def shares(self, place: str, letter: RawPayload) -> Numbers:
        """Shares of the own secrets, to each client its own, sealed."""
        clients, masks, letters = (
            self._list(letter, name, kind) for name, kind in (("clients", int), ("mask", bytes), ("letter", bytes))
        )
        self._at(place, "mask", "letter")
        whole = len({*clients}) == len(clients) == len(masks) == len(letters) == len({*masks, *letters}) / 2
        if not whole or [self.client, *self.vault["own"]] not in map(list, zip(clients, masks, letters, strict=True)):
            raise Refused(
                f"{self.sender}: keys came that are not one of each for {len(clients)} clients, this one's own among them; begin again."
            )
        if len(clients) < self.fewest:
            raise Refused(
                f"{self.sender}: a sum of {len(clients)} clients was asked for, at least {self.fewest} must hide each other; wait for more."
            )
        seed, least = os.urandom(32), majority(len(clients))
        pairs = zip(
            create_shares(seed, least, len(clients)),
            create_shares(self.vault["mask"], least, len(clients)),
            strict=True,
        )
        sealed = [
            encrypt(agreed(self.vault["letter"], key), way(self.client, to) + one + other)
            for to, key, (one, other) in zip(clients, letters, pairs, strict=True)
        ]
        self.vault.update(seed=seed, clients=clients, masks=masks, letters=letters)
        return {"sealed": sealed}

    def hide(self, place: str, letter: RawPayload, vector: Words) -> Words:
        """The vector under its masks; the clients that are masked with are those whose shares came."""
        present, sealed = self._list(letter, "present", int), self._list(letter, "sealed", bytes)
        self._at(place, "seed", "clients")
        if (
            not {self.client} <= {*present} <= {*self.vault["clients"]}
            or len({*present}) != len(present)
            or len(present) != len(sealed)
        ):
            raise Refused(
                f"{self.sender}: shares came of clients that have no part in this sum; start the round again."
            )
        if len(present) < max(self.fewest, majority(len(self.vault["clients"]))):
            raise Refused(f"{self.sender}: {len(present)} clients are left, too few to hide each other; wait for more.")
        public = dict(zip(self.vault["clients"], self.vault["masks"], strict=True))
        others = {i: public[i] for i in present if i != self.client}
        hidden = (
            vector
            + stream(self.vault["seed"], len(vector))
            + between(self.vault["mask"], self.client, others, len(vector))
        )
        self.vault.update(present=present, sealed=sealed)
        del self.vault["seed"]  # one vector, one mask
        return hidden

    def unmask(self, place: str, letter: RawPayload) -> Numbers:
        """Of every client the share of one secret: of its own mask if it answered, of its key if it did not."""
        answered = self._list(letter, "answered", int)
        self._at(place, "present", "sealed")
        if not {*answered} <= {*self.vault["present"]} or len({*answered}) < max(
            self.fewest, majority(len(self.vault["clients"]))
        ):
            raise Refused(
                f"{self.sender}: {len(answered)} clients answered, too few to tell their sum; start the round again."
            )
        letters = dict(zip(self.vault["clients"], self.vault["letters"], strict=True))
        opened = [
            self._opened(i, letters[i], t) for i, t in zip(self.vault["present"], self.vault["sealed"], strict=True)
        ]
        shares = [
            both[:SHARE] if i in answered else both[SHARE:]
            for i, both in zip(self.vault["present"], opened, strict=True)
        ]
        self.vault.clear()  # asked once, told once
        return {"shares": shares}

    def _opened(self, sender: int, key: bytes, sealed: bytes) -> bytes:
        """Both shares of another client, or nothing if that is no letter of it to this one."""
        try:
            both: bytes = decrypt(agreed(self.vault["letter"], key), sealed)
        except InvalidToken:
            return b""
        head = way(sender, self.client)
        return both[len(head) :] if both.startswith(head) else b""

    def _at(self, place: str, *names: str) -> None:
        if self.vault.get("place") != place or not {*names} <= {*self.vault}:
            raise Refused(
                f"{self.sender}: this stage of {place} does not follow from what was asked before; it takes part again in another round."
            )

    def _list(self, letter: RawPayload, name: str, kind: type[int] | type[bytes]) -> list[Any]:
        return texts(letter, name, kind, self.sender)


def check_keys(letter: RawPayload, names: Sequence[str], sender: str) -> None:
    """Refuse keys that no other client could agree on a secret with."""
    own = private_key_to_bytes(generate_key_pairs()[0])
    for name in names:
        value = letter.numbers.get(name)
        try:
            agreed(own, value if isinstance(value, bytes) and len(value) <= 1_000 else b"")
        except Refused:
            raise Refused(
                f"{sender}: {name} must be a key of secure aggregation, got {value!r:.60}; it is left out of this round."
            ) from None


def texts(letter: RawPayload, name: str, kind: type[int] | type[bytes], sender: str) -> list[Any]:
    """A list of one kind; no text in it is long."""
    values = told(letter, name, list, sender)
    if not all(type(v) is kind and (isinstance(v, int) or len(v) <= 1_000) for v in values):
        raise Refused(
            f"{sender}: {name} must be a list of {kind.__name__}, got {values!r:.60}; take part again in another round."
        )
    return values


# the server -----------------------------------------------------------------------------------------------------


def whole(parts: Sequence[bytes], least: int) -> bytes:
    """A secret from its shares."""
    given = [part for part in parts if part]
    try:
        secret: bytes = combine_shares(given) if len(given) >= least else b""
    except (ValueError, IndexError):
        secret = b""
    if not secret:
        raise Refused("the shares of a secret do not fit together; the round is thrown away.")
    return secret


def unmasked(
    hidden: Mapping[int, Words], masks: Mapping[int, bytes], shares: Mapping[int, Sequence[bytes]], count: int
) -> Words:
    """The sum of the vectors: of those who answered; `shares` are of all who were masked with, `masks` everybody's public keys."""
    total = np.zeros(count, np.uint64)
    for one in hidden.values():
        total = total + one
    for client, parts in shares.items():
        secret = whole(parts, majority(len(masks)))
        # those who answered hold masks with one who did not
        mask = (
            between(secret, client, {i: masks[i] for i in hidden}, count)
            if client not in hidden
            else -stream(secret, count)
        )
        total = total + mask
    return total
