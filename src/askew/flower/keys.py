"""Who may talk to whom: a certificate authority, the server's certificate, and a key pair for every node.

    ca.crt                     every machine: whom to trust
    ca.key                     nobody: kept aside, it signs certificates
    server.pem, server.key     the SuperLink: its TLS certificate
    node-0, node-0.pub         SuperNode 0: the key that it signs its requests with; the public part is registered with the SuperLink
    node-0.pem, node-0.key     SuperNode 0: the TLS certificate of its own port, which its own processes use, on its own machine

Files with secrets can be read by their owner alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..experiment.store import explain_write_errors
from . import require_flower

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, GeneralName

HOSTS = ("localhost", "127.0.0.1")
DAYS = 365
EARLIER = timedelta(hours=1)  # clocks differ
NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", re.IGNORECASE)


class Keys(NamedTuple):
    """The files of a folder of keys."""

    folder: Path
    clients: int

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def server(self) -> list[str]:
        """What a SuperLink is started with."""
        return self._tls("server")

    def node(self, client: int) -> list[str]:
        """What a client's SuperNode is started with."""
        return [
            "--root-certificates",
            str(self.ca),
            "--auth-supernode-private-key",
            str(self.private(client)),
            *self._tls(f"node-{client}"),
        ]

    def private(self, client: int) -> Path:
        return self.folder / f"node-{client}"

    def public(self, client: int) -> Path:
        return self.folder / f"node-{client}.pub"

    def _tls(self, name: str) -> list[str]:
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        return ["--ssl-ca-certfile", str(self.ca), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]

    def files(self) -> dict[Path, bool]:
        """Every file, and whether it is a secret."""
        names = {"ca.crt": False, "ca.key": True, "server.pem": False, "server.key": True}
        for client in range(self.clients):
            names |= {
                f"node-{client}": True,
                f"node-{client}.pub": False,
                f"node-{client}.pem": False,
                f"node-{client}.key": True,
            }
        return {self.folder / name: secret for name, secret in names.items()}


def make_keys(folder: Path, clients: int, hosts: Sequence[str] = (), days: int = DAYS) -> Keys:
    """Write all keys of a federation whose server is reached by these names and addresses; nothing is ever overwritten."""
    require_flower()
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    if clients < 1 or days < 1:
        raise ConfigError(f"keys: clients and days must be ≥ 1, got {clients} and {days}; for example --clients 3.")
    names = [general(host) for host in dict.fromkeys([*hosts, *HOSTS])]
    keys = Keys(folder, clients)
    if there := [path.name for path in keys.files() if path.exists()]:
        raise ConfigError(
            f"{str(folder)!r} holds {', '.join(there[:3])} already, and keys are never overwritten; name a new folder."
        )

    def pem(key: EllipticCurvePrivateKey) -> bytes:
        return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    authority = generate_private_key(SECP384R1())
    root = certificate("askew certificate authority", authority, days)
    found = {"ca.crt": root.public_bytes(Encoding.PEM), "ca.key": pem(authority)}
    for name in ("server", *(f"node-{client}" for client in range(clients))):
        key = generate_private_key(SECP384R1())
        reached = names if name == "server" else [general(host) for host in HOSTS]
        found[f"{name}.pem"] = certificate(f"askew {name}", key, days, reached, (root, authority)).public_bytes(
            Encoding.PEM
        )
        found[f"{name}.key"] = pem(key)
    for client in range(clients):
        own = generate_private_key(SECP384R1())
        found[f"node-{client}"] = own.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        found[f"node-{client}.pub"] = own.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, secret in keys.files().items():
            with os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb"
            ) as file:
                file.write(found[path.name])
    return keys


def certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    days: int,
    reached: Sequence[GeneralName] = (),
    signer: tuple[Certificate, EllipticCurvePrivateKey] | None = None,
) -> Certificate:
    """A certificate of a server that is reached by these names; without a signer, of an authority that signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    issuer, secret = (subject, key) if signer is None else (signer[0].subject, signer[1])
    signs = signer is None
    usage = x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(secret.public_key()), critical=False)
    )
    if not signs:
        built = built.add_extension(x509.SubjectAlternativeName(reached), critical=False)
        built = built.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return built.sign(secret, SHA384())


def general(host: str) -> GeneralName:
    """A host as a certificate names it."""
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not NAME.fullmatch(host) or len(host) > 253:
            raise ConfigError(
                f"--host must be a name or an address without a port, got {host!r}; for example server.example.org or 10.0.0.5."
            ) from None
        return x509.DNSName(host)
