"""A key of a tunnel and its certificate, made for one start of a job."""

from __future__ import annotations

import datetime
import secrets
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

from unisono.errors import LaunchError

_DAYS = 365
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME: the certificate itself is known, and clocks of hosts differ


def make(folder: Path) -> tuple[Path, str]:
    """A file in `folder` with a new private key and its certificate, and the certificate alone. The folder should be
    readable by this user only. LaunchError where nothing here can make them."""
    path = folder / "tunnel.pem"
    path.touch(0o600, exist_ok=False)
    name = f"unisono {secrets.token_hex(16)}"  # of its own: OpenSSL looks certificates up by name
    certificate = _by_openssl(path, name) or _by_cryptography(path, name)
    if not certificate:
        raise LaunchError(
            "--encrypt makes a key on every host, and here is neither a command openssl that does nor the Python "
            "package cryptography: install one of them"
        )
    return path, certificate


def _by_openssl(path: Path, name: str) -> str:
    """ "" where there is no such command, or one that is too old."""
    settings = path.with_suffix(".cnf")  # the system's may be missing, and old versions want one
    settings.write_text("[req]\ndistinguished_name = name\n[name]\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path)]
    words = ["openssl", "req", "-x509", *key, "-subj", f"/CN={name}", "-days", str(_DAYS), "-config", str(settings)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode or "BEGIN CERTIFICATE" not in done.stdout:
        return ""
    with path.open("a") as file:
        file.write(done.stdout)
    return done.stdout


def _by_cryptography(path: Path, name: str) -> str:
    """ "" where the package is missing."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        return ""
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(named).issuer_name(named).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=_DAYS))
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    kept = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_text(key.private_bytes(serialization.Encoding.PEM, *kept).decode() + certificate)
    return certificate


def context(protocol: int, own: Path, trusted: Sequence[str]) -> ssl.SSLContext:
    """For TLS 1.3 in which both ends have one of the trusted certificates."""
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= _NO_CHECK_TIME
    made.load_cert_chain(own)
    made.load_verify_locations(cadata="".join(trusted))
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        made.num_tickets = 0
    return made
