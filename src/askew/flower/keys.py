"""The keys of a federation: those of a certificate authority, of the server, and of every node.

- `ca.crt`, for every machine: whom to trust
- `ca.key`, for nobody, kept aside: it signs certificates
- `server.pem` and `server.key`, for the SuperLink: its TLS certificate
- `node-0` and `node-0.pub`, for SuperNode 0: the key that it signs its requests with; the public part is registered
  with the SuperLink
- `node-0.pem` and `node-0.key`, for SuperNode 0: the TLS certificate of its own port, which its own processes use

Files with secrets can be read by their owner alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..experiment.folder_lock import explain_write_errors
from . import require_flower

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, GeneralName, KeyUsage

LOCAL_HOSTS = ("localhost", "127.0.0.1")
VALID_DAYS = 365  # for which certificates are good
MAX_DAYS = 36_500  # no calendar ends before
CLOCK_DIFFERENCE = timedelta(hours=1)  # certificates are good this much earlier, as clocks of machines differ
HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", re.IGNORECASE)
MAX_HOST_NAME = 253  # characters


class KeyFiles(NamedTuple):
    """The files of a folder of keys."""

    folder: Path
    clients: int
    temporary: bool = False  # are they for one start alone, and removed after it?

    @property
    def ca_certificate(self) -> Path:
        return self.folder / "ca.crt"

    def private_key(self, client: int) -> Path:
        return self.folder / f"node-{client}"

    def public_key(self, client: int) -> Path:
        return self.folder / f"node-{client}.pub"

    def server_options(self) -> list[str]:
        """Options of the command that starts a SuperLink."""
        return self._tls_options("server")

    def node_options(self, client: int) -> list[str]:
        """Options of the command that starts a client's SuperNode."""
        trust = ["--root-certificates", str(self.ca_certificate)]
        sign = ["--auth-supernode-private-key", str(self.private_key(client))]
        return [*trust, *sign, *self._tls_options(f"node-{client}")]

    def _tls_options(self, name: str) -> list[str]:
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        trust = ["--ssl-ca-certfile", str(self.ca_certificate)]
        return [*trust, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]

    def files(self) -> dict[Path, bool]:
        """Every file, and whether it is a secret."""
        names = {"ca.crt": False, "ca.key": True, "server.pem": False, "server.key": True}
        for client in range(self.clients):
            node = f"node-{client}"
            names |= {node: True, f"{node}.pub": False, f"{node}.pem": False, f"{node}.key": True}
        return {self.folder / name: secret for name, secret in names.items()}


def make_keys(folder: Path, clients: int, hosts: Sequence[str] = (), days: int = VALID_DAYS) -> KeyFiles:
    """Write all keys of a federation whose server has these names and addresses; nothing is ever overwritten."""
    require_flower()
    if clients < 1 or not 1 <= days <= MAX_DAYS:
        raise ConfigError(
            f"keys: clients must be ≥ 1 and days from 1 to {MAX_DAYS:,}, got {clients} and {days}; "
            "for example --clients 3 --days 365."
        )
    keys, names = KeyFiles(folder, clients), [to_general_name(host) for host in dict.fromkeys([*hosts, *LOCAL_HOSTS])]
    if existing := [path.name for path in keys.files() if path.exists()]:
        raise ConfigError(
            f"{str(folder)!r} holds {', '.join(existing[:3])} already, and keys are never overwritten; "
            "name a new folder."
        )
    contents = generate_certificates(clients, names, days)
    for client in range(clients):
        contents |= generate_node_key(client)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, secret in keys.files().items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(contents[path.name])
    return keys


@contextmanager
def temporary_keys(clients: int) -> Iterator[KeyFiles]:
    """Keys for one federation on this machine, in a folder that its user alone can read and that is removed after."""
    with TemporaryDirectory(prefix="askew-keys-", ignore_cleanup_errors=True) as folder:
        yield make_keys(Path(folder), clients)._replace(temporary=True)


def generate_certificates(clients: int, server_names: Sequence[GeneralName], days: int) -> dict[str, bytes]:
    """Contents by file name: the certificates and keys of the authority, the server and all nodes."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    def to_pem(key: EllipticCurvePrivateKey) -> bytes:
        return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    authority_key = generate_private_key(SECP384R1())
    authority = make_certificate("askew certificate authority", authority_key, days)
    contents = {"ca.crt": authority.public_bytes(Encoding.PEM), "ca.key": to_pem(authority_key)}
    local_names = [to_general_name(host) for host in LOCAL_HOSTS]
    for name in ("server", *(f"node-{client}" for client in range(clients))):
        key, names = generate_private_key(SECP384R1()), server_names if name == "server" else local_names
        certificate = make_certificate(f"askew {name}", key, days, names, (authority, authority_key))
        contents |= {f"{name}.pem": certificate.public_bytes(Encoding.PEM), f"{name}.key": to_pem(key)}
    return contents


def generate_node_key(client: int) -> dict[str, bytes]:
    """Contents by file name: the key pair with which a client's node signs its requests."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = generate_private_key(SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    return {f"node-{client}": private, f"node-{client}.pub": public}


def make_certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    days: int,
    hosts: Sequence[GeneralName] = (),
    signer: tuple[Certificate, EllipticCurvePrivateKey] | None = None,
) -> Certificate:
    """A certificate of a server that is reached by these hosts; without a signer, of an authority that signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    is_authority = signer is None
    issuer, issuer_key = (subject, key) if signer is None else (signer[0].subject, signer[1])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_DIFFERENCE)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(key_usage(is_authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(issuer_key, SHA384())


def key_usage(is_authority: bool) -> KeyUsage:
    """What a certificate's key may do: an authority's signs certificates, any other signs connections."""
    from cryptography.x509 import KeyUsage

    return KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def to_general_name(host: str) -> GeneralName:
    """A host's name or address in the form that certificates have for it."""
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not HOST_NAME.fullmatch(host) or len(host) > MAX_HOST_NAME:
            raise ConfigError(
                f"--host must be a name or an address without a port, got {host!r}; "
                "for example server.example.org or 10.0.0.5."
            ) from None
        return x509.DNSName(host)
